"""Sparse gradients (`nn.Embedding(..., sparse=True)`, for SparseAdam): ranks do not sum them, so each makes the look-up
whole. The rest is on shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ringopt
from tests.harness.models import difference

LENGTHS = (16, 13, 19)


class Words(nn.Module):
    """A look-up before an attention, and a bag of the same ids beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8, sparse=True, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(11, 8, sparse=True, dtype=torch.float64)
        self.out = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.out(F.scaled_dot_product_attention(x, x, x) + self.bag(ids)[:, None])


def trained(compiled: bool) -> list[torch.Tensor]:
    """Loss and gradients of steps that SparseAdam takes."""
    torch._dynamo.reset()
    model, found = Words(), list[torch.Tensor]()
    run = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"}) if compiled else model
    optimizer = torch.optim.SparseAdam([model.table.weight, model.bag.weight], 0.01)
    for n in LENGTHS:
        ids = torch.arange(2 * n).reshape(2, n) ** 2 % 11
        model.zero_grad()
        loss = run(ids).square().mean()
        loss.backward()
        assert model.table.weight.grad is not None and model.table.weight.grad.is_sparse
        optimizer.step()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found += [loss.detach(), *(gradient.to_dense() for gradient in gradients)]
    return [*found, *(weight.detach() for weight in model.parameters())]


def on_rank() -> tuple[float, float]:
    before = len(ringopt.reports())
    error = difference(trained(True), trained(False))
    return error, min(report.sharded_fraction for report in ringopt.reports()[before:])


def test_they_stay_sparse_and_are_those_of_one_process(ranks: Any) -> None:
    for error, share in ranks(2, on_rank):
        assert error < 1e-12 and share > 0.95
