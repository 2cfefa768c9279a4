"""A small model to try the commands on: `ringopt explain ringopt.tools.example:tiny`, or as a file,
`python -m ringopt.tools.example model.pt2`. Your own as a file: `python -m ringopt.tools.example model.py:small m.pt2`.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringopt.tools.common.command import CommandError, Example, load_example


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(x)
        return y


def tiny() -> tuple[nn.Module, tuple[Tensor]]:
    """Two blocks of 4 heads; 1 sequence of 128 rows of 64 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(Block(64, 4), Block(64, 4)), (torch.randn(1, 128, 64),)


def _main() -> None:
    *factory, file = sys.argv[1:] or [""]
    if len(factory) > 1 or not file.endswith(".pt2"):
        sys.exit("usage: python -m ringopt.tools.example [FILE.py:FACTORY] FILE.pt2")
    try:
        example = load_example(factory[0]) if factory else Example(*tiny(), {})
    except CommandError as error:
        sys.exit(f"error: {error}")
    if not isinstance(example.model, nn.Module):
        sys.exit(f"error: {factory[0]}() returned {type(example.model).__name__}; torch.export asks for an nn.Module")
    torch.export.save(torch.export.export(example.model, example.args, example.kwargs), file)


if __name__ == "__main__":
    _main()
