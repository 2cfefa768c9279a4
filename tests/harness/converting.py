"""An exported program to convert, for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram, export


class Mixer(nn.Module):
    """Causal attention between two projections."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(F.dropout(mixed.squeeze(1), self.dropout, self.training))  # type: ignore[no-any-return]


def rows(n: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(2, n, 8, generator=torch.Generator().manual_seed(seed))


def exported(module: nn.Module | None = None, n: int = 16) -> ExportedProgram:
    return export(module or Mixer(), (rows(n),))
