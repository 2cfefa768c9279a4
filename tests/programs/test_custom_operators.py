"""Operators of users' libraries: what one is called says nothing of what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.harness.translation import validate

LIBRARY = "ringopt_test_custom_operators"


Function = Callable[[Tensor], Tensor]


def defined(name: str, forward: Function, backward: Function) -> None:
    """An operator of a [batch, tokens, features] tensor under the name of one of torch's that does something else."""

    def taught(_context: Any, grad: Tensor) -> Tensor:
        return backward(grad)

    op = torch.library.custom_op(f"{LIBRARY}::{name}", forward, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(taught)


NAMES: dict[str, tuple[Function, Function]] = {
    "relu": (lambda x: x.cumsum(1), lambda x: x.flip(1).cumsum(1).flip(1)),
    "linear": (lambda x: x.flip(1) * 2, lambda x: x.flip(1) * 2),
    "special_expit": (lambda x: x.roll(1, 1), lambda x: x.roll(-1, 1)),
    "softmax": (lambda x: x - x.mean(1, True), lambda x: x - x.mean(1, True)),
    "scaled_dot_product_attention": (lambda x: x * 3, lambda x: x * 3),
}
for each, (forward, backward) in NAMES.items():
    defined(each, forward, backward)


class Custom(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner, self.name = nn.Linear(8, 8), name

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        q = x[:, None]
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0] + x
        return getattr(getattr(torch.ops, LIBRARY), self.name)(y) + y


@pytest.mark.parametrize("name", NAMES)
def test_an_operator_is_not_known_by_its_name_alone(name: str) -> None:
    torch.manual_seed(0)
    verdict = validate(2, Custom(name).double(), {"x": torch.randn(2, 13, 8, dtype=torch.float64)})
    assert verdict.wrong == ""
    assert verdict.report.gathers[0].op == f"{LIBRARY}::{name}"
    assert [site.refusal for site in verdict.report.sites] == [None]
