"""Queries that every rank has whole: each rank attends with its own keys, and the results are merged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.plan_of import exchange_of, plan_of
from ringopt.context_parallel.plan.prove import prove
from ringopt.cost.message_bytes import Sizes, bytes_sent
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, PlanError
from ringopt.ops.ring import VERSION
from tests.context_parallel.reference import assert_near, join, problem, shard
from tests.harness.threads import ThreadMesh, run_on_threads

DOUBLE = torch.float64
SINKS, SEED = torch.randn(1, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)), torch.tensor(7)


def attend(mesh: ThreadMesh, pattern: str, layout: str, sinks: bool, dropout_p: float) -> list[Tensor]:
    """out, dq, dk, dv and the gradient of the sinks, of this rank."""
    case = problem(2, 23)
    k, v = (shard(x, layout, mesh.size, mesh.rank) for x in (case.k, case.v))
    leaves = [x.clone().requires_grad_() for x in (case.q, k, v, *([SINKS] if sinks else []))]
    seed = SEED.clone() if dropout_p else None
    out, _lse = torch.ops.ringopt.ring_attention(
        *(*leaves[:3], [], leaves[3] if sinks else None, seed, 2, 23, pattern, "", [], dropout_p, case.scale),
        *("replicated", layout, "merge", "auto", mesh.name, VERSION),
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, case.dout)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize(
    ("pattern", "sinks", "dropout_p"),
    [("full", False, 0.0), ("full", True, 0.0), ("full", True, 0.3), ("causal", True, 0.0), ("window(2)", False, 0.0)],
)
def test_numbers(pattern: str, sinks: bool, dropout_p: float, p: int, layout: str) -> None:
    (expected,) = run_on_threads(1, lambda mesh: attend(mesh, pattern, "contiguous", sinks, dropout_p))
    results = run_on_threads(p, lambda mesh: attend(mesh, pattern, layout, sinks, dropout_p))
    outs, dqs, dks, dvs, *dsinks = zip(*results, strict=True)
    assert all(torch.equal(out, outs[0]) for out in outs), "the ranks differ in bits"
    parts = [torch.stack(part).sum(0) for part in (dqs, *dsinks)]
    found = [outs[0], parts[0], join(dks, layout), join(dvs, layout), *parts[1:]]
    for got, right in zip(found, expected, strict=True):
        assert_near(got, right, 1e-12)


def test_plan_and_bytes() -> None:
    plan = exchange_of(ShardedPattern("full", 2, 23, 4, "replicated", "contiguous"), "merge")
    assert [str(plan.forward(rank)[-1]) for rank in range(2)] == ["full 0:2 x 0:5", "full 0:2 x 5:11"]
    for rank in range(4):
        assert prove(plan, rank)[0] == (0, 0)
    with record_traffic() as traffic:
        run_on_threads(4, lambda mesh: attend(mesh, "full", "contiguous", False, 0.0))
    sizes = Sizes(2, 4, 2, 8, 8, 8, 8)
    for rank in range(4):
        sent = sum(event.bytes for event in traffic.of(rank).events if event.label == "forward merge")
        assert sent == bytes_sent(plan, sizes, rank) == 2 * 4 * 2 * 9 * 8 * 3
    assert bytes_sent(plan, sizes, 0, backward=True) == 0


def test_refusals() -> None:
    with pytest.raises(OptionError, match=r"'merge' cannot do full .* these are spread over the ranks"):
        plan_of(ShardedPattern.of_self_attention("full", 8, 2, "zigzag"), "merge", (4, 4))
    with pytest.raises(PlanError, match="queries that every rank has whole are merged, and take no other strategy"):
        exchange_of(ShardedPattern("full", 8, 8, 2, "replicated", "zigzag"), "ring")
