"""Conversions between replicated and sharded values, each with the backward that keeps gradients complete.

    scatter            replicated -> sharded    backward: gather
    gather             sharded -> replicated    backward: scatter
    copy_to_group      a replicated value is used beside sharded ones: identity    backward: all-reduce
    reduce_from_group  partial sums -> their sum: all-reduce                        backward: identity

The invariant: a replicated value has on every rank the same bits, and the same complete gradient. (copy_to_group and
reduce_from_group are f and g of Megatron-LM, Shoeybi et al. 2019, section 3.)

A sharded dim has outer * length * inner places, of which the factor `length` is spread over the ranks as `layout` says.
`local` is the number of its rows on this rank: an argument, because compiled code is cached by the text of the graph,
and the same text on another rank or another number of ranks must not find this rank's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh
from ringopt.ir.placement import Sharded
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled

LIBRARY = torch.library.Library("ringopt", "FRAGMENT")


@torch.library.custom_op("ringopt::scatter", mutates_args=())
def scatter(x: Tensor, dim: int, outer: int, length: int, inner: int, local: int, layout: str, group: str) -> Tensor:
    """This rank's rows of `x`, which every rank holds whole."""
    mesh = mesh_of(group)
    parts = factored(x, dim, outer, inner)
    rows = layout_of(layout, length, mesh.size).ranges(mesh.rank)
    pieces = [parts.narrow(dim + 1, piece.start, len(piece)) for piece in rows or (range(0),)]
    return torch.cat(pieces, dim + 1).reshape(with_dim(x, dim, outer * local * inner)).contiguous()


@scatter.register_fake
def _(x: Tensor, dim: int, outer: int, length: int, inner: int, local: int, layout: str, group: str) -> Tensor:
    return x.new_empty(with_dim(x, dim, outer * local * inner))


@torch.library.custom_op("ringopt::gather", mutates_args=(), tags=ON_HOST)
def gather(x: Tensor, dim: int, outer: int, length: int, inner: int, layout: str, group: str) -> Tensor:
    """The whole of `x`, of which every rank holds its rows. Shards travel padded to the longest: equal messages."""
    mesh, placement = mesh_of(group), Sharded(dim, outer, length, inner)
    return whole_of(x, mesh.all_gather(padded(x, placement, layout, mesh)), placement, layout, mesh)


def padded(x: Tensor, placement: Sharded, layout: str, mesh: Mesh) -> Tensor:
    """The message of this rank: its rows, [rows of the longest shard, ...], contiguous."""
    plan, dim = layout_of(layout, placement.length, mesh.size), placement.dim
    counts = [sum(map(len, plan.ranges(rank))) for rank in range(mesh.size)]
    message = factored(x, dim, placement.outer, placement.inner).movedim(dim + 1, 0)
    if min(counts) < max(counts):
        padding = message.new_zeros((max(counts) - counts[mesh.rank], *message.shape[1:]))
        message = torch.cat([message, padding])
    return message.contiguous()


def whole_of(x: Tensor, shards: Sequence[Tensor], placement: Sharded, layout: str, mesh: Mesh) -> Tensor:
    """The whole, in sequence order, of which `x` is this rank's part and `shards` are the messages of all ranks."""
    plan, dim = layout_of(layout, placement.length, mesh.size), placement.dim
    whole = x.new_empty(with_dim(x, dim, placement.size))
    rows = factored(whole, dim, placement.outer, placement.inner)  # a view
    for rank, shard in enumerate(shards):
        place = 0
        for piece in plan.ranges(rank):
            part = shard[place : place + len(piece)].movedim(0, dim + 1)
            rows.narrow(dim + 1, piece.start, len(piece)).copy_(part)
            place += len(piece)
    return whole


@gather.register_fake
def _(x: Tensor, dim: int, outer: int, length: int, inner: int, layout: str, group: str) -> Tensor:
    return x.new_empty(with_dim(x, dim, outer * length * inner))


@torch.library.custom_op("ringopt::reduce_from_group", mutates_args=(), tags=ON_HOST)
def reduce_from_group(x: Tensor, group: str) -> Tensor:
    """The sum of `x` over the ranks."""
    return mesh_of(group).all_reduce(x.contiguous())


@reduce_from_group.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def memory_format(x: Tensor) -> torch.memory_format:
    """How the gradient of `x` is to lie in memory: the CPU's backward of batch_norm over values with channels last is
    wrong where their gradient has them elsewhere (torch 2.13)."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim(), torch.contiguous_format)
    return last if x.is_contiguous(memory_format=last) and not x.is_contiguous() else torch.contiguous_format


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.memory = memory_format(inputs[0])
    _x, ctx.dim, ctx.outer, ctx.length, ctx.inner, _local, ctx.layout, ctx.group = inputs


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    whole = gather(grad, ctx.dim, ctx.outer, ctx.length, ctx.inner, ctx.layout, ctx.group)
    return whole.contiguous(memory_format=ctx.memory), None, None, None, None, None, None, None


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.outer, ctx.length, ctx.inner, ctx.layout, ctx.group = inputs
    ctx.local = x.shape[ctx.dim] // (ctx.outer * ctx.inner)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows = scatter(grad, ctx.dim, ctx.outer, ctx.length, ctx.inner, ctx.local, ctx.layout, ctx.group)
    return rows, None, None, None, None, None, None


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad.clone(), None


scatter.register_autograd(never_compiled(_scatter_backward), setup_context=_scatter_setup)
gather.register_autograd(never_compiled(_gather_backward), setup_context=_gather_setup)
reduce_from_group.register_autograd(never_compiled(_reduce_backward), setup_context=lambda ctx, inputs, output: None)


class _CopyToGroup(torch.autograd.Function):
    """A composite op around a Function, so that the forward is a view: parameters are not copied at every step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group, ctx.memory = group, memory_format(x)
        return x.view_as(x)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_group(grad, ctx.group).contiguous(memory_format=ctx.memory), None


LIBRARY.define("copy_to_group(Tensor(a) x, str group) -> Tensor(a)")
LIBRARY.impl("copy_to_group", _CopyToGroup.apply, "CompositeImplicitAutograd")


def factored(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Dim `dim` taken apart into [outer, rows, inner]."""
    return x.reshape(*x.shape[:dim], outer, x.shape[dim] // (outer * inner), inner, *x.shape[dim + 1 :])


def with_dim(x: Tensor, dim: int, size: int) -> list[int]:
    """The shape of `x` with `size` for `dim`."""
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]
