"""`x.requires_grad_()` of what a program makes, as models that checkpoint call it in evaluation too, is no refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt


class Marked(nn.Module):
    """Dynamo ends its graph at one of which gradients are taken; `shown` gives the leaf."""

    def __init__(self, shown: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.shown = nn.Embedding(9, 8), nn.Linear(8, 24), shown

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        x.requires_grad_()
        q, k, v = self.qkv(x.to(torch.float32)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()
        return (y, x) if self.shown else y


@pytest.mark.parametrize("shown", [False, True])
def test_without_gradients_it_does_nothing(shown: bool) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        report = ringopt.explain(Marked(shown), torch.arange(9)[None], world_size=2)
    assert len(report.sites) == 1 and report.refusal is None
    assert report.sharded_fraction == 1


@pytest.mark.parametrize("recording", [False, True])
def test_numbers(recording: bool) -> None:
    torch._dynamo.reset()
    model, ids = Marked(False), torch.arange(9)[None]
    with torch.set_grad_enabled(recording):
        found = torch.compile(model, backend="ring")(ids)
        torch.testing.assert_close(found, model(ids))
    assert found.requires_grad == recording
