"""torchtitan's models, compiled block by block as its trainer does, which passes a backend's name and no options."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ringopt
from tests.integrations.trainings import as_launched


def model_of(kind: str, sequence_parallel: bool | None = None) -> Any:
    """Its debug model, of two layers. Flex attention has no gradient on the CPU, so it is the SDPA of torchtitan's
    common modules. With `sequence_parallel`, or without, it may be parallelized over ranks that share its weights."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    torch.manual_seed(0)
    if kind == "llama":
        from torchtitan.models.llama3 import llama3_configs

        config = llama3_configs["debugmodel"](attn_backend="flex")
    else:
        from torchtitan.models.deepseek_v3 import deepseekv3_configs

        config = deepseekv3_configs["debugmodel"](attn_backend="flex", moe_comm_backend="standard")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if sequence_parallel is not None:
        from torchtitan.models.llama3.sharding import set_llama3_sharding_config

        set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    model = config.build()
    model.init_states()
    return model


def stepped(kind: str, mesh: dict[str, Any] | None, options: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Losses and gradient norms; FSDP2 over all ranks where some are data parallel."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.distributed.parallel_dims import ParallelDims

    before, ranks = len(ringopt.reports()), dist.get_world_size()
    with as_launched():
        sizes = {"cp_size": 1, "tp_size": 1, "sp": True} | (mesh or {})
        cp, tp = sizes["cp_size"], sizes["tp_size"]
        model, part = model_of(kind, sizes["sp"] if tp > 1 else None), slice(None)
        defaults = None
        if mesh is not None:
            replicas = ranks // (cp * tp)
            both = init_device_mesh("cpu", (replicas, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
            dims = ParallelDims(
                dp_replicate=1, dp_shard=replicas, cp=cp, tp=tp, pp=1, ep=1, world_size=ranks,
                spmd_backend="partial_dtensor",
            )  # fmt: skip
            if tp > 1:
                parallel_dims.device_type = "cpu"  # "cuda" to it on a machine without an accelerator
                model.parallelize(dims)
            defaults = ringopt.defaults(mesh=both["cp"], outputs="lazy", **options)
            apply_compile(model, compile_config=CompileConfig(enable=True, backend="ring"), parallel_dims=dims)
            if replicas > 1:
                from torch.distributed.fsdp import fully_shard

                part = slice(both.get_local_rank("dp"), both.get_local_rank("dp") + 1)
                for block in (*model.layers.values(), model):
                    fully_shard(block, mesh=both["dp", "cp"]._flatten("both"))
        try:
            found = trained(model, part, steps)
        finally:
            if defaults is not None:
                defaults.end()
    reports = ringopt.reports()[before:]
    found["sites"] = [site.strategy for report in reports for site in report.sites if site.refusal is None]
    found["refused"] = [str(report.refusal) for report in reports if report.refusal]
    found["reports"] = [str(report) for report in reports]
    return found


def trained(model: Any, part: slice, steps: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    found: dict[str, Any] = {"loss": [], "grad_norm": []}
    for step in range(steps):
        tokens = torch.randint(2048, (2, 41), generator=torch.Generator().manual_seed(step))[part]
        logits = model(tokens[:, :-1])
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits  # of a head in parts
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found["loss"].append(float(mean) / dist.get_world_size())
        found["grad_norm"].append(float(norm))
    return found
