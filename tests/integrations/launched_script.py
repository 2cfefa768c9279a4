"""A script as others launch it: it knows of torch.distributed only what its launcher has set, and prints its losses.

LAUNCHER [torchrun] launched_script.py         # initializes the process group from the environment
LAUNCHER launched_script.py slurm              # from what srun sets
LAUNCHER launched_script.py without            # forgets to
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Attends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def losses() -> list[float]:
    """Of three steps."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = Attends()
    model = torch.compile(module, backend="ring", options={"inner_backend": "eager"})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x, found = torch.randn(2, 12, 8), []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(round(float(loss), 6))
    return found


def said() -> str:
    import ringopt

    size = dist.get_world_size() if dist.is_initialized() else 1
    shown = f"{losses()} on {size} ranks"
    return f"{shown}, {sum(site.refusal is None for site in ringopt.reports()[0].sites)} sharded"


def main() -> int:
    how = sys.argv[-1]
    if how == "slurm":
        rank, size = (int(os.environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS"))
        dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=size)
    elif how != "without" and "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    line = said()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
