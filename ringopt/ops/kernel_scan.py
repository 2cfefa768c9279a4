"""A recurrence that a kernel computes, over ranks: the kernel runs on the tokens of a rank, from the state before them.

    (M, U) of each segment, all-gathered and composed in one order on all ranks; or, where the state is in no affine way
    made of that before, from one segment to the next, each when that before it is done.

The backward mirrors it: V of each segment, the gradient of its first state by way of its own outputs, composed from the
end; then the kernel's own backward with the right gradient of its last state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.distributed.mesh import Mesh
from ringopt.errors import OptionError
from ringopt.ops.segment_messages import PostedSegments, SegmentMessages
from ringopt.scans.kernel import frame_of
from ringopt.scans.segment_map import Frame, SegmentMap, wide
from ringopt.scans.state_axes import Axis
from ringopt.scans.trace import OperandKind
from ringopt.torch_compat.autograd import never_compiled, recording

# Of the largest entry: by how much a state may differ from the composed one.
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}
Run = Callable[..., tuple[Any, Tensor]]


@dataclass(frozen=True)
class AffineState:
    """The state behind tokens is M S + U, of that before them.

    axes      of each dim of the state: "point" where each index has a coefficient of its own, "mixed" where M sums over
              it, "free" where all have the same M
    additive  the places among xs of what U is made of: where they are zeros, so is U
    """

    axes: tuple[Axis, ...]
    additive: tuple[int, ...]


@dataclass
class Segment:
    """Consecutive tokens of this rank: what the kernel was given and gave, with its graph. `others`: xs, and what all
    tokens share."""

    number: int
    state: Tensor
    others: list[Tensor]
    outputs: list[Tensor]
    last: Tensor


@dataclass
class KernelScan:
    """`run(state, *xs, *shared)` gives what has tokens along `dim`, as xs have, and the last state; all tokens share
    `shared`."""

    run: Run
    affine: AffineState | None
    dim: int
    layout: Layout
    mesh: Mesh
    shared: Sequence[Tensor] = ()
    trusted: bool = False  # whether an earlier call, of the same sizes, has held the kernel against its map
    placed: bool = False  # whether `run` is told which tokens of the sequence it has, as `at`
    single: bool = False  # whether the kernel gives one tensor beside the state
    besides: list[str] = field(default_factory=list)  # the sizes of what it learns and was not given

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every segment, of all ranks."""
        layout = self.layout
        return [layout.edge(at + 1) - layout.edge(at) for at in range(layout.chunks_per_rank * layout.ranks)]

    @cached_property
    def mine(self) -> list[int]:
        """The segments of this rank that have tokens."""
        return [number for number in self.layout.chunks(self.mesh.rank) if self.lengths[number]]

    def cut(self, tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """The tokens of each of its segments."""
        parts = [x.split([self.lengths[number] for number in self.mine], self.dim) for x in tensors]
        return {number: [x[at] for x in parts] for at, number in enumerate(self.mine)}

    def frame(self, state: Tensor) -> Frame:
        assert self.affine is not None
        return frame_of(self.affine.axes, OperandKind.of(state))

    # ---- the kernel --------------------------------------------------------------------------------------------------
    def segment(self, number: int, state: Tensor, xs: Sequence[Tensor], learned: Sequence[bool]) -> Segment:
        """The kernel on the tokens of a segment; which of (state, *xs, *shared) are `learned`."""
        with recording() if any(learned) else torch.no_grad():
            given = (state, *xs, *self.shared)
            leaves = [x.detach().requires_grad_(wants) for x, wants in zip(given, learned, strict=True)]
            given, last = self.run_at(number, *leaves)
            self.single = isinstance(given, Tensor)
            outputs = [given] if isinstance(given, Tensor) else list(given)
        self.besides += learns_besides([*outputs, last], leaves)
        return Segment(number, leaves[0], leaves[1:], outputs, last)

    def run_at(self, number: int, *given: Tensor) -> tuple[Any, Tensor]:
        """The kernel, on what is given of a segment."""
        at = (self.layout.edge(number), self.layout.edge(number + 1))
        return self.run(*given, at=at) if self.placed else self.run(*given)

    def map_of(self, number: int, frame: Frame, xs: Sequence[Tensor]) -> SegmentMap:
        """(M, U) of the tokens of a segment."""
        assert self.affine is not None
        kind, (point, mixed, free) = frame.stage.kind, frame.sizes
        zero = torch.zeros(kind.shape, dtype=kind.dtype, device=xs[0].device)
        alone = [torch.zeros_like(x) if at in self.affine.additive else x for at, x in enumerate(xs)]
        eye, columns = torch.eye(mixed, dtype=kind.dtype, device=zero.device), []
        for first in range(0, mixed, max(free, 1)):
            probe, some = zero.new_zeros(mixed, free), eye[:, first : first + free]
            probe[:, : some.shape[1]] = some
            state = frame.outward(probe.expand(point, mixed, free))
            through = self.run_at(number, state, *alone, *self.shared)[1]
            columns.append(frame.inward(through)[:, :, : some.shape[1]])
        return SegmentMap(torch.cat(columns, 2), frame.inward(self.run_at(number, zero, *xs, *self.shared)[1]))

    # ---- forward -----------------------------------------------------------------------------------------------------
    def posted_maps(self, state: Tensor, xs: Sequence[Tensor]) -> PostedSegments:
        """The maps of this rank's segments, under way."""
        frame, cut = self.frame(state), self.cut(xs)
        with torch.no_grad():
            maps = {number: self.map_of(number, frame, cut[number]) for number in self.mine}
            numbers, none = self.layout.chunks(self.mesh.rank), frame.identity(state)
            return self.messages.post([frame.flat(maps.get(number, none)) for number in numbers], "maps of a scan")

    def forward(
        self, state: Tensor, xs: Sequence[Tensor], learned: Sequence[bool], posted: PostedSegments | None = None
    ) -> tuple[list[Segment], tuple[Tensor, list[Tensor]]]:
        """The segments of this rank; the last state and the matrices of all segments. `posted`: its maps, where they
        are under way."""
        cut = self.cut(xs)
        if self.affine is None:
            return self.in_turn(state, cut, learned)
        frame = self.frame(state)
        posted = posted or self.posted_maps(state, xs)
        with torch.no_grad():
            every = [frame.read(message) for message in self.messages.arrived(posted)]
            states = [frame.inward(state)]
            for of in every:
                states.append(frame.apply(of, states[-1]))
        if not bool(torch.stack(states).isfinite().all()):  # a product of gates may overflow where no state does
            return self.in_turn(state, cut, learned)
        segments = [self.segment(at, frame.outward(states[at]), cut[at], learned) for at in self.mine]
        off = []
        for each in () if self.trusted else segments:
            composed, offset = states[each.number + 1], every[each.number].offset
            largest = max(float(x.abs().max()) for x in (composed, states[each.number], offset))
            off.append(float((frame.inward(each.last.detach()) - composed).abs().max()) / max(largest, 1e-30))
        self.hold_against(off, (state, *xs))
        return segments, (frame.outward(states[-1]), [of.matrix for of in every])

    def in_turn(
        self, state: Tensor, cut: dict[int, list[Tensor]], learned: Sequence[bool]
    ) -> tuple[list[Segment], tuple[Tensor, list[Tensor]]]:
        """Each segment when that before it is done; no matrices."""
        segments = []
        for number, tokens in enumerate(self.lengths):
            if number in cut:
                segments.append(self.segment(number, state, cut[number], learned))
                state = segments[-1].last.detach().to(state.dtype)
            state = self.from_holder(number, state) if tokens else state
        self.hold_against([], (state,))
        return segments, (state, [])

    def hold_against(self, off: Sequence[float], operands: Sequence[Tensor]) -> None:
        """Raises OptionError on all ranks where on one the kernel ended elsewhere than its map, by `off` of the largest
        entry, or learns what it was not given. The coarsest of the operands says what is rounding."""
        if self.trusted:
            return
        mine = torch.tensor([max(off, default=0.0), float(bool(self.besides))], device=self.mesh.device)
        worst, besides = torch.stack(self.mesh.all_gather(mine, "scan")).amax(0).tolist()
        if besides:
            raise OptionError(
                "scan_kernel: the kernel reads a tensor with a gradient that is not among its operands "
                f"({', '.join(self.besides)}); what it learns has to be among xs"
            )
        if not worst <= max(CLOSE.get(x.dtype, 0.0) for x in operands):
            raise OptionError(
                f"scan_kernel: the last state of the kernel is {worst:.2g} from that of its map, relative to the "
                "largest entry. Its state is not affine in the way that is told (axes, additive); without `affine` the "
                "ranks run one after the other"
            )

    # ---- backward ----------------------------------------------------------------------------------------------------
    def backward(
        self, segments: list[Segment], matrices: list[Tensor], outputs: Sequence[Tensor], last: Tensor
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """The gradient of the first state, the same on all ranks, and those of xs, segment by segment."""
        mine, given = {each.number: each for each in segments}, self.cut(outputs)
        found = dict[int, list[Tensor]]()
        if not matrices:
            for number in reversed(range(len(self.lengths))):
                if number in mine:
                    last, *found[number] = gradients(mine[number], given[number], last)
                last = self.from_holder(number, last) if self.lengths[number] else last
            return last, [found[number] for number in self.mine]
        frame = self.frame(last)
        zero = torch.zeros_like(frame.inward(last))
        own = {number: frame.inward(gradients(each, given[number], None)[0]) for number, each in mine.items()}
        messages = [own.get(number, zero) for number in self.layout.chunks(self.mesh.rank)]
        now = frame.inward(last)
        every = self.messages.gathered(messages, "gradients of a scan")
        for number in reversed(range(len(self.lengths))):
            if number in mine:
                found[number] = gradients(mine[number], given[number], frame.outward(now))[1:]
            now = every[number] + frame.apply_back(matrices[number], now)
        return frame.outward(now), [found[number] for number in self.mine]

    # ---- between the ranks -------------------------------------------------------------------------------------------
    @property
    def messages(self) -> SegmentMessages:
        return SegmentMessages(self.layout, self.mesh)

    def from_holder(self, number: int, state: Tensor) -> Tensor:
        """What the rank that holds a segment has, on all ranks."""
        message = state.to(wide(state.dtype)).contiguous()
        return self.mesh.all_gather(message, "states of a scan")[self.layout.holder(number)].to(state.dtype)


def gradients(of: Segment, outputs: Sequence[Tensor], last: Tensor | None) -> list[Tensor]:
    """Of the state, of each x and of what all share; without that of the last state, of the state alone, and the graph
    is kept."""
    pairs = [*zip(of.outputs, outputs, strict=True), *([] if last is None else [(of.last, last.to(of.last.dtype))])]
    pairs = [(out, grad) for out, grad in pairs if out.requires_grad]
    leaves = [of.state] if last is None else [of.state, *of.others]
    found = {place: torch.zeros_like(x) for place, x in enumerate(leaves)}
    asked = [place for place, x in enumerate(leaves) if x.requires_grad]
    if pairs and asked:
        results, given = zip(*pairs, strict=True)
        how: dict[str, Any] = {"retain_graph": last is None, "allow_unused": True, "materialize_grads": True}
        with recording():  # for backwards that compute a forward again
            grads = torch.autograd.grad(results, [leaves[place] for place in asked], given, **how)
        found.update(zip(asked, grads, strict=True))
    return list(found.values())


def learns_besides(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[str]:
    """The sizes of tensors that outputs are made of, and that learn, beside the leaves."""
    pending, seen, found = [x.grad_fn for x in outputs if x.grad_fn is not None], set[Any](), list[str]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is each for each in leaves):
            found.append(str(list(leaf.shape)))
        pending += [each for each, _ in node.next_functions if each is not None]
    return found


class OverRanks(torch.autograd.Function):
    """apply(scan, state, *xs) -> *outputs, last state."""

    @staticmethod
    def forward(ctx: Any, scan: KernelScan, state: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        needed = ctx.needs_input_grad[1:]
        with scan.mesh.unbroken():
            segments, (last, matrices) = scan.forward(state, xs, (any(needed), *needed[1:]))
        ctx.scan, ctx.segments, ctx.matrices = scan, segments, matrices
        columns = zip(*(segment.outputs for segment in segments), strict=True)
        return *(torch.cat([x.detach() for x in parts], scan.dim) for parts in columns), last.clone()

    @staticmethod
    @never_compiled
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        scan, *outputs = ctx.scan, *grads[:-1]
        with scan.mesh.unbroken():
            of_state, of_xs = scan.backward(ctx.segments, ctx.matrices, outputs, grads[-1])
        return None, of_state, *(torch.cat(parts, scan.dim) for parts in zip(*of_xs, strict=True))
