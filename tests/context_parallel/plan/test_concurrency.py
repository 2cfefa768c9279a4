"""Every exchange that runs has been proved, where the plan is made; what cannot be proved sends nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringopt import record_traffic
from ringopt.context_parallel.executor import attend, interleave
from ringopt.context_parallel.executor.loop import Posted, Run, run_plan
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan import concurrency, head_exchange
from ringopt.context_parallel.plan.concurrency import KVSizes, prove_plan
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.plan_of import plan_of
from ringopt.context_parallel.plan.prove import prove
from ringopt.errors import PlanError
from ringopt.ops.ring import VERSION
from tests.context_parallel.reference import problem, shard
from tests.harness.limits import set_limits
from tests.harness.threads import ThreadMesh, run_on_threads

Proved = tuple[Exchange, int]


def run(strategy: str, p: int) -> None:
    case = problem(24, heads=(6, 3))

    def body(mesh: ThreadMesh) -> None:
        local = [shard(x, "contiguous", p, mesh.rank).requires_grad_() for x in (case.q, case.k, case.v)]
        how = (0.0, case.scale, "contiguous", "contiguous", strategy, "auto", mesh.name, VERSION)
        out, _lse = torch.ops.ringopt.ring_attention(*local, [], None, None, 24, 24, "causal", "", [], *how)
        out.sum().backward()

    run_on_threads(p, body)


@pytest.mark.parametrize(("strategy", "p"), [("ring", 2), ("gather", 3), ("hybrid(2)", 4)])
def test_what_runs_has_been_proved(strategy: str, p: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several exchanges, of which each is a plan of its own."""
    set_limits(monkeypatch, message=1)
    monkeypatch.setattr(concurrency, "ROWS", 1)
    proved, ran = set[Proved](), set[Proved]()

    def noted(exchange: Exchange, rank: int) -> Any:
        proved.add((exchange, rank))
        return prove(exchange, rank)

    for module in (concurrency, head_exchange):
        monkeypatch.setattr(module, "prove", noted)
    head_exchange.prove_heads.cache_clear()

    def spied(planned: Run, first: Posted | None = None) -> Any:
        (task,) = planned.tasks
        ran.add((getattr(task, "attention", task).exchange, planned.mesh.rank))
        return run_plan(planned, first)

    for module in (attend, interleave):
        monkeypatch.setattr(module, "run_plan", spied)
    run(strategy, p)
    assert any(exchange.part != (0, 1) for exchange, _ in ran)
    assert ran <= proved


def test_what_cannot_be_proved_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, message=1)
    monkeypatch.setattr(concurrency, "ROWS", 1)

    def faulty(exchange: Exchange, rank: int) -> Any:
        if exchange.part == (1, 2):
            raise PlanError("a part of the plan does not hold together")
        return prove(exchange, rank)

    monkeypatch.setattr(concurrency, "prove", faulty)
    with record_traffic() as traffic, pytest.raises(PlanError, match="a part of the plan"):
        run("ring", 2)
    assert not [event for event in traffic.events if event.kind == "posted"]


def test_heads_that_are_traded_are_proved_by_their_share() -> None:
    plan = plan_of(ShardedPattern.of_self_attention("causal", 24, 4, "zigzag"), "hybrid(2)", (6, 3))
    for rank in range(4):
        prove_plan(plan, KVSizes(3, 2 * 16 * torch.float32.itemsize), rank)
