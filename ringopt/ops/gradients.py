"""Parameters used beside sharded values: identity forward, and what becomes of their gradients backward.

    copy_all_to_group    backward: one all-reduce for the gradients of all its parameters
    leave_to_wrapper     backward: times the number of ranks; a wrapper averages over them

Each rank's gradient is a part of the whole. Many small all-reduces cost a round trip each, hence one a bucket (Li et
al., PyTorch Distributed, 2020, section 3.2.2). The backward of a bucket runs when the last of its gradients is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.mesh import mesh_of
from ringopt.ops.convert import LIBRARY


@torch.library.custom_op("ringopt::reduce_bucket", mutates_args=())
def reduce_bucket(grads: list[Tensor], group: str) -> list[Tensor]:
    """The sums of `grads`, all of one dtype, over the ranks, in one message."""
    total = mesh_of(group).all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), "gradients")
    parts = total.split([grad.numel() for grad in grads])
    return [part.view(grad.shape).clone() for part, grad in zip(parts, grads, strict=True)]


@reduce_bucket.register_fake
def _(grads: list[Tensor], group: str) -> list[Tensor]:
    return [grad.new_empty(grad.shape) for grad in grads]


class _CopyAllToGroup(torch.autograd.Function):
    """Composite, as copy_to_group is: its forward makes views and copies no parameter."""

    @staticmethod
    def forward(ctx: Any, group: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [i for i, grad in enumerate(grads) if grad is not None]
        found: list[Tensor | None] = [None] * len(grads)
        if there:
            sums = torch.ops.ringopt.reduce_bucket([grads[i] for i in there], ctx.group)
            for i, total in zip(there, sums, strict=True):
                found[i] = total
        return None, *found


class _LeaveToWrapper(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


def _copy_all_to_group(parameters: list[Tensor], group: str) -> list[Tensor]:
    return list(_CopyAllToGroup.apply(group, *parameters))  # type: ignore[no-untyped-call]


LIBRARY.define("copy_all_to_group(Tensor(a)[] parameters, str group) -> Tensor(a)[]")
LIBRARY.impl("copy_all_to_group", _copy_all_to_group, "CompositeImplicitAutograd")
LIBRARY.define("leave_to_wrapper(Tensor(a) x, int ranks) -> Tensor(a)")
LIBRARY.impl("leave_to_wrapper", _LeaveToWrapper.apply, "CompositeImplicitAutograd")
