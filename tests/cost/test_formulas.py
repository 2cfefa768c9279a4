"""The closed formulas against plans unrolled, counted and run on the clock."""

from __future__ import annotations

import dataclasses

import pytest

from ringopt.context_parallel.plan.plan_of import Plan, trading
from ringopt.cost.choose import Case
from ringopt.cost.formulas import formulas_of
from ringopt.cost.memory import most_memory
from ringopt.cost.message_bytes import bytes_between
from ringopt.cost.simulate import Heads, pairs_of, simulate
from ringopt.errors import OptionError
from ringopt.hardware.devices import Link
from ringopt.hardware.rates import Rates, Speed
from ringopt.planner.site_cost import named_strategy, numbers, volume_name

HEADS = Heads(2, 8, 4, 64, 64, 2, 4, "bfloat16", "flash")
RATES = Rates("a machine", Link("wire", 5e10, 2e-5), Speed(5e12, 1e-5), touch=1e30)
FAR = Link("between nodes", 1e10, 1e-5)
CASES = [
    ("full", "contiguous", "ring"), ("full", "contiguous", "gather"), ("full", "contiguous", "ulysses"),
    ("causal", "contiguous", "ring"), ("causal", "zigzag", "ring"), ("causal", "zigzag", "gather"),
    ("window(700)", "contiguous", "halo"), ("window(1500)", "contiguous", "gather"),
    ("window(700,both)", "contiguous", "halo"),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("pattern", "layout", "strategy"), CASES)
def test_formulas_agree_with_the_plan(pattern: str, layout: str, strategy: str, ranks: int) -> None:
    agree(pattern, layout, strategy, ranks, RATES)


@pytest.mark.sample(3)
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    ("pattern", "layout", "strategy"),
    [
        ("full", "contiguous", "ring"), ("full", "contiguous", "ulysses"), ("full", "contiguous", "hybrid(2)"),
        ("full", "contiguous", "gather"), ("causal", "zigzag", "hybrid(2)"), ("window(700)", "contiguous", "hybrid(2)"),
    ],
)  # fmt: skip
def test_formulas_agree_over_nodes(pattern: str, layout: str, strategy: str, ranks: int) -> None:
    """Of 2 ranks; bytes that leave them too."""
    found, plan = agree(pattern, layout, strategy, ranks, dataclasses.replace(RATES, node=2, between=FAR))
    for way, name in ((False, "leaving"), (True, "leaving_backward")):
        assert found[name] == max(bytes_between(plan, HEADS, rank, 2, way) for rank in range(ranks))


@pytest.mark.parametrize(
    ("strategy", "ranks", "pattern", "node"), [("ulysses", 4, "full", 0), ("hybrid(4)", 8, "window(64)", 4)]
)
def test_what_a_backward_holds_that_trades_rows_for_heads(strategy: str, ranks: int, pattern: str, node: int) -> None:
    """To the byte, of numbers that are summed as they are. The most is held in the end: all that came, the gradients,
    and these packed for the ranks that they belong to, with what comes of theirs."""
    case = Case(pattern, 16384, 16384, Heads(1, 8, 8, 64, 64, 4, 4, "float32", "flash"), True)
    (name, width), rates = volume_name(pattern), dataclasses.replace(RATES, node=node, between=FAR)
    closed = formulas_of(name, "contiguous", named_strategy(strategy))
    found = closed.at(numbers(case, width, ranks, rates, trading(strategy)))
    assert found["memory_backward"] == most_memory(case.plan(ranks, "contiguous", strategy), case.heads).backward


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    ("pattern", "layout", "strategy", "heads"),
    [
        ("full", "contiguous", "ring", (16, 1, 64, 64)), ("causal", "zigzag", "ring", (16, 1, 64, 64)),
        ("causal", "zigzag", "gather", (16, 2, 128, 128)), ("full", "contiguous", "ulysses", (16, 2, 128, 128)),
        ("full", "contiguous", "ulysses", (16, 16, 192, 128)), ("window(700)", "contiguous", "ulysses", (8, 8, 16, 16)),
    ],
)  # fmt: skip
def test_memory_of_other_heads(
    pattern: str, layout: str, strategy: str, heads: tuple[int, int, int, int], ranks: int
) -> None:
    """Grouped heads are repeated for a backward; few small heads are less than the mask of a window."""
    case = Case(pattern, 16384, 16384, Heads(1, *heads, 2, 4, "bfloat16", "flash"), True)
    (name, width), held = volume_name(pattern), most_memory(case.plan(ranks, layout, strategy), case.heads)
    found = formulas_of(name, layout, named_strategy(strategy)).at(numbers(case, width, ranks, RATES))
    assert found["memory"] == pytest.approx(held.forward, rel=0.2)
    assert found["memory_backward"] == pytest.approx(held.backward, rel=0.2)


def agree(pattern: str, layout: str, strategy: str, ranks: int, rates: Rates) -> tuple[dict[str, float], Plan]:
    case = Case(pattern, 16384, 16384, HEADS, True)
    (name, width), node = volume_name(pattern), trading(strategy)
    found = formulas_of(name, layout, named_strategy(strategy)).at(numbers(case, width, ranks, rates, node))
    plan = case.plan(ranks, layout, strategy)
    forward, backward = (simulate(plan, HEADS, rates, way) for way in (False, True))
    edge = 0.03 if "both" in pattern and ranks == 2 else 1e-9  # two ranks have no middle, where windows are whole
    assert found["flops"] == pytest.approx(max(forward.flops), rel=edge)
    assert found["flops_backward"] == pytest.approx(max(backward.flops), rel=edge)
    assert found["bytes"] == max(forward.bytes) and found["bytes_backward"] == max(backward.bytes)
    assert found["seconds"] == pytest.approx(forward.seconds, rel=0.15)
    assert found["seconds_backward"] == pytest.approx(backward.seconds, rel=0.15)
    held = most_memory(plan, HEADS)
    assert found["saved"] == held.saved
    if ranks > 2:  # of two, each has one neighbour
        assert found["memory"] == pytest.approx(held.forward, rel=0.15)
        assert found["memory_backward"] == pytest.approx(held.backward, rel=0.15)
    return found, plan


def test_pairs_are_those_of_the_busiest_rank() -> None:
    case = Case("causal", 4096, 4096, HEADS, False)
    found = formulas_of("causal", "zigzag", "ring").at(numbers(case, 1, 4, RATES))
    assert found["pairs"] == max(pairs_of(case.ring(4, "zigzag"), rank) for rank in range(4))
    assert found["pairs"] * 4 == 4096 * 4097 / 2


@pytest.mark.parametrize(("itemsize", "dtype"), [(4, "float32"), (2, "bfloat16")])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid(2)"])
def test_messages_are_as_many_as_the_plan_has(strategy: str, itemsize: int, dtype: str) -> None:
    """Log-sum-exps of another dtype have messages of their own, where rows are traded for heads."""
    heads = dataclasses.replace(HEADS, itemsize=itemsize, dtype=dtype)
    case, rates = Case("full", 16384, 16384, heads, False), dataclasses.replace(RATES, node=2, between=FAR)
    closed = formulas_of("full", "contiguous", named_strategy(strategy))
    found = closed.at(numbers(case, 0, 4, rates, trading(strategy)))
    assert found["messages"] == max(simulate(case.plan(4, "contiguous", strategy), heads, rates, False).messages)


def test_formulas_are_readable() -> None:
    text = str(formulas_of("full", "contiguous", "ring"))
    assert "pairs = n**2*((p - 1)/p + 1/p)/p" in text.replace("  ", " ") or "pairs = " in text
    assert len(text.splitlines()) == len(dataclasses.fields(formulas_of("full", "contiguous", "ring")))


@pytest.mark.parametrize("names", [("window", "zigzag", "ring"), ("full", "zigzag", "ring_q"), ("full", "x", "ring")])
def test_what_has_no_closed_formula_is_refused(names: tuple[str, str, str]) -> None:
    with pytest.raises(OptionError, match="no closed form is known"):
        formulas_of(*names)
