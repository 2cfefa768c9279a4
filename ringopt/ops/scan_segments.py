"""A scan over ranks that hold consecutive steps each, in one segment or several.

Forward    (M, U) of each segment: what its steps make of any state. One all-gather of both; every rank composes them in
           the order of the steps, so all have the same bits of every state between segments. Then each rank runs its
           steps from the right states. Of the first segment, whose state before is known, the state behind takes the
           place of U, and there is no M; of the last there is neither, and who reads the last state is told it when
           all is done.
Backward   V of each segment: the gradient of its first state by way of its own outputs. One all-gather of V; every rank
           composes the transposed maps from the end. Then each rank walks back over its steps from the right gradients.
           M is kept from the forward, and never differentiated. (A program for any number of ranks keeps none, for
           how many there are is no number in it: M is made and gathered again.) Of the last segment V is the gradient
           itself; of the first there is none. That of the state before all steps is its holder's part of a sum.

What travels has the size of the state, however many steps there are. Where the step is affine in stages (a running
maximum first, then what it scales), each level is an exchange of its own: forward in order, backward in reverse.

The first all-gather of each direction may be posted before the rest is run (`posted_maps`, `posted_gradients`), and
travel behind what needs no state between segments.

A product of many gates may overflow where no state does (0 times inf is no number). What is composed is the same on all
ranks, so they see it alike, and hand the states themselves on, from one segment to the next: each is run when that
before it is done. So it is with a step that is not affine, and the backward mirrors it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan, prod

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.distributed.mesh import Mesh
from ringopt.ops.segment_messages import PostedSegments, SegmentMessages
from ringopt.scans.affine import AffineStep, Stage
from ringopt.scans.segment_map import Frame, SegmentMap, wide
from ringopt.scans.steps import Recurrence, ResultGradients, Tensors

Level = Sequence[Stage]


@dataclass(frozen=True)
class Run:
    """What a segment made of the carries at its `start`; `states` are those between its steps, where they are kept."""

    start: list[Tensor]
    last: list[Tensor]
    ys: list[Tensor]
    states: Tensors


@dataclass(frozen=True, eq=False)
class SegmentedScan:
    """The steps of this rank: `xs` has its rows, segment by segment."""

    affine: AffineStep
    xs: Tensors
    consts: Tensors
    layout: Layout
    mesh: Mesh
    keeps: bool = True  # the matrices of the segments between, for the backward
    ends: bool = True  # whether the last carries are read
    states: bool = False  # whether those between all steps are kept for the backward

    @cached_property
    def lengths(self) -> list[int]:
        """Steps of every segment, of all ranks."""
        layout = self.layout
        return [layout.edge(at + 1) - layout.edge(at) for at in range(layout.chunks_per_rank * layout.ranks)]

    @cached_property
    def mine(self) -> dict[int, Recurrence]:
        """The segments of this rank, by number."""
        numbers = self.layout.chunks(self.mesh.rank)
        cuts = [x.split([self.lengths[number] for number in numbers]) for x in self.xs]
        return {
            number: Recurrence(self.affine.text, rows, self.consts)
            for number, *rows in zip(numbers, *cuts, strict=True)
        }

    @property
    def messages(self) -> SegmentMessages:
        return SegmentMessages(self.layout, self.mesh)

    # ---- forward -----------------------------------------------------------------------------------------------------
    @property
    def last(self) -> int:
        """The number of the last segment. Those between the first and the last have maps."""
        return len(self.lengths) - 1

    def forward(
        self, init: Tensors, posted: PostedSegments | None = None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The last carries, the same on all ranks, NaN where they are not read; the ys of this rank; what the backward
        needs: for each carry the states before the segments of this rank (or before and behind each of their steps),
        then for each the matrices of the segments between. `posted`: the maps of the first level, where they are under
        way."""
        starts, end = {number: list(init) for number in self.mine}, list(init)
        matrices, composed = [x.new_empty(0) for x in init], list[Tensor]()
        for level in self.affine.levels:
            posted = posted or self.posted_maps(level, starts)
            for stage, maps in zip(level, self.maps_of(level, posted), strict=True):
                frame, place = Frame(stage), stage.place
                state = frame.inward(init[place])
                for number, of in enumerate(maps):
                    if number in starts:
                        starts[number][place] = frame.outward(state)
                    if number < self.last and self.lengths[number]:
                        state = frame.apply(of, state) if number else of.offset
                        composed.append(numbers_of(stage, state))
                end[place] = frame.outward(state)
                matrices[place] = kept_matrices(stage, maps[1:-1] if self.keeps else [], frame.inward(init[place]))
            posted = None
        if self.affine.levels and all_finite(composed):
            found = {number: self.run_from(start, number) for number, start in starts.items()}
        else:
            found, end = self.handed_on(init)
        if self.ends:
            finals = self.broadcast(self.last, end, lambda number, _: found[number].last)
        else:
            finals = [x.new_full(x.shape, nan) for x in init]
        ys = [torch.cat(parts) for parts in zip(*(each.ys for each in found.values()), strict=True)]
        if self.states:
            before = [torch.cat(states) for states in zip(*(each.states for each in found.values()), strict=True)]
        else:
            before = [torch.stack(states) for states in zip(*(each.start for each in found.values()), strict=True)]
        return [x.clone() for x in finals], ys, [*before, *matrices]

    def run_from(self, start: list[Tensor], number: int) -> Run:
        """A segment of this rank, from the carries before it."""
        room = self.mine[number].room(start) if self.states else ()
        last, ys, _ = self.mine[number].run_keeping(start, room)
        return Run(start, last, ys, room)

    def handed_on(self, init: Tensors) -> tuple[dict[int, Run], list[Tensor]]:
        """The segments of this rank, and the states before the last of all: each is run when that before it is done."""
        state, found = list(init), dict[int, Run]()
        for number in range(len(self.lengths)):
            if number in self.mine:
                found[number] = self.run_from(state, number)
            if number < self.last:
                state = self.broadcast(number, state, lambda at, _: found[at].last)
        return found, state

    def broadcast(
        self, number: int, state: list[Tensor], run: Callable[[int, list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """What the rank that holds a segment makes of `state`, on all ranks."""
        if not self.lengths[number]:
            return state
        found = run(number, state) if number in self.mine else state
        message = torch.cat([x.reshape(-1).to(wide(x.dtype)) for x in found])
        of_holder = self.mesh.all_gather(message, "states of a scan")[self.layout.holder(number)]
        parts = of_holder.split([x.numel() for x in state])
        return [part.view(x.shape).to(x.dtype) for part, x in zip(parts, state, strict=True)]

    def posted_first(self, init: Tensors) -> PostedSegments | None:
        """The maps of the first level, under way."""
        return self.posted_maps(self.affine.levels[0], {number: list(init) for number in self.mine})

    def posted_maps(self, level: Level, starts: dict[int, list[Tensor]]) -> PostedSegments | None:
        """Those of this rank's segments, under way; nothing where there is one segment."""
        frames, dtype = [Frame(stage) for stage in level], message_dtype(level)
        if not self.last:
            return None

        def map_of(frame: Frame, number: int, steps: Recurrence) -> SegmentMap:
            earlier = [starts[number][at] for at in frame.stage.earlier]
            if 0 < number < self.last:
                return frame.of_steps(earlier, steps.xs, steps.consts)
            nothing = frame.identity(self.xs[0])
            if number:
                return nothing
            state = starts[0][frame.stage.place]
            return replace(nothing, offset=frame.behind(state, earlier, steps.xs, steps.consts))

        def message_of(number: int, steps: Recurrence) -> Tensor:
            maps = (map_of(frame, number, steps) for frame in frames)
            return torch.cat([frame.flat(of, self.whole).to(dtype) for frame, of in zip(frames, maps, strict=True)])

        return self.messages.post([message_of(number, steps) for number, steps in self.mine.items()], "maps of a scan")

    @property
    def whole(self) -> bool:
        """Whether maps have matrices: not where no segment is between the first and the last."""
        return self.last > 1

    def maps_of(self, level: Level, posted: PostedSegments | None) -> list[list[SegmentMap]]:
        """Of each stage, those of all segments."""
        frames = [Frame(stage) for stage in level]
        if posted is None:
            return [[frame.identity(self.xs[0])] for frame in frames]
        sizes = [frame.numbers(self.whole) for frame in frames]
        cut = [message.split(sizes) for message in self.messages.arrived(posted)]
        return [
            [frame.read(parts[at].to(wide(frame.stage.kind.dtype)), self.whole) for parts in cut]
            for at, frame in enumerate(frames)
        ]

    # ---- backward ----------------------------------------------------------------------------------------------------
    def walk_back(self, kept: Tensors, given: ResultGradients) -> WayBack:
        """The backward as far as no other rank is needed for it."""
        rows = [steps.count + 1 if self.states else 1 for steps in self.mine.values()]
        states = zip(*(x.split(rows) for x in kept[: len(given.like)]), strict=True)
        return WayBack(self, given, list(map(list, states)))

    def backward(
        self, back: WayBack, kept: Tensors, wanted: Sequence[int], posted: PostedSegments | None = None
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """This rank's parts of the gradients of the carries before the first step, and of consts; the gradients of its
        xs. Of xs and consts those `wanted` by their place. `posted`: the gradients of states that are composed first,
        where they are under way."""
        given, starts = back.given, back.starts
        carries, composed = len(given.like), list[Tensor]()
        for level in reversed(self.affine.levels):
            posted = posted or back.posted_gradients(level)
            matrices = self.matrices(level, kept[carries:], dict(zip(self.mine, starts, strict=True)))
            stages = zip(level, matrices, *back.of_segments(level, posted), strict=True)
            for stage, matrix, own, derivatives in stages:
                frame, place = Frame(stage), stage.place
                gradient = frame.inward(given.finals[place])
                for number in reversed(range(len(self.lengths))):
                    if number in back.finals:
                        back.finals[number][place] = frame.outward(gradient)
                    if not number or not self.lengths[number]:
                        continue
                    if number == self.last:
                        gradient = own[number]
                    else:
                        of = derivatives[number] if stage.form == "max-plus" else matrix[number - 1]
                        gradient = own[number] + frame.apply_back(of, gradient)
                    composed.append(gradient)
            posted = None
        if not self.affine.levels or not all_finite(composed):
            back.handed_on()
        return back.of_operands(wanted)

    def matrices(self, level: Level, kept: Tensors, starts: dict[int, list[Tensor]]) -> list[Sequence[Tensor]]:
        """Of each stage, those of the segments between; of a max-plus stage there are none."""
        if self.keeps or self.last < 2 or all(stage.form == "max-plus" for stage in level):
            return [kept[stage.place].unbind(0) for stage in level]
        maps = self.maps_of(level, self.posted_maps(level, starts))
        return [[of.matrix for of in each[1:-1]] for each in maps]


class WayBack:
    """`finals`: of each segment of this rank the gradients of the carries behind it; 0 where they are not known yet.
    Behind the last they are."""

    def __init__(self, scan: SegmentedScan, given: ResultGradients, before: Sequence[list[Tensor]]):
        self.scan, self.given, self.starts = scan, given, [[x[0] for x in states] for states in before]
        cuts = [y.split([steps.count for steps in scan.mine.values()]) for y in given.ys]
        self.ys = dict(zip(scan.mine, zip(*cuts, strict=True) if cuts else [()] * len(scan.mine), strict=True))
        self.states = {
            number: [x[:-1] for x in states] if scan.states else steps.states([x[0] for x in states])
            for (number, steps), states in zip(scan.mine.items(), before, strict=True)
        }
        self.finals = {number: [torch.zeros_like(x) for x in given.like] for number in scan.mine}
        if scan.last in scan.mine:
            self.finals[scan.last] = list(given.finals)

    def shapes_of(self, level: Level) -> list[tuple[int, ...]]:
        """Of the parts of a message: a gradient of each stage, then of each max-plus stage by how much it comes
        through."""
        return [Frame(stage).parts[1] for stage in (*level, *tropical(level))]

    def posted_gradients(self, level: Level) -> PostedSegments | None:
        """Of this rank's segments, by way of their own outputs, under way; nothing where there is one segment."""
        if not self.scan.last:
            return None
        dtype, shapes = message_dtype(level), self.shapes_of(level)

        def message_of(number: int) -> Tensor:
            if not number:
                return self.given.like[0].new_zeros(sum(map(prod, shapes)), dtype=dtype)
            own = self.walked(number, self.finals[number], self.ys[number])
            parts = [Frame(stage).inward(own[stage.place]) for stage in level]
            for stage in tropical(level):
                ones = [torch.full_like(x, float(at == stage.place)) for at, x in enumerate(self.given.like)]
                through = self.walked(number, ones, [torch.zeros_like(y) for y in self.ys[number]])
                parts.append(Frame(stage).inward(through[stage.place]))
            return torch.cat([part.reshape(-1).to(dtype) for part in parts])

        return self.scan.messages.post([message_of(number) for number in self.scan.mine], "gradients of a scan")

    def of_segments(self, level: Level, posted: PostedSegments | None) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Of each stage, for all segments: the gradient of the first state by way of the segment's own outputs, and of
        a max-plus stage by how much a state comes through it; wide, as frames have them."""
        if posted is None:
            return [[] for _ in level], [[] for _ in level]
        shapes = self.shapes_of(level)
        cut = [message.split(list(map(prod, shapes))) for message in self.scan.messages.arrived(posted)]
        columns = [[parts[at].view(shape) for parts in cut] for at, shape in enumerate(shapes)]
        through = dict(zip([stage.place for stage in tropical(level)], columns[len(level) :], strict=True))
        return columns[: len(level)], [through.get(stage.place, []) for stage in level]

    def handed_on(self) -> None:
        """All `finals`; each segment is walked over when that behind it is done."""
        gradient = list(self.given.finals)
        for number in reversed(range(len(self.scan.lengths))):
            if number in self.finals:
                self.finals[number] = gradient
            if number:
                gradient = self.scan.broadcast(number, gradient, lambda at, now: self.walked(at, now, self.ys[at]))

    def walked(self, number: int, finals: Tensors, ys: Tensors) -> list[Tensor]:
        """The gradients of the carries before a segment."""
        of = ResultGradients(finals, ys, self.given.like)
        return self.scan.mine[number].gradients(self.states[number], of, ()).init

    def of_operands(self, wanted: Sequence[int]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Those of the first carries, of xs and of consts, now that all `finals` are known."""
        scan, like = self.scan, self.given.like
        found = {
            number: steps.gradients(
                self.states[number], ResultGradients(self.finals[number], self.ys[number], like), wanted
            )
            for number, steps in scan.mine.items()
        }
        of_init = found[0].init if 0 in found else [torch.zeros_like(x) for x in like]
        join = {place: torch.cat if place < len(like) + len(scan.xs) else summed_up for place in wanted}
        return of_init, {place: join[place]([each.others[place] for each in found.values()]) for place in wanted}


def tropical(level: Level) -> list[Stage]:
    """Those that take a maximum."""
    return [stage for stage in level if stage.form == "max-plus"]


def numbers_of(stage: Stage, state: Tensor) -> Tensor:
    """Those of a state that have to be finite: a maximum over nothing is -inf."""
    return state if stage.form == "linear" else state.clamp(min=torch.finfo(state.dtype).min)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Asked once."""
    return not tensors or bool(torch.stack([x.isfinite().all() for x in tensors]).all())


def summed_up(parts: Sequence[Tensor]) -> Tensor:
    """Of the segments of a rank."""
    return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)


def kept_matrices(stage: Stage, maps: Sequence[SegmentMap], like: Tensor) -> Tensor:
    """[segments between, ...]; none of a max-plus stage."""
    found = [of.matrix for of in maps] if stage.form == "linear" else []
    return torch.stack(found) if found else like.new_empty(0, *Frame(stage).parts[0])


def message_dtype(level: Level) -> torch.dtype:
    """One for all stages of a level: the widest."""
    return torch.float64 if any(stage.kind.dtype == torch.float64 for stage in level) else torch.float32
