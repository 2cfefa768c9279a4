"""`gather` in two, so that the shards travel behind other work.

    ticket = gather_start(x, ..., number, group)    posts this rank's rows
    whole = gather_finish(ticket, x, ..., group)    waits, and puts the rows of all ranks in order

The sum over the ranks has its halves in gradient_buckets.py. ringopt/overlap/async_collectives.py puts both into
graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import program_until_here
from ringopt.distributed.tickets import issue, redeem, settle
from ringopt.ir.placement import Sharded
from ringopt.ops.collectives import padded, whole_of, with_dim
from ringopt.ops.tags import ON_HOST


@torch.library.custom_op("ringopt::gather_start", mutates_args=(), tags=ON_HOST)
def gather_start(
    x: Tensor, dim: int, outer: int, length: int, inner: int, layout: str, number: int, group: str
) -> Tensor:
    """A ticket for the shards of `gather`, which are under way. No two of a graph have one `number`, so that no
    compiler takes them for one."""
    mesh, placement = mesh_of(group), Sharded(dim, outer, length, inner)
    program_until_here(mesh)
    settle(mesh)
    message = padded(x, placement, layout, mesh)
    if message.data_ptr() == x.data_ptr():
        message = message.clone()  # a compiler may give the memory of `x` to another value while this one travels
    parts, pending = mesh.start_all_gather(message, f"gather {number}")
    return issue(mesh, about(x, placement, layout), (parts, pending), [pending])


@gather_start.register_fake
def _(x: Tensor, dim: int, outer: int, length: int, inner: int, layout: str, number: int, group: str) -> Tensor:
    return x.new_empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ringopt::gather_finish", mutates_args=(), tags=ON_HOST)
def gather_finish(
    ticket: Tensor, x: Tensor, dim: int, outer: int, length: int, inner: int, layout: str, group: str
) -> Tensor:
    """The whole, of which `x` tells sizes and dtype. Raises RingCommError, RingMismatchError."""
    mesh, placement = mesh_of(group), Sharded(dim, outer, length, inner)
    program_until_here(mesh)
    parts, pending = redeem(ticket, about(x, placement, layout))
    pending.wait()
    return whole_of(x, parts, placement, layout, mesh)


@gather_finish.register_fake
def _(ticket: Tensor, x: Tensor, dim: int, outer: int, length: int, inner: int, layout: str, group: str) -> Tensor:
    return x.new_empty(with_dim(x, dim, outer * length * inner))


def about(x: Tensor, placement: Sharded, layout: str) -> tuple[object, ...]:
    """The identity of a gather, which its two halves compare (distributed/tickets.py)."""
    return "gather", tuple(x.shape), x.dtype, placement, layout
