"""One rank of p in this process, alone: what it receives are zeros. For what it sends and holds, numbers do not matter.

ran = step_of(build, rank=0, p=4, training=True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from ringopt.backend import inner
from ringopt.distributed.mesh import PretendedMesh, register
from ringopt.distributed.traffic import record_traffic
from ringopt.drivers.compile import transform
from ringopt.options import Options
from ringopt.report import Site
from ringopt.runtime.graph_boundary import examples
from ringopt.tools.benchmarks.lab.tensor_bytes import peak_bytes
from ringopt.tools.benchmarks.workers.memory import Alone

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]


class Seat(PretendedMesh):
    """The place of the rank while its graph is made."""

    @property
    def name(self) -> str:
        return Alone(PretendedMesh(self.rank, self.size)).name


@dataclass(frozen=True)
class Ran:
    """Of the second step: bytes sent, and the most bytes allocated, parameters included."""

    sites: tuple[Site, ...]
    bytes: int
    memory: int


def step_of(build: Build, rank: int, p: int, training: bool, **options: Any) -> Ran:
    """A training step (of the loss, or the square of the first output) or a forward, as compiled for `rank`."""
    register(Alone(PretendedMesh(rank, p)))
    chosen, sites = Options.of(options), list[Site]()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        made = transform(gm, inputs, chosen, Seat(rank, p, "h100"))
        assert made.graph is not None, made.report
        sites.extend(made.report.sites)
        return inner(made.graph, examples(inputs, made.given), chosen, None, made.budget)

    torch._dynamo.reset()
    model, inputs = build()
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        found = compiled(**inputs)
        first = found if isinstance(found, Tensor) else next(iter(found.values()))
        if training:
            (first if first.dim() == 0 else first.square().mean()).backward()

    def again() -> None:
        model.zero_grad(set_to_none=True)
        step()

    with torch.set_grad_enabled(training):
        step()
        with record_traffic() as traffic:
            again()
        model.zero_grad(set_to_none=True)
        held = peak_bytes(step)
    return Ran(tuple(sites), traffic.bytes_sent, held + sum(x.nbytes for x in model.parameters()))
