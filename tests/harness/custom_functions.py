"""Custom autograd.Functions, and a model of attention with one before it and after it, for tests."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS = 16, 2


class Rounded(Function):
    """Straight-through: no derivative of anything."""

    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Scaled(Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class Clipped(Function):
    """Not linear in its gradient: two halves of it clipped apart are not the whole clipped."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 2e-3)


class Norm(Function):
    """RMS norm with its true gradient, of the weight too: sums over the rows."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight = ctx.saved_tensors
        inner = grad * weight
        dx = inner * scale - x * scale.pow(3) * (inner * x).mean(-1, keepdim=True)
        return dx, (grad * x * scale).flatten(0, -2).sum(0)


class Projected(Function):
    """A linear layer, three times its gradient of the weight."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, 3 * rows.T @ x.flatten(0, -2), rows.sum(0)


class Split(Function):
    """Two results, and one that has no gradient."""

    @staticmethod
    def forward(ctx, x):
        top, place = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(place)
        return x - top, top, place

    @staticmethod
    def backward(ctx, grad, of_top, _of_place):
        (place,) = ctx.saved_tensors
        return 2 * grad + torch.zeros_like(grad).scatter(-1, place, of_top)


class Normed(Function):
    """Its gradient is divided by its norm over all rows: known to no rule of one row."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class Sorted(Function):
    """Its forward mixes rows in a way no rule knows."""

    @staticmethod
    def forward(ctx, x):
        y, place = x.flatten().sort()
        ctx.save_for_backward(place)
        return y.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return torch.zeros_like(grad).flatten().scatter(0, place, grad.flatten()).view_as(grad) * 2


class Ordered(Function):
    """Its backward does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.renorm(grad, 2, 0, 0.5)


class Broadcast(Function):
    """Gradients larger than the operand are summed by autograd."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * 2


class Doubled(Function):
    """Writes to its input, and has another gradient than that says."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Weighed(Function):
    """Writes to one of its inputs, and saves what it wrote."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x, x * weight

    @staticmethod
    def backward(ctx, grad, of_product):
        (x,) = ctx.saved_tensors
        return 3 * grad + of_product * x, (of_product * x).sum((0, 1))


class Silent(Function):
    """Writes to its input and does not say so: autograd takes it for what it was."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Both(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x + y

    @staticmethod
    def backward(ctx, grad, of_sum):
        return grad + of_sum, of_sum


class Model(nn.Module):
    """Attention with `step(self, value)` before it and after it."""

    def __init__(self, step, where=("before", "after")):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.where = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), where
        self.gain, self.bias, self.step = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1, 1, WIDTH)), step

    def forward(self, x):
        x = x * 2
        if "before" in self.where:
            x = self.step(self, x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if "after" in self.where:
            y = self.step(self, y)
        return self.out(y).square().mean()


def written(model, x):
    """All names of the memory stand for what was written, and for its gradient: a view made before too."""
    y = x / 3
    before = y[..., 1:]
    z = Doubled.apply(y)
    z.add_(x)
    return y * z + F.pad(before, (1, 0))


def rows_written(model, x):
    y = x * 3
    Doubled.apply(y[:, 2:7])
    return y


def columns_written(model, x):
    y = x * 3
    Doubled.apply(y[..., :4])
    return y


def weighed(model, x):
    y = x * 3
    a, b = Weighed.apply(y, model.gain)
    return a * b + y


def split(model, x):
    y, top, place = Split.apply(x)
    return y * top + place


TOKEN_WISE = {
    "rounded": lambda model, x: Rounded.apply(x),
    "scaled": lambda model, x: Scaled.apply(x, 0.1),
    "clipped": lambda model, x: Clipped.apply(x),
    "norm": lambda model, x: Norm.apply(x, model.gain),
    "projected": lambda model, x: Projected.apply(x, model.out.weight, model.out.bias),
    "broadcast": lambda model, x: Broadcast.apply(x, model.bias),
    "changed in place": lambda model, x: Clipped.apply(x).mul_(3).add_(x),
    "no gradient of the input": lambda model, x: Norm.apply(x.detach(), model.gain) + x,
    "inside a checkpoint": lambda model, x: checkpoint(Norm.apply, x, model.gain, use_reentrant=False),
    "written": written,
    "rows written": rows_written,
    "columns written": columns_written,
    "weighed": weighed,
    "written in a checkpoint": lambda model, x: checkpoint(written, model, x, use_reentrant=False),
    "norm of norm": lambda model, x: Norm.apply(Norm.apply(x, model.gain), model.gain),
}
OTHERS = {
    "split": split,
    "normed": lambda model, x: Normed.apply(x),
    "sorted": lambda model, x: Sorted.apply(x),
    "ordered": lambda model, x: Ordered.apply(x),
    "clipped twice": lambda model, x: (lambda y: y + torch.renorm(y, 2, 0, 0.5))(Clipped.apply(x)),
}


def data(n=11, dtype=torch.float64):
    return torch.randn(2, n, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
