"""Which keys a query sees, and what follows for a tile."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringopt.context_parallel.geometry.block_sparse import Blocks
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Full, Kind, Pattern, Window
from ringopt.context_parallel.geometry.segmented import Chunked, Documents, Prefix, Sinks
from ringopt.context_parallel.geometry.strided import Strided
from ringopt.context_parallel.geometry.visibility import seen, seen_whole
from ringopt.errors import OptionError, PlanError
from tests.context_parallel.drawing import many, patterns, sees

some_patterns = patterns(most_rows=24)
spans = st.builds(lambda start, size: range(start, start + size), st.integers(0, 24), st.integers(0, 24))


def pairs(pattern: Pattern, queries: range, keys: range) -> set[tuple[int, int]]:
    return {(query, key) for query in queries for key in keys if sees(pattern, query, key)}


@given(some_patterns)
@settings(many)
def test_every_query_sees_what_the_definition_says(pattern: Pattern) -> None:
    queries, keys = range(pattern.q_length), range(pattern.kv_length)
    expected = [[sees(pattern, query, key) for key in keys] for query in queries]
    assert seen(pattern, queries, keys).tolist() == expected
    assert seen(pattern, queries[2:], keys[3:]).tolist() == [row[3:] for row in expected[2:]]
    assert seen_whole(pattern.text, len(queries), len(keys)).tolist() == expected
    for query in queries:
        needed = [key for rows in pattern.needed(range(query, query + 1)) for key in rows]
        assert needed == [key for key in keys if sees(pattern, query, key)]
        assert set(needed) <= set(pattern.span(query)) and bool(needed) == bool(pattern.span(query))
    assert pattern.blind == any(not any(row) for row in expected)


@given(some_patterns, spans, spans)
@settings(many, max_examples=300)
def test_answers_about_a_tile_are_those_of_enumeration(pattern: Pattern, queries: range, keys: range) -> None:
    queries, keys = queries[: max(0, pattern.q_length - queries.start)], keys[: max(0, pattern.kv_length - keys.start)]
    everything = pairs(pattern, range(pattern.q_length), range(pattern.kv_length))
    needed = {key for query, key in everything if query in queries}
    assert {key for rows in pattern.needed(queries) for key in rows} == needed
    assert set(pattern.needs(queries)) == set(range(min(needed, default=0), max(needed, default=-1) + 1))
    used = {query for query, key in everything if key in keys}
    assert {query for rows in pattern.used(keys) for query in rows} == used
    assert set(pattern.users(keys)) == set(range(min(used, default=0), max(used, default=-1) + 1))

    wanted = pairs(pattern, queries, keys)
    assert pattern.pairs(queries, keys) == len(wanted)
    assert pattern.kind(queries, keys) in kinds(pattern, wanted, queries, keys)

    tiles = list(pattern.tiles(queries, keys))
    covered = [pair for some, others, _ in tiles for pair in pairs(pattern, some, others)]
    assert len(covered) == len(set(covered)) and set(covered) == wanted
    for some, others, kind in tiles:
        assert kind in kinds(pattern, pairs(pattern, some, others), some, others) and kind is not Kind.EMPTY


def kind_of(seen: set[tuple[int, int]], queries: range, keys: range) -> Kind:
    if not seen:
        return Kind.EMPTY
    if len(seen) == len(queries) * len(keys):
        return Kind.FULL
    triangle = queries == keys and seen == {(query, key) for query in queries for key in keys if key <= query}
    return Kind.CAUSAL if triangle else Kind.PARTIAL


def kinds(pattern: Pattern, seen: set[tuple[int, int]], queries: range, keys: range) -> set[Kind]:
    """The right one; and where a pattern that is not causal shows a triangle by chance, that a mask is made for it."""
    kind = kind_of(seen, queries, keys)
    return {kind, Kind.PARTIAL} if kind is Kind.CAUSAL and not pattern.causal else {kind}


@given(st.integers(1, 30), st.integers(1, 30), spans, spans)
@settings(many)
def test_full_patterns_never_need_a_mask(q_length: int, kv_length: int, queries: range, keys: range) -> None:
    pattern = Full(q_length, kv_length, causal=True)
    queries, keys = queries[: max(0, q_length - queries.start)], keys[: max(0, kv_length - keys.start)]
    assert all(kind is not Kind.PARTIAL for _, _, kind in pattern.tiles(queries, keys))


def test_a_causal_tile_is_cut_into_a_square_and_two_full_parts() -> None:
    tiles = list(Full(20, 20, causal=True).tiles(range(4, 16), range(0, 10)))
    assert tiles == [
        (range(4, 16), range(0, 4), Kind.FULL),
        (range(4, 10), range(4, 10), Kind.CAUSAL),
        (range(10, 16), range(4, 10), Kind.FULL),
    ]


def test_a_window_over_many_rows_is_cut_into_strips_with_the_keys_they_need() -> None:
    pattern = pattern_of("window(1000)", 100_000, 100_000)
    tiles = list(pattern.tiles(range(50_000, 60_000), range(50_000, 60_000)))
    assert len(tiles) == 20
    assert all(len(queries) <= 512 and len(keys) <= 512 + 999 for queries, keys, _ in tiles)


def test_a_million_rows_are_counted_at_once() -> None:
    rows = range(10**6)
    assert pattern_of("causal", 10**6, 10**6).pairs(rows, rows) == 10**6 * (10**6 + 1) // 2
    assert pattern_of("window(100)", 10**6, 10**6).pairs(rows, rows) == 100 * 10**6 - 100 * 99 // 2


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("full", Full(6, 9)),
        ("causal", Full(6, 9, causal=True)),
        ("window(4)", Window(6, 9, causal=True, width=4)),
        ("window(4,both)", Window(6, 9, causal=False, width=4)),
        ("window(4,sinks=2)", Sinks(6, 9, True, width=4, sinks=2)),
        ("prefix(3)", Prefix(6, 9, True, length=3)),
        ("chunked(4)", Chunked(6, 9, causal=True, size=4)),
        ("chunked(4,both)", Chunked(6, 9, causal=False, size=4)),
        ("documents(0,2,6)", Documents(6, 6, True, edges=(0, 2, 6))),
        ("documents(0,6,both)", Documents(6, 6, False, edges=(0, 6))),
        ("causal(rate=2)", Strided(6, 9, True, None, 2)),
        ("full(rate=2)", Strided(6, 9, False, None, 2)),
        ("window(4,rate=2)", Strided(6, 9, True, 4, 2)),
        ("window(4,both,rate=2)", Strided(6, 9, False, 4, 2)),
        ("window(4,both,sinks=2)", Sinks(6, 9, False, 4, 2)),
        ("window(4,sinks=2,rate=3)", Sinks(6, 9, True, 4, 2, 3)),
        ("blocks(4x3;0:1;0:1+2:3)", Blocks(6, 9, True, (4, 3), "0:1;0:1+2:3")),
        ("blocks(2x3;;0:3;1:2,both)", Blocks(6, 9, False, (2, 3), ";0:3;1:2")),
    ],
)
def test_texts(text: str, pattern: Pattern) -> None:
    assert pattern_of(text, 6, pattern.kv_length) == pattern
    assert pattern.text == text


@pytest.mark.parametrize(
    "text", ["", "dense", "window", "window()", "window(-1)", "window(4,left)", "causal ", "blocks(3x3;0:2:4;0:1)"]
)
def test_unknown_texts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is unknown; patterns are 'full', 'causal', 'window"):
        pattern_of(text, 6, 6)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match="0 queries over 5 keys was asked for"):
        pattern_of("full", 0, 5)
    with pytest.raises(PlanError, match="window of 0 keys"):
        pattern_of("window(0)", 5, 5)
    with pytest.raises(PlanError, match="chunks of 0 rows"):
        pattern_of("chunked(0)", 5, 5)
    with pytest.raises(PlanError, match=r"6 queries and 6 keys were given edges \[0, 4\]; they ascend from 0"):
        pattern_of("documents(0,4)", 6, 6)
    with pytest.raises(PlanError, match="blocks of 0 queries x 3 keys"):
        pattern_of("blocks(0x3;0:1)", 6, 6)
    for table in ("0:1", "0:1;0:3", "0:1;0:1+1:2", "0:1;1:1"):
        with pytest.raises(PlanError, match="a list for 2 blocks of queries and 2 of keys was expected"):
            pattern_of(f"blocks(3x3;{table})", 6, 6)


def test_short_segments_are_computed_together_and_long_ones_alone() -> None:
    rows = range(1024)
    assert len(list(pattern_of("chunked(64)", 1024, 1024).tiles(rows, rows))) == 4
    kinds = {kind for *_, kind in pattern_of("chunked(512)", 1024, 1024).tiles(rows, rows)}
    assert kinds == {Kind.CAUSAL}


@pytest.mark.parametrize(
    ("keys", "narrowed"),
    [
        (range(9), range(6)),  # with the hole between
        (range(1, 9), range(3, 6)),  # without the sink there is none
        (range(0, 9, 2), range(0, 6, 2)),
        (range(3), range(1)),
        (range(6, 9), range(0)),  # none of these is seen
    ],
)
def test_two_stretches_are_narrowed_to_the_keys_that_are_seen(keys: range, narrowed: range) -> None:
    """Queries 4 and 5 of a window of two: each sees itself, the key before, and the first one, the sink."""
    assert pattern_of("window(2,sinks=1)", 9, 9).narrowed(range(4, 6), keys) == narrowed


def test_rows_of_two_classes_never_meet() -> None:
    pattern = pattern_of("full(rate=3)", 12, 12)
    for one, other in product(range(3), repeat=2):
        queries, keys = range(one, 12, 3), range(other, 12, 3)
        assert pattern.pairs(queries, keys) == (16 if one == other else 0)
        assert pattern.kind(queries, keys) is (Kind.FULL if one == other else Kind.EMPTY)


@pytest.mark.parametrize(("table", "blind"), [("1:2;0:1", True), ("0:1;1:2", False), ("0:1;", True)])
def test_the_first_query_of_a_block_is_the_one_that_may_see_no_key(table: str, blind: bool) -> None:
    """Blocks of two queries and one key: under a list of key 1 alone, query 0 sees none and query 1 does."""
    assert pattern_of(f"blocks(2x1;{table})", 4, 4).blind is blind
