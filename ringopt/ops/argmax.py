"""The largest or smallest element over all ranks.

An operator, for its gradient: it is shared evenly by all elements that are equal to the result, wherever they are, and
the largest of local largests would share it evenly by rank first. Of a result that is NaN it is NaN, as amax has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.ops.collectives import reduce_from_group
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled


@torch.library.custom_op("ringopt::extreme", mutates_args=(), tags=ON_HOST)
def extreme(x: Tensor, dims: Sequence[int], largest: bool, group: str) -> Tensor:
    """amax or amin of `x` over `dims` and over the ranks; the dims stay, of size 1. Replicated."""
    pick = torch.amax if largest else torch.amin
    parts = mesh_of(group).all_gather(pick(x, list(dims), keepdim=True).contiguous(), "extreme")
    return pick(torch.stack(parts), 0)


@extreme.register_fake
def _(x: Tensor, dims: Sequence[int], largest: bool, group: str) -> Tensor:
    return x.new_empty([1 if dim in dims else size for dim, size in enumerate(x.shape)])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dims, _largest, ctx.group = inputs
    ctx.save_for_backward(x, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, found = ctx.saved_tensors
    equal = x == found
    count = reduce_from_group(equal.sum(ctx.dims, keepdim=True), ctx.group)
    return grad * equal / count, None, None, None


extreme.register_autograd(never_compiled(_backward), setup_context=_setup)
