"""torchtitan's Llama 3, compiled block by block as its trainer does, one sequence spread over the ranks.

    torchrun --nproc-per-node 2 examples/train_titan.py

torchtitan passes a backend's name and no options (`--compile.backend ring`), so these are set once, for all that is
compiled: `ringopt.defaults(mesh=..., outputs="lazy")`. Each block then takes and leaves a rank's own tokens. Needs
torchtitan.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import ringopt

LENGTH, STEPS = 512, 3


def llama() -> torch.nn.Module:
    """The debug model, of two layers, with SDPA."""
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model: torch.nn.Module = config.build()
    model.init_states()
    return model


def main() -> int:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks, device = dist.get_world_size(), "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = llama().to(device)
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=ranks, tp=1, pp=1, ep=1, world_size=ranks)
    with ringopt.defaults(mesh=mesh["cp"], outputs="lazy"):
        apply_compile(model, compile_config=CompileConfig(enable=True, backend="ring"), parallel_dims=dims)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            tokens = torch.randint(2048, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step)).to(device)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print(*ringopt.reports(), sep="\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
