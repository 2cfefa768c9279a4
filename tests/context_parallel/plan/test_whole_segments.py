"""Dilated attention on shards: which segments a rank has whole, which are exchanged, and where their rows lie."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from ringopt.context_parallel.geometry.local_segments import Segments
from ringopt.context_parallel.plan.dilated import DilatedPlan, TermPlan, dilated_plan_of, prove_dilated


def drawn() -> Iterator[DilatedPlan]:
    """Two terms each, on layouts of which some pieces hold no segment whole, some several."""
    dice = Random(0)
    for _ in range(40):
        length, ranks = dice.randrange(9, 60), dice.randrange(1, 5)
        pairs = (f"{dice.randrange(3, 20)}:{dice.randrange(1, 4)}" for _ in range(2))
        text = f"dilated({','.join(pairs)}{dice.choice(['', ',causal'])})"
        yield dilated_plan_of(text, length, (4, 2), ranks, dice.choice(["contiguous", "zigzag"]), "auto")


def own_rows(part: TermPlan, rank: int) -> list[int]:
    """The rows of a rank in the order in which its tensor holds them."""
    return [row for rows in part.layout.ranges(rank) for row in rows]


def test_each_kept_row_is_in_a_whole_segment_or_exchanged() -> None:
    """By its place in the tensor of its rank, too: a stretch from `here` on, a piece at the slice `here`."""
    for plan in drawn():
        for part in plan.terms:
            found = []
            for rank in range(plan.layout.ranks):
                prove_dilated(plan, rank)
                mine, kept = own_rows(part, rank), part.term.kept
                for some in part.whole(rank):
                    assert mine[some.here : some.here + some.rows] == list(range(some.first, some.first + some.rows))
                    found += [row for row in range(some.first, some.first + some.rows) if _is_kept(part, row)]
                for piece in part.pieces(rank):
                    assert mine[piece.here] == list(part.rows(piece.packed))
                    found += mine[piece.here]
            assert sorted(found) == [row for row in range(kept.length) if _is_kept(part, row)]


def _is_kept(part: TermPlan, row: int) -> bool:
    kept = part.term.kept
    return row % kept.segment % kept.rate == kept.offset


@pytest.mark.parametrize("causal", [True, False])
def test_who_sees_a_key_of_a_segment(causal: bool) -> None:
    """By enumeration, over keys of one segment and of several, the last of which has one row among them."""
    edges = (0, 4, 5, 9, 10)
    pattern = Segments(10, 10, causal, edges)
    for start in range(10):
        for stop in range(start, 11):
            keys = range(start, stop)
            seeing = [query for query in range(10) if set(pattern.span(query)) & set(keys)]
            assert list(pattern.users(keys)) == seeing
            for queries in (range(0, 4), range(3, 10), range(9, 10)):
                pairs = sum(len(set(pattern.span(query)) & set(keys)) for query in queries)
                assert pattern.pairs(queries, keys) == pairs
