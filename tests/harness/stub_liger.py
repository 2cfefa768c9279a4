"""A stand-in for Liger: autograd Functions of its names and signatures, in torch, hidden from Dynamo. As its kernels
do, they write over what they are given and have saved, and give gradients that share memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ringopt.torch_compat.autograd import recording
from tests.harness.stub_libraries import package, seen


@torch.compiler.disable
def computed(ctx: Any, formula: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
    """Without a graph of autograd; the formula and its tensors are kept."""
    seen(*tensors)
    ctx.formula, ctx.count = formula, len(tensors)
    ctx.save_for_backward(*tensors)
    with torch.no_grad():
        return formula(*tensors)


@torch.compiler.disable
def slopes(ctx: Any, *grads: Tensor) -> list[Any]:
    """Of its tensors."""
    with recording():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        outs = ctx.formula(*leaves)
        asked = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(outs, asked, grads, materialize_grads=True))
    return [next(found) if x.requires_grad else None for x in leaves]


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)


class LigerRMSNormFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
        in_place: bool = True, row_mode: bool | None = None,
    ) -> Any:  # fmt: skip
        ctx.in_place = in_place
        return computed(ctx, lambda x, w: normed(x, w, eps, offset), (X, W))

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        dX, dW = slopes(ctx, dY)
        return (dY.copy_(dX) if ctx.in_place else dX), dW, None, None, None, None, None


class LigerFusedAddRMSNormFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama",
        in_place: bool = False,
    ) -> Any:  # fmt: skip
        return computed(ctx, lambda x, r, w: (normed(x + r, w, eps, offset), x + r), (X, R, W))

    @staticmethod
    def backward(ctx: Any, dY: Tensor, dS: Tensor) -> Any:
        dX, _, dW = slopes(ctx, dY, dS)
        return dX, dX, dW, None, None, None, None, None


class LigerLayerNormFunction(Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, B: Tensor, eps: float) -> Any:
        return computed(ctx, lambda x, w, b: F.layer_norm(x, w.shape, w, b, eps), (X, W, B))

    @staticmethod
    def backward(ctx: Any, dY: Tensor) -> Any:
        return (*slopes(ctx, dY), None)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """B S H D, of angles B S D."""
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]


class LigerRopeFunction(Function):
    @staticmethod
    @torch.compiler.disable
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1, rotary_dim: int | None = None,
    ) -> Any:  # fmt: skip
        seen(q, k)
        ctx.save_for_backward(cos, sin)
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        return tuple(x.copy_(turned(x, cos, sin)).transpose(1, 2) for x in (q, k))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        back = [turned(x.transpose(1, 2), cos, -sin).transpose(1, 2) for x in (dq, dk)]
        return (*back, None, None, None, None, None)


def over_saved(ctx: Any, dc: Tensor) -> list[Tensor]:
    """Gradients of two tensors, in the memory of these."""
    found = slopes(ctx, dc)
    return [x.data.copy_(slope) for x, slope in zip(ctx.saved_tensors, found, strict=True)]


class LigerSiLUMulFunction(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Any:
        return computed(ctx, lambda a, b: F.silu(a * gate_multiplier) * b * down_multiplier, (a, b))

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:
        return (*over_saved(ctx, dc), None, None)


class LigerGELUMulFunction(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Any:
        return computed(ctx, lambda a, b: F.gelu(a, approximate="tanh") * b, (a, b))

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> Any:
        return tuple(over_saved(ctx, dc))


def routed(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    gate, up = torch.einsum("th,ejh->tej", x, gate_up).chunk(2, -1)
    of_experts = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    picked = of_experts.gather(1, index.long()[..., None].expand(*index.shape, x.shape[-1]))
    return (picked * weights[..., None]).sum(1)


class LigerFusedMoEFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        return computed(ctx, routed, (x, gate_up_proj, down_proj, top_k_index, top_k_weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(slopes(ctx, grad))


def loss_of(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None,
) -> Tensor:  # fmt: skip
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    each = F.cross_entropy(logits, target, weight, reduction="none", **how)
    each = each + lse_square_scale * logits.logsumexp(-1).square() * (target != ignore_index)
    if reduction == "none":
        return each
    seen = target != ignore_index
    count = seen.sum() if weight is None else weight[target[seen]].sum()
    return each.sum() / count if reduction == "mean" and seen.any() else each.sum()


class LigerCrossEntropyFunction(Function):
    @staticmethod
    @torch.compiler.disable
    def forward(
        ctx: Any, _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100,
        lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
        softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Any:  # fmt: skip
        seen(_input, target)
        how = (target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
        with recording():
            leaf = _input.detach().clone().requires_grad_()
            loss = loss_of(leaf, *how)
            (slope,) = torch.autograd.grad(loss.sum(), leaf)
        ctx.save_for_backward(_input.detach().copy_(slope))
        correct = (leaf.argmax(-1) == target).double() if return_token_accuracy else None
        return loss.detach(), None, correct, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_others: Any) -> Any:
        (slope,) = ctx.saved_tensors
        return (slope * (grad[:, None] if grad.dim() else grad), *[None] * 10)


class LigerFusedLinearCrossEntropyFunction(Function):
    supports_inner_impl_dispatch = True

    @staticmethod
    def forward(
        ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> Any:  # fmt: skip
        how = (target, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
        tensors = (_input, weight) if bias is None else (_input, weight, bias)
        return computed(ctx, lambda x, w, b=None: loss_of(F.linear(x, w, b), *how).float(), tensors), None, None, None

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_others: Any) -> Any:
        dx, dw, *db = slopes(ctx, grad)
        return (dx, dw, None, *(db or [None]), *[None] * 11)


FUNCTIONS = {
    "rms_norm": LigerRMSNormFunction, "fused_add_rms_norm": LigerFusedAddRMSNormFunction,
    "layer_norm": LigerLayerNormFunction, "rope": LigerRopeFunction, "swiglu": LigerSiLUMulFunction,
    "geglu": LigerGELUMulFunction, "fused_moe": LigerFusedMoEFunction, "cross_entropy": LigerCrossEntropyFunction,
    "fused_linear_cross_entropy": LigerFusedLinearCrossEntropyFunction,
}  # fmt: skip


def dispatch(op_name: str, *args: Any, impl: str | None = None, backend: str | None = None, **kwargs: Any) -> Any:
    """Whose way to a Function ends a graph."""
    torch._dynamo.graph_break()
    return FUNCTIONS[op_name].apply(*args, **{name: x for name, x in kwargs.items() if x is not None})


@contextmanager
def liger() -> Iterator[None]:
    """Within it, it can be imported."""
    before = set(sys.modules)
    for name, function in FUNCTIONS.items():
        package(f"liger_kernel.ops.{name}", **{function.__name__: function})
    package("liger_kernel.backends", dispatch=dispatch)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == "liger_kernel":
                del sys.modules[name]
