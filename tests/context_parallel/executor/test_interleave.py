"""Exchanges of some heads or rows each, by turns: the same numbers and bytes, and more under way while blocks are
computed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch

from ringopt.context_parallel.executor.interleave import by_turns
from ringopt.context_parallel.executor.operands import kv_sizes
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan import concurrency
from ringopt.context_parallel.plan.exchange import Cargo
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.context_parallel.plan.prove import prove
from ringopt.distributed.traffic import Traffic
from ringopt.expr.mask import Mask
from ringopt.expr.terms import axis, load
from tests.context_parallel.executor.test_attend import attention, recorded, run
from tests.context_parallel.reference import assert_near, problem, sdpa, visible
from tests.harness.limits import set_limits


@pytest.fixture
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many exchanges as there may be, however little each sends: one for each KV head, or more by rows."""
    set_limits(monkeypatch, message=1)
    monkeypatch.setattr(concurrency, "ROWS", 1)


def test_turns_are_taken_in_order() -> None:
    said: list[str] = []

    def one(name: str, stops: int) -> Generator[None, None, str]:
        for stop in range(stops):
            said.append(f"{name}{stop}")
            yield
        return name

    assert by_turns([one("a", 2), one("b", 0), one("c", 3)]) == ["a", "b", "c"]
    assert said == ["a0", "c0", "a1", "c1", "c2"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("pattern", ["full", "causal", "window(5)"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (10, 5), (4, 1)])
def test_numbers(heads: tuple[int, int], pattern: str, strategy: str, smallest: None) -> None:
    for p, layout, n in ((2, "zigzag", 17), (3, "contiguous", 23), (4, "zigzag", 5)):
        case = problem(n, heads=heads, dims=(8, 5))
        (out, _lse, *grads), _ = run(case, attention(case, p, pattern, layout, strategy), layout)
        for found, expected in zip((out, *grads), sdpa(case, visible(pattern, n, n)), strict=True):
            assert_near(found, expected, 1e-12)


def shares(
    kv_heads: int, rows: int, mask: Mask | None = None, pattern: str = "full"
) -> list[tuple[range, tuple[int, int]]]:
    case = problem(rows, heads=(kv_heads, kv_heads), dims=(64, 64), batch=1, dtype=torch.float32)
    site = replace(attention(case, 2, pattern, "contiguous", "ring"), mask=mask or Mask())
    cut = concurrency.sub_exchanges(site.exchange, kv_sizes(case.k, case.v, site.mask))
    return [(sub.heads, sub.exchange.part) for sub in cut]


def test_how_many() -> None:
    """A row of a head is 512 bytes here, and the first message carries half of the rows."""
    assert shares(4, 512) == [(range(4), (0, 1))]
    assert shares(4, 1024) == [(range(0, 2), (0, 1)), (range(2, 4), (0, 1))]
    assert [heads for heads, _ in shares(6, 2048)] == [range(6 * i // 6, i + 1) for i in range(6)]
    assert shares(1, 16384) == [(range(1), (part, 4)) for part in range(4)]
    assert shares(4, 8192)[:3] == [(range(0, 1), (0, 2)), (range(0, 1), (1, 2)), (range(1, 2), (0, 2))]
    mask = Mask(visible=load(0, [axis("k")], torch.bool))
    assert shares(4, 8192, mask) == [(range(4), (0, 2)), (range(4), (1, 2))], "masks would be made for each head"
    assert len(shares(4, 8192, pattern="window(256)")) == 1, "255 rows travel"


@pytest.mark.parametrize(("pattern", "layout"), [("causal", "zigzag"), ("window(9)", "contiguous"), ("full", "zigzag")])
def test_parts_of_a_plan_are_the_plan(pattern: str, layout: str) -> None:
    """Each is proved by itself, and together they attend to every key once."""
    whole = exchange_of(ShardedPattern.of_self_attention(pattern, 29, 3, layout), "ring")
    parts = whole.parts(4)
    for rank in range(3):
        kept = [rows for part in parts for rows in part.kv_pieces(rank)]
        assert sorted(i for rows in kept for i in rows) == sorted(i for rows in whole.kv_pieces(rank) for i in rows)
        for part in parts:
            prove(part, rank)
    sent = [sum(part.sent_rows(rank, Cargo.OUT) for part in parts for rank in range(3)), whole.volume]
    assert sent[0] == sent[1]


def test_the_second_is_under_way_while_the_first_computes(smallest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both while the rank's own keys are attended to, which are not shared out: nothing there is waited for."""
    set_limits(monkeypatch, exchanges=2)
    p, case = 2, problem(16, heads=(4, 2))
    traffic: Traffic = recorded(case, attention(case, p, "full", "contiguous", "ring"), "contiguous")
    events = [(e.kind, e.label) for e in traffic.of(0).events if e.label.startswith("forward")]
    assert events == [
        ("posted", "forward 0 of 0"),
        ("posted", "forward 0 of 1"),
        ("computed", "forward 0"),
        ("waited", "forward 0 of 0"),
        ("computed", "forward 1 of 0"),
        ("waited", "forward 0 of 1"),
        ("computed", "forward 1 of 1"),
    ]


def test_bytes_are_the_same_and_messages_more(smallest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, exchanges=2)
    p, case = 3, problem(20, heads=(4, 2))
    site = attention(case, p, "causal", "zigzag", "ring")
    several = recorded(case, site, "zigzag")
    set_limits(monkeypatch, message=1 << 30)
    one = recorded(case, site, "zigzag")
    assert several.bytes_sent == one.bytes_sent
    assert several.messages == 2 * one.messages
