"""The steps of a scan, one after the other, and their gradient from the last to the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.scans.body import from_text
from ringopt.scans.trace import Kinds, OperandKind, gradient_of, kinds_of, kinds_out

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Recurrence:
    """Consecutive steps of the scan of `text`: a row of each of `xs` is a step."""

    text: str
    xs: Tensors
    consts: Tensors

    @property
    def count(self) -> int:
        return self.xs[0].shape[0]

    def rows(self) -> Iterator[Tensors]:
        """The xs of each step."""
        return iter(list(zip(*(x.unbind(0) for x in self.xs), strict=True)))

    def kinds(self, init: Tensors) -> Kinds:
        """Of the operands of a step."""
        return kinds_of(init, self.xs, self.consts)

    # ---- forward -----------------------------------------------------------------------------------------------------
    def run(self, init: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """The carries behind the last step, and the ys of all steps; new tensors."""
        body, made = from_text(self.text), kinds_out(self.text, self.kinds(init))
        device = self.xs[0].device
        stacked = [torch.empty((self.count, *y.shape), dtype=y.dtype, device=device) for y in made[body.carries :]]
        state = list(init)
        for step, row in enumerate(self.rows()):
            found = body.module(*state, *row, *self.consts)
            state = list(found[: body.carries])
            for whole, y in zip(stacked, found[body.carries :], strict=True):
                whole[step] = y
        return [fresh(x) for x in state], stacked

    def states(self, init: Tensors) -> list[list[Tensor]]:
        """The carries before each step."""
        body, found = from_text(self.text), [list(init)]
        for row in self.rows():
            found.append(list(body.module(*found[-1], *row, *self.consts)[: body.carries]))
        return found[: self.count]

    # ---- backward ----------------------------------------------------------------------------------------------------
    def gradients(self, states: Sequence[Tensors], given: ResultGradients, wanted: Sequence[int]) -> Found:
        """Of the operands, from the gradients of the results; `states` are those before each step, `wanted` the places
        among (init, xs, consts) of the xs and consts whose gradients are asked for."""
        body = from_text(self.text)
        kinds = self.kinds(given.like)
        carried = [place for place in range(body.carries) if kinds[place].floats]
        stacked = [place for place in wanted if body.carries <= place < body.carries + body.xs]
        shared = [place for place in wanted if place >= body.carries + body.xs]
        step = gradient_of(self.text, kinds, (*carried, *stacked, *shared))
        state = list(given.finals)
        of_xs = {place: torch.empty_like(self.xs[place - body.carries], memory_format=torch.contiguous_format)
                 for place in stacked}  # fmt: skip
        of_consts = {place: zeros(kinds[place], self.xs[0].device) for place in shared}
        rows = list(self.rows())
        for number in reversed(range(self.count)):
            of_ys = (y[number] for y in given.ys)
            found = step(*states[number], *rows[number], *self.consts, *state, *of_ys)
            state = list(found[: len(carried)])
            for place, grad in zip((*stacked, *shared), found[len(carried) :], strict=True):
                if place in of_xs:
                    of_xs[place][number] = grad
                else:
                    of_consts[place] += grad
        totals = {place: total.to(kinds[place].dtype) for place, total in of_consts.items()}
        return Found([fresh(x) for x in state], {**of_xs, **totals})


@dataclass(frozen=True)
class ResultGradients:
    """Of the results that are floating: `finals` of the carries, `ys` stacked. `like` has the kinds of all carries."""

    finals: Tensors
    ys: Tensors
    like: Tensors


@dataclass(frozen=True)
class Found:
    """ResultGradients of the floating carries before the first step, and of other operands by their place."""

    init: list[Tensor]
    others: dict[int, Tensor]


def zeros(kind: OperandKind, device: torch.device) -> Tensor:
    """For the sum of many gradients: of 16 bits, wider."""
    wide = torch.float32 if kind.dtype in (torch.float16, torch.bfloat16) else kind.dtype
    return torch.zeros(kind.shape, dtype=wide, device=device)


def fresh(x: Tensor) -> Tensor:
    """In memory of its own, which nothing else is a view of."""
    return x.clone(memory_format=torch.contiguous_format)
