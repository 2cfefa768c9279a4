"""Dropout of a shard: every rank draws from a stream of its own.

The ranks' generators are usually seeded alike, so plain dropout would drop the same places of every shard; and shards
of unequal size would leave the generators in different states, so that replicated values would drift apart. Here the
default generator gives one seed (as many draws on every rank), and the mask is a hash of (seed, rank, place): the same
for a seed, a number of ranks and a layout, and read nowhere but on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.torch_compat.autograd import never_compiled

SEEDS = 2**31 - 1


@torch.library.custom_op("ringopt::dropout", mutates_args=())
def dropout(x: Tensor, seed: Tensor, p: float, group: str) -> tuple[Tensor, Tensor]:
    """`x` with each element zeroed with probability `p`, the others divided by 1 - p; and which were kept (bool)."""
    stream = seed + (mesh_of(group).rank << 32)  # seeds are of 31 bits
    places = torch.arange(x.numel(), device=x.device)
    kept = torch.ops.ringopt.draw(stream, [places], [1], x.numel(), "kept", [p], torch.bool).view(x.shape)
    return (x * kept).div_(1 - p if p < 1 else 1).contiguous(), kept


@dropout.register_fake
def _(x: Tensor, seed: Tensor, p: float, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.p = inputs[2]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _kept: Any) -> tuple[Any, ...]:
    (kept,) = ctx.saved_tensors
    return grad * kept / (1 - ctx.p if ctx.p < 1 else 1), None, None, None


dropout.register_autograd(never_compiled(_backward), setup_context=_setup)
