"""What of the exchange is hidden, on a clock on which only blocks and messages take time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringopt.context_parallel.executor.operands import Attention
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan import concurrency
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.expr.mask import Mask
from ringopt.expr.simplify import compare
from ringopt.expr.terms import axis
from ringopt.kernels.cpu_flash import CpuFlash
from tests.context_parallel.clock import Clocked, hidden
from tests.harness.limits import set_limits

LENGTH, DIM = 256, 8


def ring(pattern: str, p: int) -> Attention:
    layout = "zigzag" if pattern == "causal" else "contiguous"
    plan = exchange_of(ShardedPattern.of_self_attention(pattern, LENGTH, p, layout), "ring")
    return Attention(plan, Mask(), CpuFlash(), 1.0)


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many exchanges as there may be, however little each sends."""
    set_limits(monkeypatch, message=1)
    monkeypatch.setattr(concurrency, "ROWS", 1)


@pytest.mark.sample(4)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("pattern", ["causal", "full"])
@pytest.mark.parametrize("p", [2, 4])
def test_a_link_slower_than_none_but_faster_than_the_blocks_is_hidden(
    p: int, pattern: str, backward: bool, heads: tuple[int, int], smallest: None
) -> None:
    """Also with one head of keys, of which the rows are shared out: early ones have more queries than late ones."""
    for share in (0.3, 0.6, 0.9):
        assert hidden(ring(pattern, p), (1, *heads, DIM), backward, share).share >= (0.98 if heads[1] > 1 else 0.95)


@pytest.mark.sample(2)
@pytest.mark.parametrize("pattern", ["causal", "full"])
@pytest.mark.parametrize("p", [2, 4])
def test_a_link_slower_than_the_blocks_is_never_idle(p: int, pattern: str, smallest: None) -> None:
    for share, backward in ((1.3, False), (1.3, True), (2.0, False)):
        found = hidden(ring(pattern, p), (1, 4, 4, DIM), backward, share)
        assert found.total <= 1.05 * found.exchange


def test_a_mask_of_the_program_is_made_once_for_all_heads_and_hidden_by_rows(smallest: None) -> None:
    mask = Mask(visible=compare("lt", axis("k"), 200))
    for backward in (False, True):
        assert hidden(replace(ring("full", 2), mask=mask), (1, 4, 4, DIM), backward, 0.6).share >= 0.97


def test_one_exchange_of_all_heads_leaves_a_backward_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first keys are waited for with nothing to compute: what the clock is there to show."""
    set_limits(monkeypatch, message=1 << 30)
    found = hidden(ring("full", 2), (1, 4, 4, DIM), backward=True, share=0.6)
    assert found.total == pytest.approx(1.3)


def test_what_starts_early_is_hidden_behind_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the backward above, in which 0.3 seconds are waited for: as much less as there is other work."""
    set_limits(monkeypatch, message=1 << 30)
    site, sizes = ring("full", 2), (1, 4, 4, DIM)
    second = 1.0 / Clocked.of(site, sizes, True, 1.0, float("inf")).seconds
    rate = Clocked.of(site, sizes, True, 0.0, 1.0).seconds / 0.6
    for ahead, total in ((0.0, 1.3), (0.1, 1.3), (0.3, 1.3), (0.5, 1.5)):
        assert Clocked.of(site, sizes, True, second, rate, ahead).seconds == pytest.approx(total)


def test_what_ends_late_is_hidden_behind_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.6 seconds each way: the home block hides 0.5 of the last hop, other work the rest."""
    set_limits(monkeypatch, message=1 << 30)
    site, sizes = ring("full", 2), (1, 4, 4, DIM)
    second = 1.0 / Clocked.of(site, sizes, True, 1.0, float("inf")).seconds
    rate = Clocked.of(site, sizes, True, 0.0, 1.0).seconds / 1.2
    for behind, total in ((None, 1.7), (0.0, 1.7), (0.1, 1.7), (0.5, 2.1)):
        assert Clocked.of(site, sizes, True, second, rate, behind=behind).seconds == pytest.approx(total)


def test_the_clock_of_two_ranks() -> None:
    """Two steps of 2 seconds; a message of 1 second is hidden behind the first, one of 3 seconds is waited for."""
    site, sizes = ring("full", 2), (1, 1, 1, DIM)
    second, size = 2 / 128**2, 2 * 128 * DIM * 4
    for seconds, total in ((1, 4), (3, 5)):
        found = Clocked.of(site, sizes, False, second, size / seconds)
        assert found.seconds == pytest.approx(total)
        lanes = {lane: sum(span.seconds for span in found.spans if span.lane == lane) for lane in ("link", "exposed")}
        assert lanes == pytest.approx({"link": 2 * seconds, "exposed": 2 * (total - 4)})
