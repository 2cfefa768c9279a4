"""Loops with a DeepSpeed engine, as those of trainings.py, but in processes of their own: DeepSpeed knows one process
group in the life of a process.

    torchrun --nproc-per-node 2 tests/integrations/deepspeed_trainings.py '{"stage 1": {"stage": 1}}'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringopt
from tests.integrations.trainings import build, padded, samples

STEPS = 3


def stepped(zero: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`zero` is "zero_optimization" of DeepSpeed's config. Two ranks share a sequence; further ones have one sample of
    two. On one process nothing is compiled."""
    ranks, before = dist.get_world_size(), len(ringopt.reports())
    torch._dynamo.reset()
    model = build("llama")
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    part = slice(None)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
        rank = mesh.get_local_rank("dp")
        part = slice(rank, rank + 1) if ranks > 2 else part
        engine.compile(backend="ring", compile_kwargs={"options": {**options, "mesh": mesh["cp"]}})
    losses = []
    for step in range(STEPS):
        batch = padded(samples("equal", 2 * STEPS)[2 * step : 2 * step + 2])
        loss = engine(**{name: value[part] for name, value in batch.items()}, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    engine.destroy()
    reports = ringopt.reports()[before:]
    return {
        "loss": losses,
        "sites": sum(site.refusal is None for report in reports for site in report.sites),
        "refused": [str(report.refusal) for report in reports if report.refusal],
    }


def main() -> int:
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.init_distributed("gloo")
    found = {}
    for name, case in json.loads(sys.argv[1]).items():
        try:
            found[name] = stepped(**case)
        except Exception as error:  # of whatever kind: it is what was found
            found[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    if dist.get_rank() == 0:
        print("found", json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
