"""Sums over tokens in 16 bits are no less exact than on one process: partial sums travel in float32.

The halves of a sequence cancel, so that a partial sum that was rounded to 16 bits on its rank is far off in the total.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness.translation import validate_function

LENGTH, WIDTH = 512, 8
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}

#: of y, [1, LENGTH, WIDTH], whose sum over tokens is small beside what is summed
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(1),
    "mean": lambda y: y.mean(1),
    "mean of everything": lambda y: y.mean(),
    "mean of a product": lambda y: (y * y.abs()).mean(),
    "pooled": lambda y: F.adaptive_avg_pool1d(y.mT, 1),
    "running sum": lambda y: y.cumsum(1)[:, -1],
    "index_add": lambda y: y.new_zeros(1, 2, WIDTH).index_add(1, torch.arange(LENGTH) % 2, y),
    "norm over tokens": lambda y: F.instance_norm(y.mT).mT,
    "norm over everything": lambda y: F.layer_norm(y, (LENGTH, WIDTH)),
    "batch norm": lambda y: F.batch_norm(y.mT, None, None, training=True).mT,
    "variance": lambda y: y.var(1),
    "log of a sum": lambda y: y.logsumexp(1),
    "softmax over tokens": lambda y: y.softmax(1),
    "loss": lambda y: F.cross_entropy(y[0], torch.arange(LENGTH) % WIDTH),
    "smoothed loss": lambda y: F.cross_entropy(y[0], torch.arange(LENGTH) % WIDTH, label_smoothing=0.3),
    "sum of losses": lambda y: F.cross_entropy(y[0], torch.arange(LENGTH) % WIDTH, reduction="sum") - 1400,
}

PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "product with ones": lambda y: torch.ones_like(y).mT @ y,
    "einsum": lambda y: torch.einsum("bnd,bn->bd", y, torch.ones_like(y[..., 0])),
}


def cancelling(dtype: torch.dtype) -> Tensor:
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    sign = torch.where(torch.arange(LENGTH) < LENGTH // 2, 1.0, -1.0)[:, None]
    x = x + sign * 3
    return (x - 1).to(dtype)  # the attention before a step adds 1


def after_attention(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor]]:
    """Attention over values that are all 1 gives 1, to the bit, and makes the tokens of x sharded."""

    def program(x: Tensor) -> tuple[Tensor]:
        h = x[:, None]
        return (step(x + F.scaled_dot_product_attention(h, h, torch.ones_like(h))[:, 0]),)

    return program


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_as_exact_as_one_process(name: str, dtype: torch.dtype) -> None:
    x, program = cancelling(dtype), after_attention(STEPS[name])
    exact, alone = STEPS[name]((x + 1).double()), program(x)[0]
    verdict = validate_function(4, program, [x], layout="contiguous")
    assert verdict.report.sharded_fraction and not verdict.report.refusal
    for outputs, _ in verdict.found:
        assert outputs[0].dtype == alone.dtype
        assert error(outputs[0], exact) <= 2 * error(alone, exact) + ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_rounds_its_part_on_each_rank_once(name: str, dtype: torch.dtype) -> None:
    """As in a row-parallel layer (Shoeybi et al. 2019, Megatron-LM): in float32 it would take many times as long."""
    x, program = cancelling(dtype), after_attention(PRODUCTS[name])
    exact = PRODUCTS[name]((x + 1).double())
    parts = [PRODUCTS[name]((part + 1).double()).abs().max() for part in x.chunk(4, 1)]
    verdict = validate_function(4, program, [x], layout="contiguous")
    for outputs, _ in verdict.found:
        assert (outputs[0].double() - exact).abs().max() <= ROUNDING[dtype] / 2 * (sum(parts) + exact.abs().max())
