"""The steps of a scan, one after the other, and their gradient from the last to the first.

Where steps are small, only what is carried goes step by step: what a step gives besides, and the gradients of its
operands, are computed for many steps at once, from the states before them. Large steps are computed whole, each while
its values are in the caches of a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.ir.nodes import outputs_of
from ringopt.scans.body import from_text
from ringopt.scans.in_place import StepRoles, kinds_in, repeated_step, roles_of
from ringopt.scans.trace import Kinds, OperandKind, gradient_of, kinds_of, kinds_out, many_steps, some_outputs, writes

Tensors = Sequence[Tensor]
# Bytes of the operands of the steps that are computed at once: on CPUs what caches hold, elsewhere what launches are
# worth.
AT_ONCE = {"cpu": 2**22}
AT_ONCE_ELSEWHERE = 2**26
LARGE = {"cpu": 2**15}  # bytes of the operands of a step that is computed faster whole, for it stays in the caches
FEW = 4  # steps that are not worth a graph of their own


@dataclass(frozen=True)
class Recurrence:
    """Consecutive steps of the scan of `text`: a row of each of `xs` is a step."""

    text: str
    xs: Tensors
    consts: Tensors

    @property
    def count(self) -> int:
        return self.xs[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.xs[0].device

    def of(self, some: slice) -> Tensors:
        """The xs of some steps, stacked."""
        return [x[some] for x in self.xs]

    def kinds(self, init: Tensors) -> Kinds:
        """Of the operands of a step."""
        return kinds_of(init, self.xs, self.consts)

    def parts(self, kinds: Kinds, computed: Callable[[], Sequence[fx.GraphModule]]) -> list[tuple[slice, bool]]:
        """The steps in parts, and whether `computed` takes all of a part at once. Such parts have few sizes, powers of
        two, for each takes a graph of its own; of consts there is a gradient a step. Others go step by step."""
        device, each = self.device.type, max(1, sum(kind.bytes for kind in kinds))
        most = 0 if each > LARGE.get(device, each) else AT_ONCE.get(device, AT_ONCE_ELSEWHERE) // each
        found, first, left = list[tuple[slice, bool]](), 0, self.count
        if min(most, left) >= FEW and any(map(writes, computed())):
            most = 0
        while (some := min(most, left)) >= FEW:
            size = 1 << (some.bit_length() - 1)
            found.append((slice(first, first + size), True))
            first, left = first + size, left - size
        return [*found, (slice(first, self.count), False)] if left else found

    def at_once(self, step: fx.GraphModule, some: slice, states: Tensors, *behind: Tensors) -> list[Tensor]:
        """`step(*states, *xs, *consts, *behind)` of some steps, stacked; `states` and `behind` have these alone."""
        rows, more = [*states, *(x[some] for x in self.xs)], [x for each in behind for x in each]
        front, last = kinds_of((), rows, self.consts), kinds_of((), more, ())
        together = many_steps(step, some.stop - some.start, front, last, len(rows))
        if together is not None:
            return list(together(*rows, *self.consts, *more))
        places = range(some.stop - some.start)
        each = (step(*(x[place] for x in rows), *self.consts, *(x[place] for x in more)) for place in places)
        return [torch.stack(found) for found in zip(*each, strict=True)]

    # ---- forward -----------------------------------------------------------------------------------------------------
    def run(self, init: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """The carries behind the last step, and the ys of all steps; new tensors."""
        last, ys, _ = self.run_keeping(init, ())
        return last, ys

    def room(self, init: Tensors) -> list[Tensor]:
        """For the carries before and behind each step, those before the first in their place."""
        return stack_of(init, slice(0, self.count), 0)

    def run_keeping(self, init: Tensors, kept: Tensors) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """`run`, and the carries before each step, stacked, where there is room for them."""
        carries, kinds, step = len(init), self.kinds(init), from_text(self.text).module
        stacked = [torch.empty((self.count, *y.shape), dtype=y.dtype, device=self.device)
                   for y in kinds_out(self.text, kinds)[carries:]]  # fmt: skip
        given = some_outputs(self.text, carries, carries + len(stacked))
        state = list(init)
        for some, together in self.parts(kinds, lambda: (given,)):
            room = [x[some.start : some.stop + 1] for x in kept]
            if together:
                before, state = self.advance(state, some, room)
                for ys, found in zip(stacked, self.at_once(given, some, before), strict=True):
                    ys[some] = found
                continue
            roles = roles_of(carries, len(self.xs), len(self.consts), len(stacked), keeps=bool(room))
            results = [*(room or state), *(ys[some] for ys in stacked)]
            state = repeated_step(step, kinds, roles).run([*state, *self.of(some), *self.consts], results)
        return [fresh(x) for x in state], stacked, [x[:-1] for x in kept]

    def advance(self, state: Tensors, some: slice, room: Tensors = ()) -> tuple[list[Tensor], list[Tensor]]:
        """The carries before each of some steps, stacked, and those behind the last."""
        step, kept = some_outputs(self.text, 0, len(state)), room or stack_of(state, some, 0)
        roles = roles_of(len(state), len(self.xs), len(self.consts), 0, keeps=True)
        repeated_step(step, self.kinds(state), roles).run([*state, *self.of(some), *self.consts], kept)
        return [x[:-1] for x in kept], [x[-1] for x in kept]

    def states(self, init: Tensors) -> list[Tensor]:
        """The carries before each step, stacked."""
        return self.advance(init, slice(0, self.count))[0] if self.count else [x.new_empty(0, *x.shape) for x in init]

    # ---- backward ----------------------------------------------------------------------------------------------------
    def gradients(self, states: Tensors, given: ResultGradients, wanted: Sequence[int]) -> Found:
        """Of the operands, from the gradients of the results; `states` are those before each step, `wanted` the places
        among (init, xs, consts) of the xs and consts whose gradients are asked for."""
        kinds = self.kinds(given.like)
        way, carries = StepGradient(self.text, kinds, tuple(wanted)), len(given.like)
        of = {place: torch.empty((self.count, *kinds[place].shape), dtype=kinds[place].dtype, device=self.device)
              if place < carries + len(self.xs) else zeros(kinds[place], self.device) for place in wanted}  # fmt: skip
        state = list(given.finals)
        for some, together in reversed(self.parts(kinds, lambda: (way.direct, way.operands))):
            before, ys = [x[some] for x in states], [y[some] for y in given.ys]
            if together:
                behind, state = self.retreat(way, some, before, state, ys)
                found = self.at_once(way.operands, some, before, behind, ys) if wanted else []
                for place, grad in zip(wanted, found, strict=True):
                    if place < carries + len(self.xs):
                        of[place][some] = grad
                    else:
                        of[place] += grad.sum(0, dtype=of[place].dtype)
            else:
                state = self.step_by_step(way, some, before, state, ys, of)
        totals = {place: total.to(kinds[place].dtype) for place, total in of.items()}
        return Found([fresh(x) for x in state], totals)

    def step_by_step(
        self, way: StepGradient, some: slice, before: Tensors, behind: Tensors, ys: Tensors, of: dict[int, Tensor]
    ) -> list[Tensor]:
        """The gradients of the carries before some steps; those of the operands go into `of`."""
        stacked = len(before) + len(self.xs)
        inputs = [*before, *self.of(some), *self.consts, *behind, *ys]
        roles = StepRoles(
            (*["row"] * stacked, *["const"] * len(self.consts), *["carry"] * len(behind), *["row"] * len(ys)),
            (*["carry"] * len(behind), *("row" if place < stacked else "sum" for place in of)),
        )
        results = [total[some] if place < stacked else total for place, total in of.items()]
        return repeated_step(way.whole, kinds_in(inputs, roles), roles).run(inputs, [*behind, *results], backwards=True)

    def retreat(
        self, way: StepGradient, some: slice, before: Tensors, behind: Tensors, ys: Tensors
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of the carries behind each of some steps, stacked, and of those before the first."""
        own = self.at_once(way.direct, some, before, ys) if ys else []
        kept = stack_of(behind, some, -1)
        rows, carries = ["row"] * (len(before) + len(self.xs)), ["carry"] * len(behind)
        inputs = [*before, *self.of(some), *self.consts, *behind, *own]
        roles = StepRoles(
            (*rows, *["const"] * len(self.consts), *carries, *["row"] * len(own)), tuple(carries), keeps=True
        )
        step = WithAddends(way.back) if own else way.back
        repeated_step(step, kinds_in(inputs, roles), roles).run(inputs, kept, backwards=True)
        return [x[1:] for x in kept], [x[0] for x in kept]


@dataclass(frozen=True)
class StepGradient:
    """The gradient of a step by (*carries, *wanted), from the gradients of all results that are floating."""

    text: str
    kinds: Kinds
    wanted: tuple[int, ...]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the floating carries, and of the floating ys, among the results."""
        carries, results = from_text(self.text).carries, kinds_out(self.text, self.kinds)
        floating = [place for place, kind in enumerate(results) if kind.floats]
        return tuple(at for at in floating if at < carries), tuple(at for at in floating if at >= carries)

    @property
    def whole(self) -> fx.GraphModule:
        carried, ys = self.places
        return gradient_of(self.text, self.kinds, carried + self.wanted, carried + ys)

    @property
    def back(self) -> fx.GraphModule:
        """Of the carries, by way of the next ones."""
        carried, _ys = self.places
        return gradient_of(self.text, self.kinds, carried, carried)

    @property
    def direct(self) -> fx.GraphModule:
        """Of the carries, by way of the ys."""
        return gradient_of(self.text, self.kinds, *self.places)

    @property
    def operands(self) -> fx.GraphModule:
        """Of what is wanted, by way of both."""
        carried, ys = self.places
        return gradient_of(self.text, self.kinds, self.wanted, carried + ys)


@dataclass(frozen=True)
class WithAddends:
    """`step`, each of its outputs with an addend, which are its last inputs."""

    step: fx.GraphModule

    def __call__(self, *given: Tensor) -> list[Tensor]:
        addends = len(outputs_of(self.step.graph))
        return [x + y for x, y in zip(self.step(*given[:-addends]), given[-addends:], strict=True)]


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


def stack_of(carries: Tensors, some: slice, first: int) -> list[Tensor]:
    """Room for those before and behind each of some steps; `carries` are row `first`."""
    found = [x.new_empty((some.stop - some.start + 1, *x.shape)) for x in carries]
    for rows, x in zip(found, carries, strict=True):
        rows[first] = x
    return found


def zeros(kind: OperandKind, device: torch.device) -> Tensor:
    """For the sum of many gradients: of 16 bits, wider."""
    wide = torch.float32 if kind.dtype in (torch.float16, torch.bfloat16) else kind.dtype
    return torch.zeros(kind.shape, dtype=wide, device=device)


def fresh(x: Tensor) -> Tensor:
    """In memory of its own, which nothing else is a view of."""
    return x.clone(memory_format=torch.contiguous_format)
