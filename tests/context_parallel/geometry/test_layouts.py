"""Which rows a rank holds: any length over any number of ranks."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from ringopt.context_parallel.geometry.layouts import LAYOUTS, Contiguous, Layout, Zigzag, layout_of
from ringopt.context_parallel.geometry.pattern import Full
from ringopt.context_parallel.geometry.rows import count, join
from ringopt.errors import OptionError, PlanError

SIZES = [(length, ranks) for length in (1, 2, 3, 5, 8, 16, 17, 67, 200) for ranks in (1, 2, 3, 4, 7, 8, 16)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("length", "ranks"), SIZES)
def test_laws(name: str, length: int, ranks: int) -> None:
    layout = layout_of(name, length, ranks)
    held = [layout.ranges(rank) for rank in range(ranks)]
    assert sorted(row for ranges in held for rows in ranges for row in rows) == list(range(length)), "no partition"
    for rank, ranges in enumerate(held):
        assert all(ranges), "an empty range"
        assert all(before.stop < after.start for before, after in pairwise(ranges)), "some touch"
        assert all(layout.owner(row) == rank for rows in ranges for row in rows)
        assert abs(count(ranges) - length / ranks) < layout.chunks_per_rank
    for start in range(0, length, 3):
        for stop in range(start, length + 1, 5):
            assert layout.owners(range(start, stop)) == {layout.owner(row) for row in range(start, stop)}


@pytest.mark.parametrize("name", [*LAYOUTS, "replicated"])
@pytest.mark.parametrize(("length", "ranks"), SIZES)
def test_the_rows_of_a_rank_are_its_chunks(name: str, length: int, ranks: int) -> None:
    """Where every rank has all of them too."""
    layout = layout_of(name, length, ranks)
    for rank in range(ranks):
        chunks = (range(layout.edge(chunk), layout.edge(chunk + 1)) for chunk in layout.chunks(rank))
        assert layout.ranges(rank) == join(chunks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_rank_that_has_most(name: str) -> None:
    """Asked of a million ranks too, so that nobody counts them."""
    for length, ranks in product(range(1, 61), range(1, 14)):
        layout = layout_of(name, length, ranks)
        assert layout.most == max(count(layout.ranges(rank)) for rank in range(ranks)), layout
    assert layout_of(name, 2**30, 10**6).most == 1074


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("grain", ["3", "4x5", "64"])
@pytest.mark.parametrize(("length", "ranks"), [(17, 2), (19, 2), (20, 3), (23, 1)])
def test_laws_of_a_grain(name: str, grain: str, length: int, ranks: int) -> None:
    """Cut between units alone; more units than there are may be counted, or fewer."""
    layout = layout_of(f"{name}:{grain}", length, ranks)
    assert layout.text == f"{name}:{grain}"
    held = [layout.ranges(rank) for rank in range(ranks)]
    assert sorted(row for ranges in held for rows in ranges for row in rows) == list(range(length)), "no partition"
    assert all(rows.start % layout.grain == 0 for ranges in held for rows in ranges)
    assert all(rows.stop % layout.grain == 0 or rows.stop == length for ranges in held for rows in ranges)
    assert all(layout.owner(row) == rank for rank, ranges in enumerate(held) for rows in ranges for row in rows)
    assert layout.most == max(map(count, held))
    for start in range(0, length, 3):
        for stop in range(start, length + 1, 5):
            assert layout.owners(range(start, stop)) == {layout.owner(row) for row in range(start, stop)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_units_lie_alike_in_sequences_that_differ_by_some_rows(name: str) -> None:
    edges = {length: [layout_of(f"{name}:4x6", length, 2).edge(i) for i in range(2)] for length in range(20, 28)}
    assert len({str(found) for found in edges.values()}) == 1
    of_units = layout_of(name, 6, 2).ranges(1)
    assert layout_of(f"{name}:4x6", 24, 2).ranges(1) == tuple(range(4 * x.start, 4 * x.stop) for x in of_units)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_more_leave_the_units_where_they_are(name: str) -> None:
    """Whatever the length: ":4" would have another unit where the rows that are more fill one."""
    for length in range(1, 40):
        plain, longer = layout_of(f"{name}:4", length, 2), layout_of(f"{name}:4+3", length + 3, 2)
        last = 2 * plain.chunks_per_rank
        assert [plain.edge(i) for i in range(last)] == [longer.edge(i) for i in range(last)]
        held = (row for rank in range(2) for rows in longer.ranges(rank) for row in rows)
        assert sorted(held) == list(range(length + 3))


@pytest.mark.parametrize(
    ("layout", "ranges"),
    [
        (Contiguous(10, 3), [(range(0, 3),), (range(3, 6),), (range(6, 10),)]),
        (Contiguous(2, 4), [(), (range(0, 1),), (), (range(1, 2),)]),
        (Zigzag(12, 3), [(range(0, 2), range(10, 12)), (range(2, 4), range(8, 10)), (range(4, 8),)]),
        (Zigzag(7, 2), [(range(0, 1), range(5, 7)), (range(1, 5),)]),
        (Zigzag(3, 4), [(range(2, 3),), (), (range(0, 2),), ()]),
        (Zigzag(5, 1), [(range(0, 5),)]),
    ],
    ids=str,
)
def test_examples(layout: Layout, ranges: list[tuple[range, ...]]) -> None:
    assert [layout.ranges(rank) for rank in range(layout.ranks)] == ranges


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_zigzag_shares_causal_work_equally(ranks: int) -> None:
    layout, pattern = Zigzag(20 * ranks, ranks), Full(20 * ranks, 20 * ranks, causal=True)
    everything = range(layout.length)
    pairs = {sum(pattern.pairs(rows, everything) for rows in layout.ranges(rank)) for rank in range(ranks)}
    assert len(pairs) == 1


def test_refusals() -> None:
    with pytest.raises(OptionError, match="layout 'striped' is unknown; the layouts are 'contiguous', 'zigzag'"):
        layout_of("striped", 8, 2)
    with pytest.raises(OptionError, match=r"layout 'zigzag:0' is unknown; .* each also with a grain, 'zigzag:64'"):
        layout_of("zigzag:0", 8, 2)
    with pytest.raises(PlanError, match="16 rows are no 6 units of 4 rows"):
        layout_of("zigzag:4x6", 16, 2)
    with pytest.raises(PlanError, match="0 rows over 2 ranks was asked for; both must be at least 1"):
        layout_of("zigzag", 0, 2)
