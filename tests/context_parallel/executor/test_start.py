"""What is posted when K and V exist, and handed on when there are queries: the same messages, the same numbers."""

from __future__ import annotations

import pytest
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward, backward_until_home, begin
from ringopt.context_parallel.executor.operands import Operands, Saved
from ringopt.distributed.traffic import log_event, record_traffic
from ringopt.errors import PlanError
from tests.context_parallel.executor.test_attend import attention, join, shard
from tests.context_parallel.reference import assert_near, problem, sdpa, visible
from tests.harness.limits import set_limits
from tests.harness.threads import ThreadMesh, run_on_threads


@pytest.mark.sample(3)
@pytest.mark.parametrize("piece", [1 << 20, 1])
@pytest.mark.parametrize("strategy", ["ring", "gather", "ring2"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_numbers(p: int, strategy: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`piece` of 1: as several exchanges by turns."""
    set_limits(monkeypatch, message=piece)
    for n in (17, 3):
        case = problem(n, heads=(6, 3))
        site = attention(case, p, "causal", "zigzag", strategy)

        def body(mesh: ThreadMesh) -> list[Tensor]:
            q, k, v, dout = (shard(x, "zigzag", p, mesh.rank) for x in (case.q, case.k, case.v, case.dout))  # noqa: B023
            given = Operands(q, k, v)
            begun = begin(site, mesh, k, v, backward=False)  # noqa: B023
            out, lse = attend(site, mesh, given, begun)  # noqa: B023
            begun = begin(site, mesh, k, v, backward=True)  # noqa: B023
            *grads, _ = attend_backward(site, mesh, dout, Saved(given, out, lse), begun)  # noqa: B023
            return [out, *grads]

        found = [join(parts, "zigzag") for parts in zip(*run_on_threads(p, body), strict=True)]
        for one, expected in zip(found, sdpa(case, visible("causal", n, n)), strict=True):
            assert_near(one, expected, 1e-12)


def test_messages_are_posted_before_there_are_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, message=1)
    case = problem(16, heads=(4, 2))  # fewer rows than pay to be cut
    site = attention(case, 2, "full", "contiguous", "ring")

    def body(mesh: ThreadMesh) -> None:
        q, k, v = (shard(x, "contiguous", 2, mesh.rank) for x in (case.q, case.k, case.v))
        begun = begin(site, mesh, k, v, backward=False)
        log_event("computed", "queries", mesh.rank)
        attend(site, mesh, Operands(q, k, v), begun)
        assert not any(posted.arriving for posted in begun), "what arrived is not held for longer than it is used"

    with record_traffic() as traffic:
        run_on_threads(2, body)
    events = [(event.kind, event.label) for event in traffic.of(1).events]
    assert events[:3] == [("posted", "forward 0 of 0"), ("posted", "forward 0 of 1"), ("computed", "queries")]
    assert [label for kind, label in events if kind == "posted"] == ["forward 0 of 0", "forward 0 of 1"]


def test_what_needs_more_than_keys_cannot_begin() -> None:
    case = problem(16)
    site = attention(case, 2, "full", "contiguous", "ring_q")
    with pytest.raises(PlanError, match="more than K and V"):
        run_on_threads(2, lambda mesh: begin(site, mesh, case.k, case.v, backward=False))
    left = Saved(Operands(case.q, case.k, case.v), case.dout, case.q[..., 0])
    with pytest.raises(PlanError, match="more than dK and dV"):
        run_on_threads(2, lambda mesh: backward_until_home(site, mesh, case.dout, left))
