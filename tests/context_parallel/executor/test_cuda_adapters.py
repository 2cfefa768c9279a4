"""The adapters of kernels for NVIDIA GPUs over stand-ins that read memory as the kernels do, in every layout that the
executor makes of it: slices of rows and heads, buffers of messages, strips, rows that travel packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor import merge_lse
from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan import concurrency, tiling
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import plan_of
from ringopt.expr.mask import Mask
from ringopt.expr.terms import axis, load
from ringopt.kernels import fused
from ringopt.kernels.base import HIDDEN, Kernel
from ringopt.kernels.choose import WithOthers
from ringopt.kernels.cuda_cudnn import CudaCudnn
from ringopt.kernels.cuda_efficient import CudaEfficient
from ringopt.kernels.cuda_flash import CudaFlash
from tests.context_parallel.reference import Problem, assert_near, join, problem, sdpa, shard, visible
from tests.harness.limits import set_limits
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.kernels.cuda_operators import take_their_place

KERNELS = (WithOthers(CudaFlash(), CudaEfficient()), WithOthers(CudaCudnn(), CudaFlash(), CudaEfficient()))
PADDING = Mask(visible=load(0, [axis("b"), axis("k")], torch.bool))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    take_their_place(monkeypatch)
    set_limits(monkeypatch, message=1)  # exchanges of some heads, and of some rows
    monkeypatch.setattr(concurrency, "ROWS", 4)
    set_limits(monkeypatch, strip=8)
    monkeypatch.setattr(tiling, "AT_ONCE", 4)


def as_projected(x: Tensor) -> Tensor:
    """[B, H, S, D] as a projection leaves it: tokens first."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def ran(case: Problem, pattern: str, layout: str, strategy: str, kernel: Kernel, mask: Tensor | None) -> list[Tensor]:
    """out, dq, dk, dv of three ranks in bfloat16, in sequence order."""
    n, (heads, kv_heads) = case.q.shape[2], (case.q.shape[1], case.k.shape[1])
    asked = PADDING if mask is not None else Mask()
    plan = plan_of(ShardedPattern(pattern, n, n, 3, layout, layout), strategy, (heads, kv_heads), asked)
    exchange, trade = (plan.whole, plan) if isinstance(plan, HeadExchange) else (plan, None)
    site = Attention(exchange, asked, kernel, case.scale, heads=trade)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        mine = (as_projected(shard(x, layout, 3, mesh.rank)) for x in (case.q, case.k, case.v, case.dout))
        q, k, v, dout = mine
        given = Operands(q, k, v, [mask] if mask is not None else [])
        out, lse = attend(site, mesh, given)
        return [out, *attend_backward(site, mesh, dout, Saved(given, out, lse))[:3]]

    return [join(parts, layout) for parts in zip(*run_on_threads(3, body), strict=True)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["ring", "gather", "ring_q", "gather_q", "ulysses"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("pattern", "masked"), [("causal", False), ("full", True), ("window(9)", False), ("causal(rate=2)", False)]
)
def test_numbers(pattern: str, masked: bool, kernel: Kernel, strategy: str) -> None:
    for n, dim, batch, heads, layout in ((51, 20, 2, (6, 3), "contiguous"), (61, 16, 1, (3, 3), "zigzag")):
        if "rate" in pattern and layout == "zigzag":
            continue
        case = problem(n, heads=heads, dims=(dim, dim), batch=batch).to(torch.bfloat16)
        there = torch.ones(batch, n, dtype=torch.bool)
        there[0, 5:9], there[-1, 40:] = False, False
        seen = visible(pattern, n, n) & (there[:, None, None] if masked else True)
        exact = sdpa(case.to(torch.float64), seen)
        for found, expected in zip(
            ran(case, pattern, layout, strategy, kernel, there if masked else None), exact, strict=True
        ):
            assert_near(found, expected, 2e-2)


# ---- sums in one launch ----------------------------------------------------------------------------------------------
def merge_parts(
    out: Tensor, lse: Tensor, sums: Sequence[Tensor], parts: Sequence[Tensor], lses: Sequence[Tensor], firsts: list[int]
) -> None:
    """What the kernel in Triton does, in float64; rows that see nothing are not read, whatever they are."""
    assert len(parts) <= fused.AT_ONCE and all(part.stride(-1) == 1 for part in parts)
    every = [(0, *sums)] if sums else []
    every += zip(firsts, parts, lses, strict=True)
    scores = torch.full((*lse.shape, len(every)), HIDDEN, dtype=torch.float64)
    values = torch.zeros(*out.shape, len(every), dtype=torch.float64)
    for i, (first, part, its) in enumerate(every):
        rows = slice(first, first + part.shape[2])
        scores[:, :, rows, i] = its.double()
        values[:, :, rows, :, i] = part.double().masked_fill((its == HIDDEN).unsqueeze(-1), 0.0)
    total = scores.logsumexp(-1)
    weights = (scores - total.masked_fill(total == HIDDEN, 0.0).unsqueeze(-1)).exp()
    out.copy_((values * weights.unsqueeze(3)).sum(-1))
    lse.copy_(total)


def add_parts(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    assert len(parts) <= fused.AT_ONCE
    for total, part in zip(totals, parts, strict=True):
        assert total.dim() == part.dim() == 4 and total.shape == part.shape
        total += part


@pytest.fixture
def fused_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums are made as on a GPU that has Triton."""
    library = torch.library.Library("ringopt_kernels", "IMPL")
    library.impl("merge_parts_", merge_parts, "CPU")
    library.impl("add_parts_", add_parts, "CPU")
    for module in (fused, merge_lse):
        monkeypatch.setattr(module, "usable", lambda x: x.numel() > 0 and x.dtype != torch.float64)
    set_limits(monkeypatch, merged=3)
    yield
    library._destroy()


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["ring", "ring_q", "gather_q", "ulysses"])
@pytest.mark.parametrize(("pattern", "masked"), [("causal", False), ("full", True), ("causal(rate=2)", False)])
@pytest.mark.usefixtures("fused_sums")
def test_numbers_with_sums_in_one_launch(pattern: str, masked: bool, strategy: str) -> None:
    test_numbers(pattern, masked, KERNELS[0], strategy)


@pytest.mark.usefixtures("fused_sums")
def test_numbers_of_one_exchange_with_sums_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, message=1 << 30, strip=0)  # as on GPUs
    test_numbers("causal", False, KERNELS[1], "ring")
