"""What becomes of a program's recurrences, without ranks and without a compiler: a second or less a program.

A scan that is found has to be right in three ways: the rolled graph has the numbers and gradients of the program; where
its step is called affine, the maps of its later steps make of another state what the steps make of it; and where it is
called many along a dim, half of that dim makes half of the results. The last two are what ranks build on.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.frontend.capture import capture
from ringopt.ir.refusal import GraphRefused
from ringopt.ops import operators
from ringopt.options import Options
from ringopt.passes import with_options
from ringopt.passes.find_scan import FindScan
from ringopt.passes.find_substitution import FindSubstitution
from ringopt.passes.normalize import Normalize
from ringopt.pipeline import Context, Pipeline
from ringopt.scans.affine import AffineStep, Stage, prove_affine
from ringopt.scans.body import from_text
from ringopt.scans.call import is_scan
from ringopt.scans.independent import independent_dims
from ringopt.scans.segment_map import Frame
from ringopt.scans.trace import kinds_of
from tests.generated.drawing import INVALID, Program
from tests.harness.capturing import results

PASSES = (Normalize(), FindSubstitution(), FindScan())
NEAR = 1e-8  # relative to the largest entry, in float64


def verdict(program: Program) -> str:
    """none, scan: no scan, or right ones. invalid: eager fails, or finds no finite numbers. Else what is wrong."""
    try:
        inputs = program.inputs()
        outputs = len(program(*inputs))
    except INVALID:
        return "invalid"
    try:
        return verdict_of_graph(as_graph(program, len(inputs), outputs), inputs)
    except GraphRefused:
        return "none"
    except Exception as error:  # any is what the sweep is for
        return f"crash: {type(error).__name__}: {error}"


def as_graph(program: Program, inputs: int, outputs: int) -> fx.GraphModule:
    """A graph of one call, which capture flattens: no Dynamo, which takes longer than all else."""

    def run(*operands: Tensor) -> tuple[Tensor, ...]:
        return program(*operands)

    graph = fx.Graph()
    call = graph.call_function(run, tuple(graph.placeholder(f"x{at}") for at in range(inputs)))
    graph.output(tuple(graph.call_function(operator.getitem, (call, at)) for at in range(outputs)))
    return fx.GraphModule(torch.nn.Module(), graph)


def verdict_of_graph(gm: fx.GraphModule, inputs: list[Any]) -> str:
    """Of the operators that a program calls."""
    context = Context(Options(), mesh_of("pretend:0/2"))
    flat = capture(gm, inputs).begin(context)
    Pipeline(with_options(PASSES, context.options)).run(flat, context)
    if not any(map(is_scan, flat.graph.nodes)):
        return "none"
    expected = results(gm, inputs)
    if not all(x is None or x.isfinite().all() for x in expected):
        return "invalid"
    if any(map(apart, results(flat, inputs), expected)):
        return "wrong: the rolled graph has other numbers"
    with torch.no_grad():
        wrong = Checked(flat).faults(inputs)
    return f"wrong: {wrong[0]}" if wrong else "scan"


def apart(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two are not the same to rounding."""
    if one is None or other is None:
        # (Of an input that a rolled graph reads by a factor of zero there may be a gradient of zeros, or none.)
        there = one if other is None else other
        return there is not None and bool(there.ne(0).any())
    one, other = one.double(), other.double()
    largest = float(other.abs().nan_to_num(posinf=0, neginf=0).max()) if other.numel() else 0.0
    return not torch.allclose(one, other, rtol=NEAR, atol=NEAR * max(1.0, largest), equal_nan=True)


class Checked(fx.Interpreter):
    """Runs a rolled graph, and looks at each scan in it."""

    def faults(self, inputs: Sequence[Any]) -> list[str]:
        self.found = list[str]()
        self.run(*inputs)
        return self.found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is operators.scan.default:
            init, xs, consts, text = args
            self.found += [*of_maps(init, xs, consts, text), *of_halves(init, xs, consts, text)]
        return super().call_function(target, args, kwargs)


def of_maps(init: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor], text: str) -> Iterator[str]:
    """Where a step is proved affine: the steps behind the first, from a state that they do not come from."""
    proof = prove_affine(text, kinds_of(init, xs, consts))
    later = [x[1:] for x in xs]
    if not isinstance(proof, AffineStep) or not later[0].shape[0]:
        return
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in init]
    behind = stepped(state, later, consts, text)
    for stage in (stage for level in proof.levels for stage in level):
        if apart(by_map(stage, state, later, consts), behind[stage.place]):
            yield f"carry {stage.place} is not {stage.form} with axes {stage.axes}: {text}"


def by_map(stage: Stage, state: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor]) -> Tensor:
    """What the map of the steps makes of a state."""
    frame = Frame(stage)
    of = frame.of_steps([state[place] for place in stage.earlier], xs, consts)
    return frame.outward(frame.apply(of, frame.inward(state[stage.place])))


def of_halves(init: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor], text: str) -> Iterator[str]:
    """Along each dim of which a step knows no other index: half of it has other numbers, and the other half gives the
    same."""
    generator = torch.Generator().manual_seed(1)
    wanted = stepped(init, xs, consts, text)
    for along in independent_dims(text, kinds_of(init, xs, consts)):
        dims, half = iter(along.inputs), along.size // 2

        def changed(x: Tensor, dim: int | None, half: int = half) -> Tensor:
            if dim is None:
                return x
            kept, other = x.narrow(dim, 0, half), x.narrow(dim, half, x.shape[dim] - half)
            return torch.cat([kept, torch.rand(other.shape, generator=generator).to(x.dtype)], dim)

        start = [changed(x, next(dims)) for x in init]
        rows = [changed(x, behind(next(dims))) for x in xs]
        shared = [changed(x, next(dims)) for x in consts]
        found = stepped(start, rows, shared, text)
        places = [*along.outputs[: len(init)], *map(behind, along.outputs[len(init) :])]
        for one, other, dim in zip(found, wanted, places, strict=True):
            if dim is not None and apart(one.narrow(dim, 0, half), other.narrow(dim, 0, half)):
                yield f"indices of a dim of {along.size} know each other: {text}"


def stepped(init: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor], text: str) -> list[Tensor]:
    """The last carries and the stacked ys, by the body alone, one step after the other."""
    body, state, ys = from_text(text), list(init), list[Sequence[Tensor]]()
    for rows in zip(*xs, strict=True):
        found = body.module(*state, *rows, *consts)
        state = list(found[: body.carries])
        ys.append(found[body.carries :])
    return [*state, *map(torch.stack, zip(*ys, strict=True))]


def behind(dim: int | None) -> int | None:
    """A dim of a row, among those of rows stacked."""
    return None if dim is None else dim + 1
