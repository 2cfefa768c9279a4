"""A training that goes on after a rank has died, from a checkpoint that is written after every step.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 2 \\
        examples/train_restart.py --checkpoint checkpoint.pt --die-at 3

When a rank dies, the others get an error at their next message and leave; torchrun then starts all of them anew. The
variable gives every start a store of its own: in the one that torchrun keeps, gloo would read the addresses of ranks
that are gone, and hang. With --die-at N rank 1 kills itself in step N, the first time it comes there. The losses are
those of a run that nothing has disturbed, to the bit.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, WIDTH, HEADS, WORDS = 256, 32, 4, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(step: int) -> Tensor:
    return torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(step))


def save(path: Path, state: dict[str, Any]) -> None:
    """Whoever reads it meanwhile finds the whole file of before."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file, of which rank 0 makes a new one a step")
    parser.add_argument("--steps", type=int, default=6, help="training steps (default 6)")
    parser.add_argument("--die-at", type=int, help="a step in which rank 1 kills itself, once")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    torch.manual_seed(0)
    model, losses = Model(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if args.checkpoint.exists():  # all ranks read it before any of them ends another step
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})  # to begin at once
    for step in range(len(losses), args.steps):
        loss = compiled(batch(step))
        if (start, rank, step) == (0, 1, args.die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"start {start}, step {step}: loss {losses[-1]!r}", flush=True)
            save(args.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
