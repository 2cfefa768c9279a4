"""Parameters used beside sharded values: identity forward, and what becomes of their gradients backward.

    copy_all_to_group    backward: one all-reduce for the gradients of all its parameters
    leave_to_wrapper     backward: times the number of ranks; a wrapper averages over them

Each rank's gradient is a part of the whole. Many small all-reduces cost a round trip each, hence one a bucket (Li et
al., PyTorch Distributed, 2020, section 3.2.2). The backward of a bucket runs when the last of its gradients is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import program_until_here
from ringopt.distributed.tickets import issue, redeem, settle
from ringopt.ops.collectives import LIBRARY
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled


@torch.library.custom_op("ringopt::reduce_bucket", mutates_args=(), tags=ON_HOST)
def reduce_bucket(grads: list[Tensor], group: str) -> list[Tensor]:
    """The sums of `grads`, all of one dtype, over the ranks, in one message."""
    total = mesh_of(group).all_reduce(message_of(grads), "gradients")
    return parts_of(total, [grad.shape for grad in grads])


@reduce_bucket.register_fake
def _(grads: list[Tensor], group: str) -> list[Tensor]:
    return [grad.new_empty(grad.shape) for grad in grads]


@torch.library.custom_op("ringopt::reduce_start", mutates_args=(), tags=ON_HOST)
def reduce_start(grads: list[Tensor], number: int, group: str) -> Tensor:
    """The first half of `reduce_bucket`: a ticket for the sums, which are under way. No two of a graph have one
    `number`, so that no compiler takes them for one."""
    mesh = mesh_of(group)
    program_until_here(mesh)
    settle(mesh)
    total = message_of(grads)
    pending = mesh.start_all_reduce(total, f"gradients {number}")
    return issue(mesh, about(total.numel(), total.dtype), (total, pending), [pending])


@reduce_start.register_fake
def _(grads: list[Tensor], number: int, group: str) -> Tensor:
    return grads[0].new_empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ringopt::reduce_finish", mutates_args=(), tags=ON_HOST)
def reduce_finish(
    ticket: Tensor, sizes: Sequence[int], dims: Sequence[int], dtype: torch.dtype, device: torch.device, group: str
) -> list[Tensor]:
    """The second half: waits, and gives the sums. `sizes` are those of all of them, `dims` how many each has."""
    shapes = shapes_of(sizes, dims)
    program_until_here(mesh_of(group))
    total, pending = redeem(ticket, about(sum(map(prod, shapes)), dtype))
    pending.wait()
    return parts_of(total, shapes)


@reduce_finish.register_fake
def _(
    ticket: Tensor, sizes: Sequence[int], dims: Sequence[int], dtype: torch.dtype, device: torch.device, group: str
) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes_of(sizes, dims)]


def message_of(grads: Sequence[Tensor]) -> Tensor:
    """Their numbers one after the other. They are copied once, however they lie in memory."""
    message = grads[0].new_empty(sum(grad.numel() for grad in grads))
    for part, grad in zip(parts_in(message, [grad.shape for grad in grads]), grads, strict=True):
        part.copy_(grad)
    return message


def parts_in(total: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views."""
    return [part.view(shape) for part, shape in zip(total.split(list(map(prod, shapes))), shapes, strict=True)]


def parts_of(total: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of their own, for what an operator returns may not share memory; of one part, `total` itself."""
    parts = parts_in(total, shapes)
    return parts if len(parts) == 1 else [part.clone() for part in parts]


def shapes_of(sizes: Sequence[int], dims: Sequence[int]) -> list[list[int]]:
    """Shapes from the flat list of all sizes and the number of dims of each."""
    ends = list(accumulate(dims))
    return [list(sizes[end - count : end]) for end, count in zip(ends, dims, strict=True)]


def about(numbers: int, dtype: torch.dtype) -> tuple[str, int, torch.dtype]:
    """The identity of a bucket, which the two halves of its all-reduce compare (distributed/tickets.py)."""
    return "gradients", numbers, dtype


class _CopyAllToGroup(torch.autograd.Function):
    """Composite, as copy_to_group is: its forward makes views and copies no parameter."""

    @staticmethod
    def forward(ctx: Any, group: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [i for i, grad in enumerate(grads) if grad is not None]
        found: list[Tensor | None] = [None] * len(grads)
        if there:
            sums = reduce_bucket([grads[i] for i in there], ctx.group)
            for i, total in zip(there, sums, strict=True):
                found[i] = total
        return None, *found


class _LeaveToWrapper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def _copy_all_to_group(parameters: list[Tensor], group: str) -> list[Tensor]:
    return list(_CopyAllToGroup.apply(group, *parameters))  # type: ignore[no-untyped-call]


LIBRARY.define("copy_all_to_group(Tensor(a)[] parameters, str group) -> Tensor(a)[]")
LIBRARY.impl("copy_all_to_group", _copy_all_to_group, "CompositeImplicitAutograd")
LIBRARY.define("leave_to_wrapper(Tensor(a) x, int ranks) -> Tensor(a)")
LIBRARY.impl("leave_to_wrapper", _LeaveToWrapper.apply, "CompositeImplicitAutograd")
