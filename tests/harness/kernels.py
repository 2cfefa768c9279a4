"""Operators of other libraries, as tests need them: an opaque body whose gradient is that of the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringopt.rules.declare import REGISTRY, ScanRule
from ringopt.rules.plugins import load_rules


@contextmanager
def rules_forgotten() -> Iterator[None]:
    """What is declared within is forgotten behind it."""
    load_rules()
    before = [dict(level) for level in REGISTRY.levels]
    yield
    for level, kept in zip(REGISTRY.levels, before, strict=True):
        level.clear()
        level.update(kept)


def defined(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """The operator `name`, which `function` computes, and whose backward computes it again."""
    op = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
    op.register_fake(fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.inputs = inputs

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() if torch.is_tensor(x) else x for x in ctx.inputs]
            made = function(*given)
            tensors = [x for x in given if torch.is_tensor(x)]
            found = iter(torch.autograd.grad(made, tensors, grads, allow_unused=True))
        return tuple(next(found) if torch.is_tensor(x) else None for x in given)

    op.register_autograd(backward, setup_context=setup)


LIBRARY = "ringopt_test_scans"
H, K, V = 2, 4, 3


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, decay: Tensor, state: Tensor | None, bounded: bool
) -> tuple[Tensor, Tensor]:
    """S = exp(g decay) S + k (v - k S), o = q S; B T H D. `bounded`: states that are not affine in those before."""
    now, out = q.new_zeros(q.shape[0], H, K, V) if state is None else state, []
    for t in range(q.shape[1]):
        now = now * (g[:, t] * decay)[..., None, None].exp()
        now = now + k[:, t, :, :, None] * (v[:, t] - (k[:, t, :, None] @ now)[:, :, 0])[:, :, None]
        now = now.tanh() if bounded else now
        out.append((q[:, t, :, None] @ now)[:, :, 0])
    return torch.stack(out, 1), now.clone()


def fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, decay: Tensor, state: Any, bounded: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), v.new_empty(v.shape[0], v.shape[2], K, V)


TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor decay, Tensor? state, bool bounded"
defined(f"{LIBRARY}::delta_rule", f"({TENSORS}) -> (Tensor, Tensor)", delta_rule, fake)

DELTA = ScanRule(("q", "k", "v", "g"), state="state", axes=("point", "point", "mixed", "free"), additive=("v",))
IN_TURN = ScanRule(("q", "k", "v", "g"), state="state")
