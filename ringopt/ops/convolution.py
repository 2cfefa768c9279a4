"""Convolution along a sharded sequence whose length is left open.

Which rows a rank's windows see, and where its chunks end, is found out when the program runs: Inductor lowers no
convolution over a number of rows that it does not know. In the backward the neighbours' rows are fetched once more
instead of being kept, and what they have of the gradient goes home (ringopt/ops/fetch_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layouts_of
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh
from ringopt.ops.fetch_rows import Fetch, Wanted, fetch_of, run_fetch, run_return
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """Of what one rank has at hand."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        none = [0] * len(self.stride)
        out: Tensor = aten.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, none, self.groups
        )
        return out

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, of the weight and of a bias."""
        all_three, none = [True, True, True], [0] * len(self.stride)
        grads: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
            grad,
            x,
            weight,
            [weight.shape[0]],
            self.stride,
            self.padding,
            self.dilation,
            False,
            none,
            self.groups,
            all_three,
        )
        return grads


def seen_from(
    x: Tensor, dim: int, length: int, numbers: Sequence[int], layout: str, mesh: Mesh
) -> tuple[Fetch, list[int], Tensor]:
    """What this rank fetches, how many rows the windows of each of its chunks see, and these rows."""
    wanted = Wanted.of("halo", numbers)
    plan = fetch_of(wanted, layout, length, mesh.size, mesh.rank, x.device)
    counts = list(map(len, wanted.ranges(layouts_of(layout)[1], mesh.size, mesh.rank)))
    return plan, counts, run_fetch(plan, x, dim, mesh, "convolve_rows")


@torch.library.custom_op("ringopt::convolve_rows", mutates_args=(), tags=ON_HOST)
def convolve_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    length: int,
    numbers: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    local: int,
    layout: str,
    group: str,
) -> Tensor:
    """conv1d or conv2d of a sequence of `length` rows along `dim`, of which `x` [B, C, ...] holds this rank's: `local`
    rows of what the windows `numbers` (those of a halo) make. `padding` is that of the other dim."""
    _plan, counts, seen = seen_from(x, dim, length, numbers, layout, mesh_of(group))
    convolution = Convolution(stride, padding, dilation, groups)
    out = torch.cat([convolution.forward(piece, weight, bias) for piece in seen.split(counts, dim)], dim)
    assert out.shape[dim] == local, f"{out.shape[dim]} rows are made here, the graph says {local}"
    return out.contiguous()


@convolve_rows.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    length: int,
    numbers: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    local: int,
    layout: str,
    group: str,
) -> Tensor:
    sizes = [x.shape[0], weight.shape[0], *x.shape[2:]]
    for i, (step, zeros, apart) in enumerate(zip(stride, padding, dilation, strict=True)):
        at = 2 + i
        sizes[at] = local if at == dim else (sizes[at] + 2 * zeros - apart * (weight.shape[at] - 1) - 1) // step + 1
    return x.new_empty(sizes)


@torch.library.custom_op("ringopt::convolve_rows_backward", mutates_args=(), tags=ON_HOST)
def convolve_rows_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    dim: int,
    length: int,
    numbers: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    layout: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x` (complete), of the weight and of a bias (this rank's parts)."""
    mesh = mesh_of(group)
    plan, counts, seen = seen_from(x, dim, length, numbers, layout, mesh)
    made = [1 + (count - numbers[3]) // numbers[1] for count in counts]
    convolution = Convolution(stride, padding, dilation, groups)
    parts = [
        convolution.backward(part, piece, weight)
        for part, piece in zip(grad.split(made, dim), seen.split(counts, dim), strict=True)
    ]
    of_seen = torch.cat([part[0] for part in parts], dim)
    out = run_return(plan, of_seen, dim, x.shape[dim], mesh, "convolve_rows")
    of_weight, of_bias = (sum(part[i] for part in parts[1:]) + parts[0][i] for i in (1, 2))
    return out, of_weight.contiguous(), of_bias.contiguous()


@convolve_rows_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    dim: int,
    length: int,
    numbers: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    layout: str,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1])


def _setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, weight, bias, *ctx.how, _local, ctx.layout, ctx.group = inputs
    ctx.bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = convolve_rows_backward(grad, x, weight, *ctx.how, ctx.layout, ctx.group)
    return of_x, of_weight, of_bias if ctx.bias else None, *[None] * (len(ctx.how) + 3)


convolve_rows.register_autograd(never_compiled(_backward), setup_context=_setup)
