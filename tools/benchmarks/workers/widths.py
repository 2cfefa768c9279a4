"""Layers as wide as in models that people run: a step on one process, compiled by Inductor, and over ranks."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ringopt.distributed.traffic import record_traffic
from ringopt.tools.benchmarks.lab.link_lab import as_ranks
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.models.real_widths import VOCABULARY, Family, build_wide
from ringopt.tools.benchmarks.workers.overlap_rank import begin_rank, nothing, together
from ringopt.tools.common.resident import STATUS, reset_peak, resident

ENTRIES = 4096  # of each gradient that are compared, evenly over it: whole they are gigabytes


@dataclass(frozen=True)
class Wide:
    """Layers of a family at a length, `repeats` timed steps of each, compiled by `inner`."""

    family: Family
    length: int
    repeats: int
    inner: str


def widths_of(wide: Wide, ranks: int, longest: float) -> Row:
    """Raises LabError where a rank fails, or takes longer than `longest` seconds."""
    found = as_ranks(ranks, over_ranks, wide, timeout=longest)
    one = {key: value for key, value in found[0].items() if key.startswith("alone_") or key == "parameters"}
    most = {key: max(each[key] for each in found) for key in ("first", "seconds", "error")}
    held = {key: max((each[key] for each in found if each[key] is not None), default=None) for key in ("kept", "peak")}
    return one | most | held | {"sent": sum(each["sent"] for each in found)}


def over_ranks(rank: int, ranks: int, wide: Wide) -> dict[str, Any]:
    """Of a step on this rank; and of rank 0 alone, while the others wait. Both have the same parameters."""
    begin_rank()
    model = build_wide(wide.family)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        ring = Step(model, wide.length, "ring", options={"inner_backend": wide.inner})
        alone = Step(model, wide.length, wide.inner)
        found = {} if rank else {f"alone_{key}": value for key, value in alone.first().items()}
        expected: list[Any] = [alone.sampled() if rank == 0 else None]
        dist.broadcast_object_list(expected, 0)
        found |= ring.first()
        with record_traffic() as traffic:
            ring()
        found["sent"] = sum(event.bytes for event in traffic.events)
        found["error"] = distance(ring.sampled(), expected[0])
        times = together({"ring": ring, "alone": nothing if rank else alone}, wide.repeats)
    seconds = {"seconds": times["ring"].seconds, "alone_seconds": times["alone"].seconds}
    return found | seconds | {"parameters": sum(x.numel() for x in model.parameters())}


class Step:
    """Loss and gradients of one sequence."""

    def __init__(self, model: nn.Module, length: int, backend: str, **options: Any):
        self.model, self.run = model, torch.compile(model, backend=backend, dynamic=False, **options)
        self.ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        self.model.zero_grad()
        self.backward(self.forward())

    def forward(self) -> Tensor:
        loss: Tensor = self.run(input_ids=self.ids, labels=self.ids).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.loss = loss.detach()

    def first(self) -> dict[str, float | None]:
        """Seconds of the first step, compiled anew, and bytes of the second."""
        begin = time.perf_counter()
        self()
        seconds = time.perf_counter() - begin
        return {"first": seconds, **self.held()}

    def held(self) -> dict[str, int | None]:
        """Bytes of a step beside parameters: what is kept for its backward, and at its peak, gradients among it. None
        on a system without /proc."""
        if not STATUS.exists():
            return {"kept": None, "peak": None}
        self.model.zero_grad()
        before = reset_peak()
        loss = self.forward()
        forward = resident("VmHWM")
        kept = reset_peak()
        self.backward(loss)
        return {"kept": kept - before, "peak": max(forward, resident("VmHWM")) - before}

    def sampled(self) -> list[Tensor]:
        """The loss, and ENTRIES of each gradient."""
        gradients = [x.grad.flatten() for x in self.model.parameters() if x.grad is not None]
        return [self.loss, *(x[:: max(1, len(x) // ENTRIES)].clone() for x in gradients)]
