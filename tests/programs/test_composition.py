"""Data, tensor and fully sharded parallelism beside the sequence: 2 x 2 ranks, three steps, single-process weights."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ringopt
from tests.harness.models import difference
from tests.sharding.programs import D
from tests.tensor.test_lazy import Model


class Wide(nn.Module):
    """With two layers that are good to spread over ranks by their columns and rows."""

    def __init__(self):
        super().__init__()
        self.model, self.up, self.down = Model(), nn.Linear(D, 16).double(), nn.Linear(16, D).double()

    def forward(self, x, labels):
        return self.model(x + self.down(self.up(x).relu()), labels)


def batch(step, part=slice(None)):
    torch.manual_seed(step)
    return torch.randn(4, 13, D, dtype=torch.float64)[part], torch.randint(0, 50, (4, 13))[part]


def train(model, run, part=slice(None), accumulate=1, steps=3):
    """Losses and weights of some steps, gradients clipped."""
    plain = not isinstance(model, Wide)  # torch's lists of tensors hold either plain ones or DTensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=plain)
    losses = []
    for step in range(steps * accumulate):
        loss, _logits = run(*batch(step, part))
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (step + 1) % accumulate == 0:
            if plain:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.stack(losses), [weight.detach() for weight in weights]


def apart(make, mesh, of_dp, accumulate, steps):
    """How far losses and weights are from those of one process; each dp rank has its part of the batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    losses, weights = train(*(make.model(),) * 2, accumulate=accumulate, steps=steps)
    torch.manual_seed(0)
    rank = mesh["dp"].get_local_rank()
    part = slice(2 * rank, 2 * rank + 2) if of_dp else slice(None)
    found, found_weights = train(*make(mesh), part, accumulate, steps)
    dist.all_reduce(found)
    return difference([found / 4, *found_weights], [losses, *weights])


def compiled(model, mesh, sync=True, **options):
    chosen = {"mesh": mesh["cp"], "inner_backend": "aot_eager", "timeout": 60, "sync_gradients": sync, **options}
    return torch.compile(model, backend="ring", options=chosen)


def ddp_in_parts(mesh):
    """DDP cuts Dynamo's graph where its buckets end."""
    model = Model()
    group = mesh._flatten("dp_cp").get_group()
    return model, compiled(DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0005), mesh, sync=False)


def compiled_in_ddp(mesh):
    model = Model()
    return model, DistributedDataParallel(compiled(model, mesh), process_group=mesh["dp"].get_group())


def fsdp(mesh):
    model, both = Model(), mesh["dp", "cp"]._flatten("both")
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=both)
    return model, compiled(model, mesh, sync=False, outputs="lazy")


def tensor_parallel(mesh):
    model = parallelize_module(Wide(), mesh["dp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, compiled(model, mesh)


ddp_in_parts.model = compiled_in_ddp.model = fsdp.model = Model
tensor_parallel.model = Wide


def beside(name, of_dp=True, accumulate=1, steps=3):
    mesh, reports = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), len(ringopt.reports())
    with patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 256):  # so that buckets of DDP may be so small
        error = apart(globals()[name], mesh, of_dp, accumulate, steps)
    return error, [(len(report.sites), report.refusal) for report in ringopt.reports()[reports:]]


@pytest.mark.zoo
def test_ddp_in_parts(ranks):
    for error, _ in ranks(4, beside, "ddp_in_parts"):
        assert error < 1e-9


def test_ddp(ranks):
    for error, graphs in ranks(4, beside, "compiled_in_ddp", True, 2, 2):
        assert error < 1e-9 and graphs[0] == (2, None)


@pytest.mark.zoo
def test_fifty_steps_of_ddp(ranks):
    """The curve of losses, and the weights at its end."""
    for error, _ in ranks(4, beside, "compiled_in_ddp", True, 1, 50):
        assert error < 1e-7


def test_fsdp(ranks):
    for error, graphs in ranks(4, beside, "fsdp", True, 1, 2):
        assert error < 1e-9 and len(graphs) == 3  # FSDP breaks the graph around what it shards


@pytest.mark.zoo
def test_tensor_parallel_layers(ranks):
    for error, graphs in ranks(4, beside, "tensor_parallel", False):
        assert error < 1e-9 and graphs == [(2, None)]
