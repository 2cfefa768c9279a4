"""Random plans for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ringopt.attention.exchange import Exchange
from ringopt.attention.layouts import Contiguous, Zigzag
from ringopt.attention.patterns import Full, Pattern, Window
from ringopt.attention.routes import QUERIES_MOVE, STRATEGIES, Gather

many = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)  # nothing is timed
RANKS = (*range(1, 7),) * 15 + (*range(7, 17),)  # one plan in ten has many ranks: they take long to check


@st.composite
def patterns(draw: st.DrawFn, most_rows: int) -> Pattern:
    """Any pattern; lengths of queries and keys agree in half of the cases."""
    q_length = draw(st.integers(1, most_rows))
    kv_length = draw(st.one_of(st.just(q_length), st.integers(1, most_rows)))
    causal = draw(st.booleans())
    if draw(st.booleans()):
        return Full(q_length, kv_length, causal)
    return Window(q_length, kv_length, causal, draw(st.integers(1, q_length + 5)), strip=draw(st.integers(1, 64)))


@st.composite
def exchanges(draw: st.DrawFn, most_rows: int) -> Exchange:
    """Any plan; ranks may outnumber rows."""
    pattern = draw(patterns(most_rows))
    ranks = draw(st.sampled_from(RANKS))
    layouts = st.sampled_from((Contiguous, Zigzag))
    q_layout = draw(layouts)
    kv_layout = draw(st.one_of(st.just(q_layout), layouts))
    name = draw(st.sampled_from(sorted(STRATEGIES)))
    layouts_of_both = q_layout(pattern.q_length, ranks), kv_layout(pattern.kv_length, ranks)
    exchange = Exchange(pattern, *layouts_of_both, STRATEGIES[name], name in QUERIES_MOVE)
    return replace(exchange, strategy=Gather()) if exchange.strategy.refusal(exchange) else exchange
