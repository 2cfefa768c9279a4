"""By states or by heads: what is predicted of a recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringopt.cost.recurrence import ScanCase, kernel_work
from ringopt.hardware.rates import rates_of

HEADS, K, V, RANKS = 32, 128, 128, 8
H100 = rates_of("h100", "bfloat16")


def case(tokens: int, training: bool = True) -> ScanCase:
    """A layer of gated delta rule, in bfloat16."""
    state, row = HEADS * K * V, HEADS * 2 * (2 * K + 2 * V + 2)
    work = kernel_work(state, tokens)
    return ScanCase(work, work, 2 * state * 4 * (RANKS - 1), row * tokens // RANKS, 1, RANKS, training)


@pytest.mark.parametrize("training", [False, True])
def test_heads_take_fewer_runs_where_the_link_is_fast(training: bool) -> None:
    best, other = case(131072, training).predictions(H100)
    assert (best.strategy, other.strategy) == ("heads", "states") and best.bytes > other.bytes


def test_states_send_less_where_it_is_slow() -> None:
    slow = replace(H100, link=replace(H100.link, rate=1e9))
    assert case(131072).predictions(slow)[0].strategy == "states"


def test_states_do_not_grow_with_the_tokens() -> None:
    sent = [{one.strategy: one.bytes for one in case(n).predictions(H100)} for n in (8192, 131072)]
    assert sent[0]["states"] == sent[1]["states"] and 16 * sent[0]["heads"] == sent[1]["heads"]


@pytest.mark.parametrize("training", [False, True])
def test_what_is_computed(training: bool) -> None:
    """By states each rank runs its steps, and what they carry on for the state and each column of a map; training,
    twice as much backward, and the states again. By heads there are no maps, but all that has tokens is laid out anew:
    read and written, here and there, both ways."""
    rate = H100.default.rate
    fast = replace(H100, link=replace(H100.link, rate=1e30, latency=0.0), touch=rate)  # a byte takes as long as a FLOP
    given = ScanCase(work=8e12, carried=4e12, sent=1, moved=10**12, columns=3, ranks=2, training=training)
    seconds = {one.strategy: one.seconds * rate for one in given.predictions(fast)}
    run, part, touched = 4e12, 2e12, 4e12
    states = 3 * run + (1 + 3 + 3) * part if training else run + (1 + 3) * part
    heads = 3 * run + part + 2 * touched if training else run + touched
    assert (seconds["states"], seconds["heads"]) == (pytest.approx(states), pytest.approx(heads))
