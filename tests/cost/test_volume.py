"""The closed forms against plans unrolled and counted."""

from __future__ import annotations

from typing import Any

import pytest
import sympy

from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Cargo
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.cost import volume
from ringopt.cost.message_bytes import Sizes, bytes_sent
from ringopt.cost.volume import FORMS, volume_of
from ringopt.errors import OptionError


@pytest.mark.parametrize(("pattern", "layout", "strategy"), FORMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_forms_count_as_the_plans_do(pattern: str, layout: str, strategy: str, ranks: int) -> None:
    form = volume_of(pattern, layout, strategy)
    symbols = (volume.n, volume.p, volume.r, volume.w)
    count = sympy.lambdify(symbols, (form.keys, form.keys_again, form.gradients))
    for length in (2 * ranks, 10 * ranks):
        share = length // ranks
        for width in (1, 2, share, share + 1, 2 * share + 1, length + 3) if "window" in pattern else (1,):
            text = {"window": f"window({width})", "window,both": f"window({width},both)"}.get(pattern, pattern)
            exchange = exchange_of(ShardedPattern.of_self_attention(text, length, ranks, layout), strategy)
            for rank in range(ranks):
                assert count(length, ranks, rank, width) == (
                    exchange.sent_rows(rank, Cargo.OUT),
                    exchange.sent_rows(rank, Cargo.OUT, backward=True),
                    exchange.sent_rows(rank, Cargo.BACK, backward=True),
                ), (length, width, rank)


def bytes_at(expression: Any, **values: int) -> int:
    return int(expression.subs({getattr(volume, name): value for name, value in values.items()}))


def test_bytes_of_a_ring() -> None:
    """2 Hkv d n/p e (p-1) forward; the same with e + e_acc backward."""
    form = volume_of("full", "contiguous", "ring")
    sizes = {"n": 4096, "p": 4, "r": 1, "batch": 2, "kv_heads": 8, "k_dim": 64, "v_dim": 64}
    row = 2 * 8 * (64 + 64)
    assert bytes_at(form.forward_bytes, **sizes, itemsize=2) == 3 * 1024 * row * 2
    assert bytes_at(form.backward_bytes, **sizes, itemsize=2, gradient_itemsize=4) == 3 * 1024 * row * (2 + 4)


@pytest.mark.parametrize("strategy", ["ring_q", "gather_q"])
def test_bytes_where_queries_travel(strategy: str) -> None:
    plan = exchange_of(ShardedPattern("full", 64, 256, 4, "zigzag", "zigzag"), strategy)
    sizes, form = Sizes(2, 8, 2, 16, 24, 2, 4), volume.QueryVolume()
    values = {
        "m": 64,
        "p": 4,
        "batch": 2,
        "q_heads": 8,
        "k_dim": 16,
        "v_dim": 24,
        "itemsize": 2,
        "gradient_itemsize": 4,
    }
    for backward, formula in ((False, form.forward_bytes), (True, form.backward_bytes)):
        assert {bytes_sent(plan, sizes, rank, backward) for rank in range(4)} == {bytes_at(formula, **values)}


def test_what_has_no_closed_form_is_refused() -> None:
    with pytest.raises(OptionError, match="no closed form is known for the volume of window zigzag ring; known are"):
        volume_of("window", "zigzag", "ring")
