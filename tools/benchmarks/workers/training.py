"""One rank's part of `ringopt bench training`: a Llama-shaped model, and what a step of its training holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringopt
from ringopt.distributed.roll_call import batch
from ringopt.runtime import input_check
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.workers.overlap_rank import begin_rank
from ringopt.tools.common.resident import give_back, reset_peak, resident

VOCABULARY, HEAD = 256, 64


class Layer(nn.Module):
    """As in Llama: RMSNorm, rotary embedding, two query heads a KV head, SwiGLU."""

    def __init__(self, width: int):
        super().__init__()
        self.heads, self.kv_heads, inner = width // HEAD, max(1, width // HEAD // 2), 3 * width
        self.norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * HEAD, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        y = F.scaled_dot_product_attention(
            turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=self.heads > self.kv_heads
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        fed = self.feed_norm(x)
        made: Tensor = x + self.down(F.silu(self.gate(fed)) * self.up(fed))
        return made


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, Su et al. 2021), halves of the head dim as pairs."""
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


class Llama(nn.Module):
    """ids [B, S] -> the loss of the next token; every layer a checkpoint where that is asked for."""

    def __init__(self, layers: int, width: int, checkpointed: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer(width) for _ in range(layers)), nn.RMSNorm(width)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        rates = 1e4 ** (torch.arange(0, HEAD, 2) / -HEAD)
        angles = (torch.arange(ids.shape[1])[:, None] * rates).repeat(1, 2)
        x, cos, sin = self.embed(ids), angles.cos(), angles.sin()
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.checkpointed else layer(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def on_a_rank(rank: int, ranks: int, length: int, layers: int, width: int, checkpointed: bool, backend: str) -> Row:
    """Of the second step, when all is compiled: seconds, of which some were spent on comparing batches, and the peak
    of resident memory above what was resident before it, gradients included there."""
    begin_rank()
    give_back()
    model = Llama(layers, width, checkpointed)
    compiled = torch.compile(model, backend=backend)
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = compiled(ids)
        loss.backward()
        return float(loss.detach())

    step()
    before, began = reset_peak(), time.perf_counter()
    with ringopt.record_traffic() as traffic, comparing() as spent:
        loss = step()
    seconds, sent = time.perf_counter() - began, traffic.bytes_sent
    return {"bytes": resident("VmHWM") - before, "seconds": seconds, "loss": loss, "sent": sent, "compared": sum(spent)}


@contextmanager
def comparing() -> Iterator[list[float]]:
    """The seconds that the ranks spend on comparing their batches, with what they wait for each other in it."""
    spent: list[float] = []

    def clocked(function: Callable[..., None]) -> Callable[..., None]:
        def run(*given: object) -> None:
            began = time.perf_counter()
            function(*given)
            spent.append(time.perf_counter() - began)

        return run

    begun = mock.patch.object(input_check, "begin_batch", clocked(batch.begin_batch))
    with begun, mock.patch.object(batch, "settle_batch", clocked(batch.settle_batch)):
        yield spent
