"""A small decoder, compiled, against itself in float32; with CUDA graphs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringopt.tools.benchmarks.gpu.checks import skipped, verdict
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row

MODES = ("default", "reduce-overhead")
WIDTH, HEADS = 256, 4


class Layer(nn.Module):
    """Causal attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        deeper: Tensor = x + self.down(F.gelu(self.up(x)))
        return deeper


def compiled(device: torch.device, tokens: int) -> Iterator[Row]:
    """Two layers, forward and backward, called twice."""
    for mode in MODES:
        what = f"two layers, {mode}"
        if mode != "default" and device.type != "cuda":
            yield skipped("compiled", what, "CUDA graphs need a GPU")
            continue
        torch.manual_seed(0)
        model = nn.Sequential(Layer(), Layer()).to(device)
        x = torch.randn(1, tokens, WIDTH, device=device)
        exact = trained(model, model, x)
        narrow = nn.Sequential(Layer(), Layer()).to(device, torch.bfloat16)
        narrow.load_state_dict(model.state_dict())
        fast = torch.compile(narrow, backend="ring", mode=None if mode == "default" else mode)
        found = [trained(fast, narrow, x.bfloat16()) for _ in range(2)][-1]
        yield verdict("compiled", what, distance([y.float() for y in found], exact))


def trained(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of the parameters."""
    model.zero_grad()
    out = call(x)
    out.float().square().mean().backward()
    return [out.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
