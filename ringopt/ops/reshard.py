"""From one way to spread a dim over the ranks to another.

    x [B, 4 * 6, D], rows 0 .. 23 spread   ->   [B, 4, 6, D], the four windows spread

A sharded dim has outer * length * inner places, of which the factor `length` is spread. Splitting and merging dims
changes what the sequence is: windows of a sequence, a sequence of windows, a grid of rows and columns. The places that
a rank holds of the one and wants of the other follow from the layouts of the two alone, so they travel point to point,
once. Each place is somewhere before and after: the backward is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.distributed.lookup import mesh_of
from ringopt.ops.collectives import with_dim
from ringopt.ops.fetch_rows import Fetch, held, route, run_fetch
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled

Factors = Sequence[int]  # outer, length, inner


def places(factors: Factors, layout: str, ranks: int, rank: int) -> Tensor:
    """Which places of the whole dim `rank` holds, in the order of its local tensor."""
    outer, length, inner = factors
    rows = held(layout_of(layout, length, ranks), rank)
    return ((torch.arange(outer)[:, None, None] * length + rows[:, None]) * inner + torch.arange(inner)).flatten()


@lru_cache(maxsize=256)
def plan_respread(
    old: tuple[int, ...],
    new: tuple[int, ...],
    old_layout: str,
    new_layout: str,
    ranks: int,
    rank: int,
    device: torch.device,
) -> Fetch:
    """What `rank` sends, receives and keeps between two factorisations of a dim, (outer, length, inner) with a layout
    each."""
    ways = ((old, old_layout), (new, new_layout))
    homes, wanted = ([places(factors, layout, ranks, other) for other in range(ranks)] for factors, layout in ways)
    return route(homes, wanted, old[0] * old[1] * old[2], rank, device)


@torch.library.custom_op("ringopt::respread", mutates_args=(), tags=ON_HOST)
def respread(
    x: Tensor,
    dim: int,
    old: Sequence[int],
    new: Sequence[int],
    local: int,
    old_layout: str,
    new_layout: str,
    group: str,
) -> Tensor:
    """A value whose dim is spread as `old` says, spread as `new` says, with `local` rows here."""
    mesh = mesh_of(group)
    plan = plan_respread(tuple(old), tuple(new), old_layout, new_layout, mesh.size, mesh.rank, x.device)
    assert plan.rows == new[0] * local * new[2], f"{plan.rows} places are wanted here, the graph says {local} rows"
    return run_fetch(plan, x, dim, mesh, "respread").contiguous()


@respread.register_fake
def _(
    x: Tensor,
    dim: int,
    old: Sequence[int],
    new: Sequence[int],
    local: int,
    old_layout: str,
    new_layout: str,
    group: str,
) -> Tensor:
    return x.new_empty(with_dim(x, dim, new[0] * local * new[2]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.old, ctx.new, _local, ctx.old_layout, ctx.new_layout, ctx.group = inputs
    ctx.local = x.shape[ctx.dim] // (ctx.old[0] * ctx.old[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = respread(grad, ctx.dim, ctx.new, ctx.old, ctx.local, ctx.new_layout, ctx.old_layout, ctx.group)
    return back, None, None, None, None, None, None, None


respread.register_autograd(never_compiled(_backward), setup_context=_setup)
