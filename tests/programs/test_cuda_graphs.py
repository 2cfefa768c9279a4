"""`mode="reduce-overhead"`: Inductor parts its graphs around operators that talk or decide on the host, and each part
is what a CUDA graph would hold. Here a part runs on the CPU, and its results lie in memory that the next step uses
again, as those of a CUDA graph do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.utils import set_customized_partition_wrappers

import ringopt
from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.distributed.mesh import Mesh
from tests.harness.models import difference

B, N, D, H, STEPS = 1, 24, 8, 2, 3
TALKS = ("exchange", "all_gather", "all_reduce", "start_all_gather", "start_all_reduce")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(1))
        self.feeds = nn.ModuleList(nn.Linear(D, D) for _ in range(1))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        for layer, feed in zip(self.layers, self.feeds, strict=True):
            q, k, v = (part.view(B, N, H, D // H).transpose(1, 2) for part in layer(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=kept[:, None, None, :].expand(B, 1, N, N))
            x = x + y.transpose(1, 2).reshape(B, N, D)
            x = x + F.silu(feed(x))
        return x.square().mean()


class Graphs:
    """In place of CUDA graphs. `inside`: whether one is recorded or replayed; `broken`: what was called there that none
    can hold."""

    def __init__(self) -> None:
        self.inside, self.parts, self.broken = 0, set[int](), set[str]()

    def graph_of(self, part: Callable[[Sequence[Any]], Sequence[Any]], about: object) -> Callable[..., Any]:
        held: list[Any] = []

        def replayed(arguments: Sequence[Any]) -> Sequence[Any]:
            self.parts.add(id(held))
            self.inside += 1
            found = part(arguments)
            self.inside -= 1
            if not held:
                held.extend(found)
            for old, new in zip(held, found, strict=True):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)
            return held

        return replayed

    def watch(self, owner: type, name: str) -> Any:
        called = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                self.broken.add(name)
            return called(*args, **kwargs)

        return patch.object(owner, name, noted)


def steps(run: Any, module: nn.Module) -> list[Tensor]:
    found = []
    for number in range(STEPS):
        torch.manual_seed(number)
        x, kept = torch.randn(B, N, D, dtype=torch.float64), torch.ones(B, N, dtype=torch.bool)
        kept[:, N - 3 * number :] = False
        kept[:, 0] = True
        module.zero_grad()
        loss = run(x, kept)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in module.parameters())]
    return found


def on_rank() -> tuple[float, int, set[str], int]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    module, graphs = Layers().double(), Graphs()
    expected = steps(module, module)
    set_customized_partition_wrappers(graphs.graph_of)
    watched = [graphs.watch(Mesh, name) for name in TALKS] + [graphs.watch(MaskFacts, "__init__")]
    settings = [patch.object(BaseSchedulerNode, "is_gpu", lambda self: True)]
    for each in (*watched, *settings):
        each.start()
    try:
        with torch._inductor.config.patch(graph_partition=True):
            found = steps(torch.compile(module, backend="ring", mode="reduce-overhead"), module)
    finally:
        set_customized_partition_wrappers(None)
        for each in (*watched, *settings):
            each.stop()
    sharded = sum(site.refusal is None for site in ringopt.reports()[-1].sites)
    return difference(found, expected), len(graphs.parts), graphs.broken, sharded


def test_what_talks_is_in_no_cuda_graph(ranks: Any) -> None:
    for error, parts, broken, sharded in ranks(2, on_rank, timeout=280):
        assert broken == set()
        assert sharded == 1 and parts >= 3
        assert error < 1e-10
