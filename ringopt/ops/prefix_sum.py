"""Running sums over a sharded sequence.

Each rank sums along its own chunks; the sums of whole chunks are gathered, and each chunk starts with the sum of those
before it (after it, backwards). The backward of a running sum is the running sum from the other end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import Layout, layout_of
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled


@torch.library.custom_op("ringopt::running_sum", mutates_args=(), tags=ON_HOST)
def running_sum(x: Tensor, dim: int, length: int, backwards: bool, layout: str, group: str) -> Tensor:
    """cumsum of a sequence of `length` rows along `dim`, of which `x` holds this rank's; `backwards`: from its end."""
    mesh = mesh_of(group)
    plan = layout_of(layout, length, mesh.size)
    chunks = plan.chunks(mesh.rank)
    pieces = x.split([plan.edge(chunk + 1) - plan.edge(chunk) for chunk in chunks], dim)
    before = sums_before(torch.stack([piece.sum(dim, dtype=x.dtype) for piece in pieces]), plan, mesh, backwards)
    sums = [along(piece, dim, backwards) + before[c].unsqueeze(dim) for piece, c in zip(pieces, chunks, strict=True)]
    return torch.cat(sums, dim)


def along(x: Tensor, dim: int, backwards: bool) -> Tensor:
    """The cumulative sum along `dim`, from its end if `backwards`, in the dtype of `x`."""
    return x.flip(dim).cumsum(dim, dtype=x.dtype).flip(dim) if backwards else x.cumsum(dim, dtype=x.dtype)


def sums_before(mine: Tensor, plan: Layout, mesh: Mesh, backwards: bool) -> Tensor:
    """[chunks, ...]: the sum of all chunks before each (after each, backwards); `mine` are those of this rank."""
    totals = mine.new_empty(plan.chunks_per_rank * mesh.size, *mine.shape[1:])
    for rank, parts in enumerate(mesh.all_gather(mine, "running_sum")):
        totals[list(plan.chunks(rank))] = parts
    zero = torch.zeros_like(totals[:1])
    if backwards:
        return torch.cat([along(totals, 0, True)[1:], zero])
    return torch.cat([zero, along(totals, 0, False)[:-1]])


@running_sum.register_fake
def _(x: Tensor, dim: int, length: int, backwards: bool, layout: str, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, ctx.dim, ctx.length, ctx.backwards, ctx.layout, ctx.group = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    sums = running_sum(grad, ctx.dim, ctx.length, not ctx.backwards, ctx.layout, ctx.group)
    return sums, None, None, None, None, None


running_sum.register_autograd(never_compiled(_backward), setup_context=_setup)
