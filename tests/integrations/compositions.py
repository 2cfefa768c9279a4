"""Trainings beside other ways to spread or save work: each is a wrapper or a habit that a case switches on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import ringopt

WORDS, WIDTH, HEADS, LENGTH, BATCH = 40, 16, 2, 13, 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by names of weights, of which a stage has some


@dataclass(frozen=True)
class Case:
    """`around` is what the ranks do that do not share a sequence; `habits` are those of the training."""

    around: str = ""
    habits: tuple[str, ...] = ()
    inner: str = "aot_eager"
    steps: int = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Words to the loss of the next ones; without labels, to logits."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)
        return logits if labels is None else loss_of(logits, labels)


class Half(nn.Module):
    """A stage of a pipeline, with the names of the whole."""

    def __init__(self, net: Net, stage: int) -> None:
        super().__init__()
        self.words, self.head = net.words if stage == 0 else nn.Identity(), net.head if stage == 1 else nn.Identity()
        self.blocks, self.checkpointed = nn.ModuleDict({str(stage): net.blocks[stage]}), net.checkpointed

    def forward(self, x: Tensor) -> Tensor:
        (block,), x = self.blocks.values(), self.words(x)
        found: Tensor = self.head(checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return made[:, :-1], made[:, 1:]


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon that leaves rounding what it is: the gradient of a key's bias is nothing else."""
    how = {name: True for name in ("fused", "foreach") if name in case.habits} or {"foreach": False}
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **how)


def mesh_of(case: Case) -> DeviceMesh:
    """Dims "other" and "cp"; of two ranks without data parallelism, one and two."""
    ranks = dist.get_world_size()
    cp = 2 if ranks % 2 == 0 else ranks
    return init_device_mesh("cpu", (ranks // cp, cp), mesh_dim_names=("other", "cp"))


def compiled(model: nn.Module, case: Case, mesh: DeviceMesh, **options: Any) -> None:
    model.compile(backend="ring", options={"mesh": mesh["cp"], "inner_backend": case.inner, **options})


# ---- what is around a model ------------------------------------------------------------------------------------------


def plain(net: Net, case: Case, mesh: DeviceMesh) -> nn.Module:
    compiled(net, case, mesh)
    return net


def ddp(net: Net, case: Case, mesh: DeviceMesh) -> nn.Module:
    compiled(net, case, mesh)
    return DistributedDataParallel(net, process_group=mesh["other"].get_group())


def fsdp(net: Net, case: Case, mesh: DeviceMesh) -> nn.Module:
    """Over all ranks; gradients are summed once. Checkpointed blocks are compiled each for itself: Dynamo traces no
    checkpoint around what breaks its graph, as FSDP2 does."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "amp" in case.habits else MixedPrecisionPolicy()
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh["other", "cp"]._flatten("all"), mp_policy=policy)
    for part in net.blocks if "checkpointing" in case.habits else (net,):
        compiled(part, case, mesh, sync_gradients=False, outputs="lazy")
    return net


def tensor_parallel(net: Net, case: Case, mesh: DeviceMesh) -> nn.Module:
    for block in net.blocks:
        parallelize_module(block, mesh["other"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled(net, case, mesh)
    return net


AROUND: dict[str, Callable[[Net, Case, DeviceMesh], nn.Module]] = {
    "": plain, "DDP": ddp, "FSDP2": fsdp, "TP": tensor_parallel
}  # fmt: skip


# ---- trainings -------------------------------------------------------------------------------------------------------


def trained(case: Case, ring: bool, folder: str = "") -> dict[str, Any]:
    """Losses and weights at the end; with a `folder`, a checkpoint is written behind the second step."""
    torch.manual_seed(0)
    net, before = Net("checkpointing" in case.habits), len(ringopt.reports())
    mesh = mesh_of(case) if ring else None
    model = net if mesh is None else AROUND[case.around](net, case, mesh)
    optimizer = optimizer_of(case, model)
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "EMA" in case.habits else None
    part, losses = of_rank(case, mesh), []
    for step in range(case.steps):
        losses.append(step_of(case, model, optimizer, [x[part] for x in batch(step)]))
        if mean is not None:
            mean.update_parameters(net)
        if folder and step == 1:
            save(net, optimizer, folder)
    return {"loss": averaged(losses), **of_model(net if mean is None else mean.module), **of_reports(before)}


def save(net: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state, of_optimizer = get_state_dict(net, optimizer, options=FLAT)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)


def resumed(case: Case, ring: bool, folder: str) -> dict[str, Any]:
    """What `trained` finds behind its second step, from the checkpoint that it wrote, here of another number of
    ranks."""
    torch.manual_seed(1)
    net, before = Net("checkpointing" in case.habits), len(ringopt.reports())
    model = AROUND[case.around](net, case, mesh_of(case)) if ring else net
    optimizer = optimizer_of(case, model)
    state, of_optimizer = get_state_dict(net, optimizer, options=FLAT)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state, optim_state_dict=of_optimizer, options=FLAT)
    part = of_rank(case, mesh_of(case) if ring else None)
    losses = [step_of(case, model, optimizer, [x[part] for x in batch(step)]) for step in range(2, case.steps)]
    return {"loss": averaged(losses), **of_model(net), **of_reports(before)}


def step_of(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, given: list[Tensor]) -> Tensor:
    mixed = "amp" in case.habits and case.around != "FSDP2"
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(*given)
    loss.backward()
    # torch's lists of tensors hold either plain ones or DTensors.
    if case.around != "TP" and "unclipped" not in case.habits:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    found: Tensor = loss.detach()
    return found


def piped(case: Case, folder: str = "") -> dict[str, Any]:
    """Two stages, each on ranks that share the sequence."""
    torch.manual_seed(0)
    mixed = "amp" in case.habits
    net, mesh, before = Net("checkpointing" in case.habits), mesh_of(case), len(ringopt.reports())
    stage = mesh["other"].get_local_rank()
    half = Half(net, stage)
    compiled(half, case, mesh)
    mean = AveragedModel(half, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "EMA" in case.habits else None
    ids, _ = batch(0)
    hidden = torch.zeros(BATCH // 2, LENGTH, WIDTH, requires_grad=True)
    logits = torch.zeros(BATCH // 2, LENGTH, WORDS, dtype=torch.bfloat16 if mixed else torch.float32)
    ends = [ids[: BATCH // 2], hidden, logits]
    pipe = PipelineStage(
        half, stage, 2, torch.device("cpu"), input_args=ends[stage], output_args=ends[stage + 1],
        group=mesh["other"].get_group(),
    )  # fmt: skip
    schedule = ScheduleGPipe(pipe, n_microbatches=2, loss_fn=loss_of)
    optimizer, losses = optimizer_of(case, half), []
    for step in range(case.steps):
        ids, labels = batch(step)
        parts: list[Tensor] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            schedule.step(ids) if stage == 0 else schedule.step(target=labels, losses=parts)
        optimizer.step()
        optimizer.zero_grad()
        if mean is not None:
            mean.update_parameters(half)
        if folder and step == 1:
            save(half, optimizer, folder)
        losses.append(torch.stack([part.detach() for part in parts]).mean() if parts else torch.zeros(()))
    found = torch.stack(losses)
    dist.all_reduce(found)
    of_stage = of_model(half if mean is None else mean.module)
    return {"loss": (found / mesh["cp"].size()).tolist(), **of_stage, **of_reports(before)}


# ---- what is compared ------------------------------------------------------------------------------------------------


def of_rank(case: Case, mesh: DeviceMesh | None) -> slice:
    """Of a batch."""
    if mesh is None or case.around not in ("DDP", "FSDP2"):
        return slice(None)
    each, rank = BATCH // mesh["other"].size(), mesh["other"].get_local_rank()
    return slice(each * rank, each * rank + each)


def averaged(losses: list[Tensor]) -> list[float]:
    """Over ranks that have batches of one size."""
    found = torch.stack([loss.double() for loss in losses])
    dist.all_reduce(found)
    return list((found / dist.get_world_size()).tolist())


def of_model(net: nn.Module) -> dict[str, Any]:
    weights = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in net.named_parameters()}
    return {"weights": {name: weight.detach().clone() for name, weight in weights.items()}}


def of_reports(before: int) -> dict[str, Any]:
    reports = ringopt.reports()[before:]
    return {
        "sites": sum(site.refusal is None for report in reports for site in report.sites),
        "refused": [str(report.refusal) for report in reports if report.refusal],
    }


def folder_of(name: str) -> str:
    return os.path.join(name, "checkpoint")
