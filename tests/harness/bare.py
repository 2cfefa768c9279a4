"""One step of a training on all ranks, with what a bare installation has: `.ci/bare` runs it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 64, 16)
    expected = model(x)
    found = torch.compile(model, backend="ring")(x)  # type: ignore[call-overload]
    found.square().sum().backward()
    assert (found - expected).abs().max() < 1e-6
    import ringopt

    assert ringopt.reports()[0].sharded_fraction == 1.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
