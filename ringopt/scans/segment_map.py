"""The map of a run of consecutive steps, S -> M S + U: made, applied, and applied backwards.

M is the linear part run on the identity. Along the free dims of the state stand columns of the identity, so no size in
the body changes, and M takes one run for as many mixed columns as there are free places. Of a max-plus stage M is what
is added to every element: the sum of its shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.scans.affine import Stage
from ringopt.scans.in_place import kinds_in, repeated_step, roles_of
from ringopt.scans.state_axes import Axis

ORDER: tuple[Axis, ...] = ("point", "mixed", "free")


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which maps travel and are composed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class SegmentMap:
    """`matrix` [point, mixed, mixed] and `offset` [point, mixed, free]; of a max-plus stage both have a number for each
    element. Both wide."""

    matrix: Tensor
    offset: Tensor


@dataclass(frozen=True)
class Frame:
    """A state of `stage` seen as [point, mixed, free]."""

    stage: Stage

    @property
    def dims(self) -> list[int]:
        axes = self.stage.axes
        return [dim for axis in ORDER for dim in range(len(axes)) if axes[dim] == axis]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.sizes_at(self.stage.kind.shape)

    def sizes_at(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Of a state of `shape`, which may be open."""
        axes = self.stage.axes
        point, mixed, free = (prod(shape[d] for d in range(len(axes)) if axes[d] == axis) for axis in ORDER)
        return point, mixed, free

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of matrix and offset."""
        return self.parts_at(self.stage.kind.shape)

    def parts_at(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a state of `shape`, which may be open."""
        whole = point, mixed, _free = self.sizes_at(shape)
        return (whole if self.stage.form == "max-plus" else (point, mixed, mixed)), whole

    @property
    def runs(self) -> int:
        """Of the linear part, that make a matrix."""
        _point, mixed, free = self.sizes
        return 1 if self.stage.form == "max-plus" else -(-mixed // max(free, 1))

    def numbers(self, whole: bool = True) -> int:
        """In a message with one map, or with its offset."""
        matrix, offset = map(prod, self.parts)
        return matrix + offset if whole else offset

    def inward(self, state: Tensor) -> Tensor:
        return state.permute(self.dims).reshape(self.sizes).to(wide(state.dtype))

    def outward(self, state: Tensor) -> Tensor:
        shape, dims = self.stage.kind.shape, self.dims
        back = [dims.index(dim) for dim in range(len(dims))]
        return state.reshape([shape[dim] for dim in dims]).permute(back).to(self.stage.kind.dtype).contiguous()

    # ---- made --------------------------------------------------------------------------------------------------------
    def identity(self, like: Tensor) -> SegmentMap:
        """Of no step."""
        matrix, offset = (like.new_zeros(part, dtype=wide(self.stage.kind.dtype)) for part in self.parts)
        if self.stage.form == "max-plus":
            return SegmentMap(matrix, offset.fill_(-inf))
        return SegmentMap(matrix + torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device), offset)

    def of_steps(self, earlier: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor]) -> SegmentMap:
        """Of the steps of which `xs` has the rows; `earlier` are the carries that the stage reads, before them."""
        if not xs[0].shape[0]:
            return self.identity(xs[0])
        kind, stage = self.stage.kind, self.stage
        zero = torch.zeros(kind.shape, dtype=kind.dtype, device=xs[0].device)

        def last(graph: fx.GraphModule, state: Tensor) -> Tensor:
            return self.inward(repeated(graph, state, earlier, xs, consts))

        if stage.form == "max-plus":
            return SegmentMap(last(stage.linear, zero), last(stage.step, zero - inf))
        point, mixed, free = self.sizes
        eye, columns = torch.eye(mixed, dtype=kind.dtype, device=zero.device), []
        for first in range(0, mixed, max(free, 1)):
            probe, some = zero.new_zeros(mixed, free), eye[:, first : first + free]
            probe[:, : some.shape[1]] = some
            columns.append(last(stage.linear, self.outward(probe.expand(point, mixed, free)))[:, :, : some.shape[1]])
        return SegmentMap(torch.cat(columns, 2), last(stage.step, zero))

    def behind(
        self, state: Tensor, earlier: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor]
    ) -> Tensor:
        """`state` behind these steps, as an offset is."""
        steps = xs[0].shape[0]
        return self.inward(repeated(self.stage.step, state, earlier, xs, consts) if steps else state)

    # ---- used --------------------------------------------------------------------------------------------------------
    def apply(self, of: SegmentMap, state: Tensor) -> Tensor:
        """The state behind the steps, from that before them; both [point, mixed, free]."""
        if self.stage.form == "max-plus":
            return torch.maximum(state + of.matrix, of.offset)
        return of.matrix @ state + of.offset

    def apply_back(self, matrix: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the state before the steps, from that behind them and by way of that. Of a max-plus stage,
        `matrix` is the derivative of each element."""
        return matrix * gradient if self.stage.form == "max-plus" else matrix.mT @ gradient

    # ---- in a message ------------------------------------------------------------------------------------------------
    def flat(self, of: SegmentMap, whole: bool = True) -> Tensor:
        """The offset alone unless `whole`."""
        return torch.cat([of.matrix.reshape(-1), of.offset.reshape(-1)]) if whole else of.offset.reshape(-1)

    def read(self, message: Tensor, whole: bool = True) -> SegmentMap:
        """The inverse; without a matrix that of no step takes its place."""
        matrix, offset = self.parts
        if not whole:
            return replace(self.identity(message), offset=message.view(offset))
        first, second = message.split([prod(matrix), prod(offset)])
        return SegmentMap(first.view(matrix), second.view(offset))


def repeated(
    graph: fx.GraphModule, state: Tensor, earlier: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor]
) -> Tensor:
    """`graph` of a stage, step by step: the state behind the last of them."""
    roles = roles_of(1 + len(earlier), len(xs), len(consts), 0)
    inputs = [state, *earlier, *xs, *consts]
    return repeated_step(graph, kinds_in(inputs, roles), roles).run(inputs, inputs)[0]
