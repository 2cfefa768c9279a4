"""Plans of models without attention: recurrences, and prefix sums, say what the sequence is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringopt


class Mixed(nn.Module):
    """Tokens between two layers, which a recurrence or a prefix sum mixes."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.mix, self.given, self.out = mix, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.mix(self.given(x)))
        return found


def decayed(x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = state * 0.9 + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


@pytest.mark.parametrize("mix", [decayed, lambda x: x.cumsum(1)])
def test_recurrences_and_prefix_sums_alone(mix: Any) -> None:
    """Told of a trace at 16 tokens, for 48, as of a trace at 48."""
    few, many = (ringopt.plan(Mixed(mix), torch.randn(1, n, 8), world_size=[2, 4], lengths=[48]) for n in (16, 48))
    for told, found in zip(few.points, many.points, strict=True):
        assert few.exchange(told) == many.exchange(found) == "contiguous" and few.training
        assert told.flops == pytest.approx(found.flops, rel=0.01) and told.flops > 0
        assert told.memory == pytest.approx(found.memory, rel=0.2)
        assert told.bytes == pytest.approx(found.bytes, rel=0.2)
