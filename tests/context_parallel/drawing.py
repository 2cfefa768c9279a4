"""Random plans for property tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ringopt.context_parallel.geometry.block_sparse import Blocks
from ringopt.context_parallel.geometry.layouts import Contiguous, Replicated, Zigzag
from ringopt.context_parallel.geometry.pattern import Full, Pattern, Window
from ringopt.context_parallel.geometry.segmented import Chunked, Documents, Prefix, Sinks
from ringopt.context_parallel.geometry.strided import Strided
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.strategies import MERGE, QUERIES_MOVE, STRATEGIES, Gather, NoExchange
from ringopt.expr.block_sparse import text_of

many = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)  # nothing is timed
RANKS = (*range(1, 7),) * 50 + (*range(7, 17),)  # one plan in thirty has many ranks: they take long to check


def pattern_from(draw: Random, most_rows: int) -> Pattern:
    """Any pattern; lengths of queries and keys agree in half of the cases."""
    q_length = draw.randint(1, most_rows)
    kv_length = q_length if draw.random() < 0.5 else draw.randint(1, most_rows)
    causal, number = draw.random() < 0.5, draw.randint(1, q_length + 5)
    kind = draw.choice((Full, Window, Window, Prefix, Sinks, Chunked, Documents, Strided, Strided, Blocks))
    if kind is Full:
        return Full(q_length, kv_length, causal)
    if kind is Window:
        return Window(q_length, kv_length, causal, number, strip=draw.randint(1, 64))
    if kind is Prefix:
        return Prefix(q_length, kv_length, True, number)
    if kind is Sinks:
        return Sinks(q_length, kv_length, causal, number, draw.randint(1, 9), draw.choice((1, 1, 2, 5)))
    if kind is Strided:
        rate, width = draw.choice((1, 2, 3, 7, 40)), draw.choice((None, draw.randint(1, 9), number))
        return Strided(q_length, kv_length, causal, width, rate, least=draw.choice((1, 4, 32)))
    if kind is Chunked:
        return Chunked(q_length, kv_length, causal, number)
    if kind is Blocks:
        sizes = tuple(draw.randint(1 + length // 16, length + 3) for length in (q_length, kv_length))
        rows, keys = (range(-(-length // size)) for length, size in zip((q_length, kv_length), sizes, strict=True))
        share = draw.random()
        table = text_of([[draw.random() < share for _ in keys] for _ in rows])
        return Blocks(q_length, kv_length, causal, sizes, table)
    inner = {draw.randint(1, q_length) for _ in range(draw.randint(0, 6))} - {q_length}
    return Documents(q_length, q_length, causal, (0, *sorted(inner), q_length))


def patterns(most_rows: int) -> st.SearchStrategy[Pattern]:
    return st.integers(0, 2**32).map(lambda seed: pattern_from(Random(seed), most_rows))


def sees(pattern: Pattern, query: int, key: int) -> bool:
    """The definitions of the patterns, pair by pair."""
    past = key <= query or not pattern.causal
    if isinstance(pattern, Window):
        return past and abs(query - key) < pattern.width
    if isinstance(pattern, Prefix):
        return past or key < pattern.length
    if isinstance(pattern, (Strided, Sinks)):
        near = pattern.width is None or abs(query - key) < pattern.width * pattern.rate
        sink = isinstance(pattern, Sinks) and key < pattern.sinks
        return past and (sink or (near and (query - key) % pattern.rate == 0))
    if isinstance(pattern, Chunked):
        return past and query // pattern.size == key // pattern.size
    if isinstance(pattern, Blocks):
        row, column = query // pattern.sizes[0], key // pattern.sizes[1]
        runs = (run.split(":") for run in pattern.table.split(";")[row].split("+") if run)
        return past and any(int(start) <= column < int(stop) for start, stop in runs)
    if isinstance(pattern, Documents):
        return past and not any(min(query, key) < edge <= max(query, key) for edge in pattern.edges)
    return past


def exchanges(number: int, most_rows: int, first: int = 0) -> Iterator[Exchange]:
    """That many plans, from seed `first` on, of any kind and always the same; ranks may outnumber rows."""
    return (exchange_from(Random(seed), most_rows) for seed in range(first, first + number))


def exchange_from(draw: Random, most_rows: int) -> Exchange:
    pattern, ranks = pattern_from(draw, most_rows), draw.choice(RANKS)
    of_queries = draw.choice((Contiguous, Zigzag))
    of_keys = of_queries if draw.random() < 0.5 else draw.choice((Contiguous, Zigzag))
    layouts = of_queries(pattern.q_length, ranks), of_keys(pattern.kv_length, ranks)
    name = draw.choice(sorted(STRATEGIES))
    if name == MERGE:
        return Exchange(pattern, Replicated(pattern.q_length, ranks), layouts[1], NoExchange(), True)
    if name == "local" and draw.random() < 0.5:
        return Exchange(pattern, layouts[0], Replicated(pattern.kv_length, ranks), NoExchange())
    exchange = Exchange(pattern, *layouts, STRATEGIES[name], name in QUERIES_MOVE)
    return replace(exchange, strategy=Gather()) if exchange.strategy.refusal(exchange) else exchange
