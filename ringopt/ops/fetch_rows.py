"""Rows of a sharded sequence, fetched from the ranks that hold them.

    fetch_rows     each rank gets the rows it wants, zeros for rows outside the sequence
    return_rows    its transpose: what was made of the rows goes back to where they came from, and is added up
    look_up_rows   every rank gets the rows whose numbers are in a tensor

What a rank wants is one of five forms, and numbers (which are arguments, not text, because a length may be open):

    move a s c ...      another sequence, made of rows a, a + s, ... (c of them) and so on, sharded by the same layout:
                        slices, shifts, rolls, flips, padding
    take a s c ...      the same rows on every rank
    apart n s a         another sequence of n rows: row i of this one is row a + i * s of it, in between are zeros
    halo n s a w (d)    for each chunk of n outputs the rows that windows of w rows see, window i beginning at
                        (i * s + a) // d; without d at i * s + a
    edges n s a w (d)   of a halo the rows that a rank has not; of its own it gives those alone that others want, or
                        one that nobody does: no compiler may think that nothing is given

Only rows that are not where they are wanted travel, point to point, as bytes. Each rank works out who sends what from
the layout alone, so nothing is asked of the others. A layout may be two, "zigzag x contiguous": that of the sequence,
and that of what is made of its rows.

The gradient of rows on every rank is complete on every rank (see collectives.py), so `return_rows` of a `take` sends
nothing: each rank keeps what belongs to its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import Layout, layout_of, layouts_of
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.tensor_digest import bytes_in_order
from ringopt.ops.collectives import factored, with_dim
from ringopt.ops.row_runs import Rows, add_rows, copy_rows, paired_rows
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled

Piece = tuple[int, int, int]  # first row, step (of any sign, or 0), how many
WINDOWS = ("halo", "edges")


@dataclass(frozen=True)
class Wanted:
    """Which rows each rank wants, as above. `pieces` of a halo, or its edges, has its four or five numbers."""

    form: str
    pieces: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, form: str, numbers: Sequence[int]) -> Wanted:
        width = len(numbers) if form in WINDOWS else 3
        return cls(form, tuple(tuple(numbers[i : i + width]) for i in range(0, len(numbers), width)))

    @property
    def numbers(self) -> list[int]:
        return [number for piece in self.pieces for number in piece]

    @property
    def length(self) -> int:
        """Rows of the sequence that a move (or an apart) makes, or that a take wants."""
        return self.pieces[0][0] if self.form == "apart" else sum(count for _start, _step, count in self.pieces)

    @property
    def everywhere(self) -> bool:
        """The result is replicated."""
        return self.form == "take"

    def ranges(self, layout: str, ranks: int, rank: int) -> list[range]:
        """The windows' rows of each chunk of a halo, in the order of the local tensor; chunks are not joined."""
        _length, stride, start, width, apart = (*self.pieces[0], 1)[:5]
        chunks = [(chunk[0] * stride + start, chunk[-1] * stride + start) for chunk in self.chunks(layout, ranks, rank)]
        return [range(first // apart, last // apart + width) for first, last in chunks]

    def chunks(self, layout: str, ranks: int, rank: int) -> list[range]:
        """The chunks of a rank, of what the windows of a halo make; none is empty."""
        plan = layout_of(layout, self.pieces[0][0], ranks)
        edges = [range(plan.edge(chunk), plan.edge(chunk + 1)) for chunk in plan.chunks(rank)]
        return [rows for rows in edges if len(rows)]

    def rows(self, layout: str, ranks: int) -> list[Tensor]:
        """The rows that each rank wants, in order; those below 0 or past the end are zeros."""
        if self.form in WINDOWS:
            windows = [self.ranges(layout, ranks, rank) for rank in range(ranks)]
            return [torch.cat([torch.arange(0), *map(row_numbers, rows)]) for rows in windows]
        if self.form == "apart":
            ((length, stride, start),) = self.pieces
            past = torch.arange(length) - start
            whole = torch.where(past % stride == 0, past // stride, -1)
        else:
            whole = torch.cat([start + step * torch.arange(count) for start, step, count in self.pieces])
        if self.everywhere:
            return [whole] * ranks
        plan = layout_of(layout, len(whole), ranks)
        return [whole[held(plan, rank)] for rank in range(ranks)]


def moved(*pieces: Piece) -> Wanted:
    """Wanted: another sequence, made of `pieces` of this one and sharded by the same layout."""
    return Wanted("move", pieces)


def taken(*pieces: Piece) -> Wanted:
    """Wanted: the tokens of `pieces`, replicated."""
    return Wanted("take", pieces)


def apart(length: int, stride: int, start: int) -> Wanted:
    """`length` rows, of which those from `start` on, `stride` apart, are the rows of the sequence."""
    return Wanted("apart", ((length, stride, start),))


def window_rows(length: int, stride: int, start: int, width: int, apart: int = 1) -> Wanted:
    """What `length` windows see: window i the `width` rows from (i * stride + start) // apart on."""
    return Wanted("halo", ((length, stride, start, width, *([apart] if apart > 1 else [])),))


def held(layout: Layout, rank: int) -> Tensor:
    """The rows of `rank`, in the order of its local tensor."""
    return torch.cat([torch.arange(0), *map(row_numbers, layout.ranges(rank))])


def row_numbers(rows: range) -> Tensor:
    """A range as an int64 tensor."""
    return torch.arange(rows.start, rows.stop)


@dataclass(frozen=True)
class Fetch:
    """What one rank does: rows `own` of its shard become rows `kept` of its result (of `rows` rows); rows `sends[peer]`
    of its shard go to a peer, and what comes from a peer becomes rows `receives[peer]` of the result. `once`: no row of
    its shard becomes two of its result."""

    rows: int
    own: Rows
    kept: Rows
    sends: tuple[tuple[int, Rows], ...]
    receives: tuple[tuple[int, Rows], ...]
    once: bool

    @property
    def complete(self) -> bool:
        """Whether every row of the result comes from somewhere."""
        return len(self.kept) + sum(len(rows) for _, rows in self.receives) == self.rows


@lru_cache(maxsize=256)
def fetch_of(wanted: Wanted, layout: str, length: int, ranks: int, rank: int, device: torch.device) -> Fetch:
    """`plan_fetch`, cached."""
    return plan_fetch(wanted, layout, length, ranks, rank, device)


def plan_fetch(wanted: Wanted, layout: str, length: int, ranks: int, rank: int, device: torch.device) -> Fetch:
    """What `rank` sends, receives and keeps so that every rank gets the tokens it wants; from the layouts alone,
    without communication."""
    return route(*homes_and_wants(wanted, layout, length, ranks), length, rank, device)


def homes_and_wants(wanted: Wanted, layout: str, length: int, ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """The rows that each rank gives, in the order in which it has them, and those that it wants."""
    old, new = layouts_of(layout)
    plan = layout_of(old, length, ranks)
    homes, wants = [held(plan, rank) for rank in range(ranks)], wanted.rows(new, ranks)
    if wanted.form != "edges":
        return homes, wants
    owner, asked = torch.full((length + 1,), -1), torch.zeros(length + 1, dtype=torch.bool)
    for rank, rows in enumerate(homes):
        owner[rows] = rank
    lacking = [rows[owner[or_past_end(rows, length)] != rank] for rank, rows in enumerate(wants)]
    asked[or_past_end(torch.cat(lacking), length)] = True
    given = [rows[asked[rows]] for rows in homes]
    return [some if len(some) else rows[:1] for some, rows in zip(given, homes, strict=True)], lacking


def or_past_end(rows: Tensor, length: int) -> Tensor:
    """Those outside of the sequence are row `length`, which has no owner."""
    return torch.where((rows >= 0) & (rows < length), rows, length)


def route(homes: Sequence[Tensor], wanted: Sequence[Tensor], length: int, rank: int, device: torch.device) -> Fetch:
    """What `rank` does, where each rank holds the rows `homes` of `length` and wants the rows `wanted`."""
    owner, place = torch.full((length + 1,), -1), torch.zeros(length + 1, dtype=torch.long)
    for other, rows in enumerate(homes):
        owner[rows], place[rows] = other, torch.arange(len(rows))
    wants = [or_past_end(rows, length) for rows in wanted]

    def places(peer: int) -> Tensor:
        return place[wants[peer][owner[wants[peer]] == rank]]

    mine = wants[rank]
    peers = [peer for peer in range(len(homes)) if peer != rank]
    sends = [(peer, Rows.of(places(peer), device)) for peer in peers]
    receives = [(peer, Rows.of((owner[mine] == peer).nonzero()[:, 0], device)) for peer in peers]
    own, kept = paired_rows(places(rank), (owner[mine] == rank).nonzero()[:, 0], device)
    return Fetch(
        len(mine), own, kept,
        tuple((peer, rows) for peer, rows in sends if len(rows)),
        tuple((peer, rows) for peer, rows in receives if len(rows)),
        len(places(rank).unique()) == len(own),
    )  # fmt: skip


def swap(mesh: Mesh, dim: int, x: Tensor, sends: Any, receives: Any, label: str) -> list[Tensor]:
    """Rows of `x` along `dim` go to peers; the rows that came for each of `receives`."""

    out = [(peer, rows.read(x, dim)) for peer, rows in sends]
    return trade(mesh, x, out, [(peer, with_dim(x, dim, len(rows))) for peer, rows in receives], label)


def trade(mesh: Mesh, x: Tensor, sends: Any, receives: Any, label: str) -> list[Tensor]:
    """Parts of `x` go to peers; what came of each of `receives`, a peer and the sizes of its part."""
    mesh.meet_on(x.device)
    # As bytes: gloo carries no bool, and no complex numbers.
    out = [(peer, bytes_in_order(part)) for peer, part in sends]
    came = [(peer, x.new_empty(prod(sizes))) for peer, sizes in receives]
    mesh.exchange(out, [(peer, buffer.view(torch.uint8)) for peer, buffer in came], label).wait()
    return [buffer.view(sizes) for (_, buffer), (_, sizes) in zip(came, receives, strict=True)]


@torch.library.custom_op("ringopt::fetch_rows", mutates_args=(), tags=ON_HOST)
def fetch_rows(
    x: Tensor,
    dim: int,
    outer: int,
    length: int,
    inner: int,
    form: str,
    numbers: Sequence[int],
    local: int,
    layout: str,
    group: str,
) -> Tensor:
    """The rows wanted (`form` and `numbers`) of a sequence of `length` rows, of which `x` holds this rank's; `local` is
    their number."""
    mesh, wanted = mesh_of(group), Wanted.of(form, numbers)
    plan = fetch_of(wanted, layout, length, mesh.size, mesh.rank, x.device)
    assert plan.rows == local, f"{wanted}: {plan.rows} rows are wanted here, the graph says {local}"
    out = run_fetch(plan, factored(x, dim, outer, inner), dim + 1, mesh)
    return out.reshape(with_dim(x, dim, outer * local * inner))


def run_fetch(plan: Fetch, x: Tensor, dim: int, mesh: Mesh, label: str = "fetch_rows") -> Tensor:
    """Runs a plan along `dim` of the shard `x`; tokens that no rank sends are zeros."""
    came = swap(mesh, dim, x, plan.sends, plan.receives, label)
    sizes = with_dim(x, dim, plan.rows)
    out = x.new_empty(sizes) if plan.complete else x.new_zeros(sizes)
    copy_rows(x, plan.own, out, plan.kept, dim)
    for (_, rows), part in zip(plan.receives, came, strict=True):
        rows.write(out, dim, part)
    return out


def run_return(plan: Fetch, x: Tensor, dim: int, local: int, mesh: Mesh | None, label: str = "return_rows") -> Tensor:
    """The transpose: what was made of the tokens that a plan fetched goes back to the `local` tokens of the shard, and
    is added up; without a mesh, that of other ranks is left to them."""
    sizes = with_dim(x, dim, local)
    alone = plan.once and len(plan.own) == local
    out = x.new_empty(sizes) if alone else x.new_zeros(sizes)
    (copy_rows if plan.once else add_rows)(x, plan.kept, out, plan.own, dim)
    came = swap(mesh, dim, x, plan.receives, plan.sends, label) if mesh is not None else []
    for (_, rows), part in zip(plan.sends, came, strict=mesh is not None):
        rows.add(out, dim, part)
    return out


@fetch_rows.register_fake
def _(
    x: Tensor,
    dim: int,
    outer: int,
    length: int,
    inner: int,
    form: str,
    numbers: Sequence[int],
    local: int,
    layout: str,
    group: str,
) -> Tensor:
    return x.new_empty(with_dim(x, dim, outer * local * inner))


@torch.library.custom_op("ringopt::return_rows", mutates_args=(), tags=ON_HOST)
def return_rows(
    grad: Tensor,
    dim: int,
    outer: int,
    length: int,
    inner: int,
    form: str,
    numbers: Sequence[int],
    local: int,
    layout: str,
    group: str,
) -> Tensor:
    """The transpose of `fetch_rows`; `local` is the number of this rank's rows of the sequence."""
    mesh, wanted = mesh_of(group), Wanted.of(form, numbers)
    plan = fetch_of(wanted, layout, length, mesh.size, mesh.rank, grad.device)
    peers = None if wanted.everywhere else mesh
    out = run_return(plan, factored(grad, dim, outer, inner), dim + 1, local, peers)
    return out.reshape(with_dim(grad, dim, outer * local * inner))


@return_rows.register_fake
def _(
    grad: Tensor,
    dim: int,
    outer: int,
    length: int,
    inner: int,
    form: str,
    numbers: Sequence[int],
    local: int,
    layout: str,
    group: str,
) -> Tensor:
    return grad.new_empty(with_dim(grad, dim, outer * local * inner))


def _setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, ctx.dim, ctx.outer, ctx.length, ctx.inner, ctx.form, ctx.numbers, _local, ctx.layout, ctx.group = inputs
    ctx.local = x.shape[ctx.dim] // (ctx.outer * ctx.inner)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows = return_rows(
        grad, ctx.dim, ctx.outer, ctx.length, ctx.inner, ctx.form, ctx.numbers, ctx.local, ctx.layout, ctx.group
    )
    return rows, None, None, None, None, None, None, None, None, None


fetch_rows.register_autograd(never_compiled(_backward), setup_context=_setup)


# ---- rows known when the program runs ------------------------------------------------------------------------------
@torch.library.custom_op("ringopt::look_up_rows", mutates_args=(), tags=ON_HOST)
def look_up_rows(x: Tensor, rows: Tensor, dim: int, length: int, layout: str, group: str) -> Tensor:
    """The rows of a sharded sequence whose numbers are in `rows` (1-D, the same on every rank), replicated.

    A negative number counts from the end. Raises IndexError, on every rank, for one that the sequence has not.
    """
    mesh = mesh_of(group)
    return run_fetch(plan_fetch(asked_for(rows, length), layout, length, mesh.size, mesh.rank, x.device), x, dim, mesh)


def asked_for(rows: Tensor, length: int) -> Wanted:
    """Wanted: the tokens of these indices, replicated; negative ones count from the end. Raises IndexError."""
    numbers: list[int] = rows.tolist()
    for number in numbers:
        if not -length <= number < length:
            raise IndexError(f"row {number} was asked for, of a sequence of {length} rows")
    return Wanted("take", tuple((number % length, 1, 1) for number in numbers))


@look_up_rows.register_fake
def _(x: Tensor, rows: Tensor, dim: int, length: int, layout: str, group: str) -> Tensor:
    return x.new_empty(with_dim(x, dim, rows.shape[0]))


@torch.library.custom_op("ringopt::add_to_rows", mutates_args=(), tags=ON_HOST)
def add_to_rows(grad: Tensor, rows: Tensor, dim: int, length: int, local: int, layout: str, group: str) -> Tensor:
    """The transpose of `look_up_rows`, for a gradient that is complete on every rank."""
    mesh = mesh_of(group)
    plan = plan_fetch(asked_for(rows, length), layout, length, mesh.size, mesh.rank, grad.device)
    return run_return(plan, grad, dim, local, None)


@add_to_rows.register_fake
def _(grad: Tensor, rows: Tensor, dim: int, length: int, local: int, layout: str, group: str) -> Tensor:
    return grad.new_empty(with_dim(grad, dim, local))


def _look_up_setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, rows, ctx.dim, ctx.length, ctx.layout, ctx.group = inputs
    ctx.local = x.shape[ctx.dim]
    ctx.save_for_backward(rows)


def _look_up_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rows,) = ctx.saved_tensors
    local = add_to_rows(grad, rows, ctx.dim, ctx.length, ctx.local, ctx.layout, ctx.group)
    return local, None, None, None, None, None


look_up_rows.register_autograd(never_compiled(_look_up_backward), setup_context=_look_up_setup)
