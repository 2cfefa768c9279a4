"""Attention on one device, written out: what every way of spreading it over ranks is held against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layout_of


@dataclass(frozen=True)
class Problem:
    """q, dout [B, Hq, n, D or Dv], k, v [B, Hkv, m, D or Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[3]) ** -0.5

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(*(x.to(dtype) for x in (self.q, self.k, self.v, self.dout)))


def problem(
    n: int,
    m: int | None = None,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(n)

    def draw(heads: int, rows: int, dim: int) -> Tensor:
        return torch.randn(batch, heads, rows, dim, dtype=torch.float64, generator=generator).to(dtype)

    m = n if m is None else m
    return Problem(
        draw(heads[0], n, dims[0]), draw(heads[1], m, dims[0]), draw(heads[1], m, dims[1]), draw(heads[0], n, dims[1])
    )


def visible(pattern: str, n: int, m: int) -> Tensor:
    """[n, m]: which key a query sees, from the definition of the pattern."""
    query, key = torch.arange(n)[:, None], torch.arange(m)
    name, _, rest = pattern.removesuffix(")").partition("(")
    numbers = [int(number) for number in re.findall(r"\d+", rest)]
    both = name == "full" or "both" in rest
    past = torch.ones(n, m, dtype=torch.bool) if both else key <= query
    given = dict(re.findall(r"(sinks|rate)=(\d+)", rest))
    rate = int(given.get("rate", 1))
    stride = (key - query) % rate == 0
    if name == "window":
        near = stride & ((key - query).abs() < numbers[0] * rate)
        return past & (near | (key < int(given.get("sinks", 0))))
    if name == "blocks":
        return past & in_blocks(rest, n, m)
    if name == "prefix":
        return past | (key < numbers[0])
    if name == "chunked":
        return past & (query // numbers[0] == key // numbers[0])
    if name == "documents":
        edges = torch.tensor(numbers)
        return past & (torch.bucketize(query, edges, right=True) == torch.bucketize(key, edges, right=True))
    return past & stride


def in_blocks(listed: str, n: int, m: int) -> Tensor:
    """[n, m]: what is listed as "8x4;0:1;0:1+2:3"."""
    sizes, *rows = listed.removesuffix(",both").split(";")
    high, wide = map(int, sizes.split("x"))
    seen = torch.zeros(n, m, dtype=torch.bool)
    for i, runs in enumerate(rows):
        for run in filter(None, runs.split("+")):
            start, stop = map(int, run.split(":"))
            seen[i * high : (i + 1) * high, start * wide : stop * wide] = True
    return seen


def sdpa(case: Problem, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of F.scaled_dot_product_attention with an explicit mask."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v))
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=case.scale, enable_gqa=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), case.dout)


def rows_of(layout: str, length: int, ranks: int, rank: int) -> list[int]:
    return [row for rows in layout_of(layout, length, ranks).ranges(rank) for row in rows]


def shard(x: Tensor, layout: str, ranks: int, rank: int) -> Tensor:
    """The rows (dim 2) of one rank."""
    return x[:, :, rows_of(layout, x.shape[2], ranks, rank)]


def join(shards: Sequence[Tensor], layout: str) -> Tensor:
    """The inverse of `shard`, from those of all ranks."""
    length = sum(x.shape[2] for x in shards)
    whole = shards[0].new_empty(*shards[0].shape[:2], length, *shards[0].shape[3:])
    for rank, x in enumerate(shards):
        whole[:, :, rows_of(layout, length, len(shards), rank)] = x
    return whole


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the largest expected value; a NaN is never near."""
    error = (found.double() - expected.double()).abs().amax()
    bound = tolerance * max(float(expected.abs().amax()), 1e-3)
    assert error <= bound, f"largest error {error:.2e}, allowed {bound:.2e}"
