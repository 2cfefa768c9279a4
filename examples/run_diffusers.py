"""A Flux transformer of diffusers, tiny and with random weights: the tokens of one image spread over the ranks.

    torchrun --nproc-per-node 2 examples/run_diffusers.py

One line differs from one device: `transformer.compile(backend="ring")`; of a pipeline, `pipe.transformer.compile(...)`.
The result is compared with that of the transformer as it was. Needs `pip install diffusers`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

import ringopt

SIDE, CAPTION, WIDTH = 32, 16, 32  # patches along a side of the image, tokens of the caption, and their width


def main() -> int:
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, patch_size=1, in_channels=16, num_layers=2, num_single_layers=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    places = torch.stack([torch.zeros(SIDE, SIDE), rows, columns], -1).flatten(0, 1)
    given = {
        "hidden_states": torch.randn(1, SIDE * SIDE, 16), "img_ids": places, "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, CAPTION, WIDTH), "txt_ids": torch.zeros(CAPTION, 3),
        "pooled_projections": torch.randn(1, WIDTH),
    }  # fmt: skip
    with torch.no_grad():
        expected = transformer(**given).sample
        transformer.compile(backend="ring")
        found = transformer(**given).sample
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"largest difference from one device {float((found - expected).abs().max()):.1e}")
        print(*ringopt.reports(), sep="\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
