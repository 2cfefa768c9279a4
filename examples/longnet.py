"""A LongNet encoder of the shape of gigapath's (16 heads of 48, five patterns, random weights), spread over the ranks.

    torchrun --nproc-per-node 2 examples/longnet.py --length 4096 --scale 64

Rank 0 compares with one process, tells what was sent and draws who keeps, receives and computes which rows.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _picture import draw
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import ringopt

LENGTHS, RATES, HEADS, WIDTH = (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), 16, 768


class LongNet(nn.Sequential):
    """Layers of torch's encoder with dilated attention, then the mean; `scale` divides the segment lengths."""

    def __init__(self, depth: int, scale: int):
        super().__init__(*(nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0, batch_first=True) for _ in range(depth)))
        lengths = [max(length // scale, rate) for length, rate in zip(LENGTHS, RATES, strict=True)]
        for layer in self:
            layer.self_attn = ringopt.nn.MultiheadDilatedAttention(WIDTH, HEADS, lengths, RATES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


def steps(model: nn.Module, x: Tensor, count: int, title: str, quiet: bool) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of the last."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in track(range(count), title, console=Console(stderr=True), disable=quiet):
        begin = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("length", 4096), ("layers", 2), ("scale", 64), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--picture", type=Path, default=Path("longnet.svg"))
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, model = torch.randn(1, asked.length, WIDTH), LongNet(asked.layers, asked.scale)
    again = copy.deepcopy(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    compiled = torch.compile(model, backend="ring")  # the one line that spreads it
    losses, seconds = steps(compiled, x, asked.steps, f"{ranks} ranks", quiet=rank > 0)
    dist.destroy_process_group()
    if rank > 0:
        return
    alone, alone_seconds = steps(again, x, asked.steps, "1 process", quiet=False)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
    site = ringopt.reports()[-1].sites[0]
    asked.picture.write_text(draw(site.pattern, asked.length, HEADS, ranks, site.layout), encoding="utf-8")
    Console().print(ringopt.reports()[-1], f"who keeps, receives and computes which rows: {asked.picture}")
    print(f"a step: {seconds:.2f} s on {ranks} ranks, {alone_seconds:.2f} s on one; losses differ by {apart:.1e}")
    raise SystemExit("the losses differ by more than rounding" if apart > 1e-5 else 0)


if __name__ == "__main__":
    main()
