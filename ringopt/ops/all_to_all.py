"""From rows to columns: a value that is spread along one dim, spread along another.

    x [B, 24, D], rows 0 .. 23 spread   ->   [B, 24, D], the D columns spread, each with all of its rows

What mixes all rows but keeps columns apart (a sort, a transform, a running product) is computed column by column then,
with no rank holding more than its share. Each rank sends each other the part that both dims give it, once (all-to-all,
as DeepSpeed-Ulysses trades rows for heads, Jacobs et al. 2023). The backward is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.ops.fetch_rows import trade
from ringopt.ops.reshard import places
from ringopt.ops.row_runs import Rows
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled


@lru_cache(maxsize=256)
def held_by_each(factors: tuple[int, ...], layout: str, ranks: int, device: torch.device) -> tuple[Rows, ...]:
    """The places of a dim of `factors` (outer, length, inner) that each rank holds."""
    return tuple(Rows.of(places(factors, layout, ranks, rank), device) for rank in range(ranks))


def bytes_turned(size: int, new: Sequence[int], layout: str, ranks: int, rank: int) -> int:
    """What leaves `rank` of its part, which has `size` bytes: all but the places of the new dim that stay with it."""
    held = held_by_each(tuple(new), layout, ranks, torch.device("cpu"))
    whole = sum(map(len, held))
    return size // whole * (whole - len(held[rank]))


def with_dims(x: Tensor, sizes: dict[int, int]) -> list[int]:
    """The shape of `x` with other sizes for some dims."""
    return [sizes.get(dim, size) for dim, size in enumerate(x.shape)]


@torch.library.custom_op("ringopt::turn", mutates_args=(), tags=ON_HOST)
def turn(
    x: Tensor,
    dim: int,
    old: Sequence[int],
    new_dim: int,
    new: Sequence[int],
    local: int,
    old_layout: str,
    new_layout: str,
    group: str,
) -> Tensor:
    """A value whose `dim` is spread as `old` says (outer, length, inner), with `new_dim` spread as `new` says in its
    place: all of the one, and `local` rows of the other."""
    mesh = mesh_of(group)
    rows = held_by_each(tuple(old), old_layout, mesh.size, x.device)
    columns = held_by_each(tuple(new), new_layout, mesh.size, x.device)
    mine = len(columns[mesh.rank])
    assert mine == new[0] * local * new[2], f"{mine} places are wanted here, the graph says {local} rows"
    peers = [peer for peer in range(mesh.size) if peer != mesh.rank]
    sends = [(peer, columns[peer].read(x, new_dim)) for peer in peers]
    came = trade(
        mesh, x, sends, [(peer, with_dims(x, {dim: len(rows[peer]), new_dim: mine})) for peer in peers], "turn"
    )
    del sends  # before there is a result: what is held beside it is no more than it
    out = x.new_empty(with_dims(x, {dim: prod(old), new_dim: mine}))
    for peer, part in zip(peers, came, strict=True):
        rows[peer].write(out, dim, part)
    rows[mesh.rank].write(out, dim, columns[mesh.rank].read(x, new_dim))
    return out


@turn.register_fake
def _(
    x: Tensor,
    dim: int,
    old: Sequence[int],
    new_dim: int,
    new: Sequence[int],
    local: int,
    old_layout: str,
    new_layout: str,
    group: str,
) -> Tensor:
    return x.new_empty(with_dims(x, {dim: prod(old), new_dim: new[0] * local * new[2]}))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.old, ctx.new_dim, ctx.new, _local, ctx.old_layout, ctx.new_layout, ctx.group = inputs
    ctx.local = x.shape[ctx.dim] // (ctx.old[0] * ctx.old[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = turn(grad, ctx.new_dim, ctx.new, ctx.dim, ctx.old, ctx.local, ctx.new_layout, ctx.old_layout, ctx.group)
    return back, None, None, None, None, None, None, None, None


turn.register_autograd(never_compiled(_backward), setup_context=_setup)
