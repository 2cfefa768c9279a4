"""Bodies at sizes that are numbers: what each value of a step is, and the gradient of a step as a graph.

Traced once for a text and the kinds of its operands, and kept. An operator runs below autograd and perhaps within modes
that trace, count or fake, all of which are of its thread; what is traced here is traced in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from threading import Lock
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.errors import first_line
from ringopt.ir.nodes import outputs_of
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.output.printable import logger
from ringopt.scans.body import Body, NoBody, from_text
from ringopt.torch_compat.fake_tensors import FakeTensorMode, threads_may_fake
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.operators import UNSAFE_VIEW
from ringopt.torch_compat.schema import OpOverload, schema_of

log = logger(__name__)
aten = torch.ops.aten
VIEWS = (aten.detach.default, aten.expand.default, aten.view.default, aten.reshape.default, UNSAFE_VIEW)
T = TypeVar("T")


@dataclass(frozen=True)
class OperandKind:
    """All of an operand of a step that its graph depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: Tensor, stacked: bool = False) -> OperandKind:
        """Of `x`, or of a row of it. An open size is the one at hand."""
        return cls(tuple(map(at_hand, x.shape[int(stacked) :])), x.dtype, x.device.type)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def in_pairs(self) -> OperandKind:
        """Of complex numbers, as pairs of real ones."""
        return OperandKind((*self.shape, 2), self.dtype.to_real(), self.device)

    def without_numbers(self) -> Tensor:
        """A fake tensor of a mode of its own, for threads that share a text share its fakes, and no mode runs two
        operators at once."""
        with FakeTensorMode():
            return self.empty()

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    @property
    def floats(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype.is_floating_point


Kinds = tuple[OperandKind, ...]


def kinds_of(init: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor]) -> Kinds:
    """Of the inputs of the body, from the operands of a scan."""
    rows = (OperandKind.of(x, stacked=True) for x in xs)
    return (*map(OperandKind.of, init), *rows, *map(OperandKind.of, consts))


_one_traces = Lock()  # torch's tracers are not made for two threads


def in_own_thread(function: Callable[[], T]) -> T:
    """`function()` in a thread of its own, where nothing of this one is on. Not to be called within it."""
    threads_may_fake()
    with _one_traces, ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@lru_cache(maxsize=1024)
def sized(text: str, kinds: Kinds) -> Body:
    """The body with the fake value of every node. Raises NoBody where a carry changes its kind in a step, and for what
    cannot be run on such operands."""
    body = from_text(text)
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.module.graph, {}))
    known = replace(body, module=fx.GraphModule(body.module, graph))
    try:
        in_own_thread(lambda: _note_values(known.module, kinds))
    except Exception as error:
        raise NoBody(f"the body does not run on {', '.join(map(_shown, kinds))}: {error}") from error
    for place, (out, kind) in enumerate(zip(known.outputs, kinds[: body.carries], strict=False)):
        if (found := OperandKind.of(out.meta["val"])) != kind:
            raise NoBody(f"carry {place} is {_shown(kind)} before a step and {_shown(found)} behind it", out)
    return known


def _note_values(module: fx.GraphModule, kinds: Kinds) -> None:
    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["val"] = value = super().run_node(n)
            return value

    with FakeTensorMode(), torch.no_grad():
        Noting(module).run(*(kind.empty() for kind in kinds))


def _shown(kind: OperandKind) -> str:
    return f"{list(kind.shape)} {str(kind.dtype).removeprefix('torch.')}"


def kinds_out(text: str, kinds: Kinds) -> Kinds:
    """Of what a step returns: the carries, then the ys."""
    return tuple(OperandKind.of(out.meta["val"]) for out in sized(text, kinds).outputs)


@lru_cache(maxsize=1024)
def gradient_of(text: str, kinds: Kinds, wanted: tuple[int, ...], given: tuple[int, ...]) -> fx.GraphModule:
    """`(*inputs of the body, *gradients of its outputs `given`) -> gradients of the inputs `wanted``."""
    body, inputs, results = from_text(text), len(kinds), kinds_out(text, kinds)

    def gradient(*operands: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(place in wanted) for place, x in enumerate(operands[:inputs])]
        found = body.module(*leaves)
        outs = [(found[place], grad) for place, grad in zip(given, operands[inputs:], strict=True)]
        outs = [(out, grad) for out, grad in outs if out.requires_grad]
        asked = [leaves[place] for place in wanted]
        if not outs or not asked:
            return [torch.zeros_like(x) for x in asked]
        given_outs, grads = zip(*outs, strict=True)
        return list(torch.autograd.grad(given_outs, asked, grads, allow_unused=True, materialize_grads=True))

    def traced() -> fx.GraphModule:
        with FakeTensorMode():
            operands = [kind.empty() for kind in (*kinds, *(results[place] for place in given))]
            return make_fx(gradient, tracing_mode="real")(*operands)

    module = in_own_thread(traced)
    without_idle_views(module.graph)
    module.recompile()
    return module


@lru_cache(maxsize=1024)
def many_steps(step: fx.GraphModule, count: int, front: Kinds, behind: Kinds, rows: int) -> fx.GraphModule | None:
    """`step(*rows, *consts, *behind)` of `count` steps at once: all but the consts are stacked. `front` are the kinds
    of rows and consts, of a step. A graph, for modes that look at what is computed do not take vmap's tensors. None
    where vmap does not take an operator of the step (a flip of a number)."""
    dims = (*(0 if place < rows else None for place in range(len(front))), *(0 for _ in behind))

    def traced() -> fx.GraphModule:
        with FakeTensorMode(), torch.no_grad():
            operands = [
                torch.empty(kind.shape if dim is None else (count, *kind.shape), dtype=kind.dtype)
                for kind, dim in zip((*front, *behind), dims, strict=True)
            ]
            return make_fx(torch.func.vmap(step, dims), tracing_mode="real")(*operands)

    try:
        module = in_own_thread(traced)
    except Exception as error:  # whatever an operator raises there: the step itself has run
        log.info("steps one after the other: %s", first_line(error))
        return None
    without_idle_views(module.graph)
    module.recompile()
    return module


@lru_cache(maxsize=1024)
def writes(step: fx.GraphModule) -> bool:
    """Whether an operator of it writes into an operand, which many steps at once could not do."""
    targets = (node.target for node in step.graph.nodes)
    return any(isinstance(target, OpOverload) and schema_of(target).is_mutable for target in targets)


def without_idle_views(graph: fx.Graph) -> None:
    """Views that change nothing go: a step has few numbers, and each call of an operator takes time of its own. Others
    are reshapes, for a row of an operand need not be contiguous, as it was here."""
    for node in list(graph.nodes):
        if node.target in VIEWS and node.args[0].meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
        elif node.target in (aten.view.default, UNSAFE_VIEW):
            node.target = aten.reshape.default
    graph.eliminate_dead_code()


@lru_cache(maxsize=1024)
def some_outputs(text: str, first: int, last: int) -> fx.GraphModule:
    """`(*inputs of the body) -> its outputs `first` to `last``, and no more than these need."""
    whole = from_text(text).module.graph
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(whole, values)
    graph.output(tuple(values[out] for out in outputs_of(whole)[first:last]))
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)
