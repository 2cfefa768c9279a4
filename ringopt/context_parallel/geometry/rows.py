"""Sets of sequence rows as tuples of ranges: exact, hashable, and of constant size however long the sequence.

Ranges count rows of the whole sequence, never of a rank's local tensor. They have step 1 but for tiles of a strided
pattern (strided.py), whose rows are an equal step apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Rows = tuple[range, ...]


class ByRank(dict[int, Rows]):
    """Rows of each rank, found when they are asked for, and kept: of very many ranks few are."""

    def __init__(self, find: Callable[[int], Rows]) -> None:
        super().__init__()
        self.find = find

    def __missing__(self, rank: int) -> Rows:
        self[rank] = self.find(rank)
        return self[rank]


def meet(a: range, b: range) -> range:
    """The rows that both ranges hold; empty where they hold none."""
    # Written out: of all that a plan and its proof ask, they ask this most.
    start = a.start if a.start > b.start else b.start
    stop = a.stop if a.stop < b.stop else b.stop
    return range(start, stop if stop > start else start)


def inside(rows: range, hull: range) -> range:
    """Of `rows`, of any step, those that lie in `hull`, of step 1."""
    first, last = (max(0, -(-(edge - rows.start) // rows.step)) for edge in (hull.start, hull.stop))
    return rows[first : max(first, last)]


def nth_part(rows: range, number: int, parts: int) -> range:
    """The part `number` of so many."""
    return rows[len(rows) * number // parts : len(rows) * (number + 1) // parts]


def within(rows: range, piece: range) -> bool:
    """Whether `piece`, of step 1, holds all of `rows`, of any step."""
    return piece.start <= rows.start and (rows[-1] < piece.stop if rows else rows.stop <= piece.stop)


def overlap(a: range, b: range) -> bool:
    """Whether two ranges of any step share a row."""
    if a.step == b.step:
        return bool(meet(a, b)) and (a.start - b.start) % a.step == 0
    few, many = sorted((a, b), key=len)
    return any(row in many for row in few)


def join(ranges: Iterable[range]) -> Rows:
    """The union, ascending: ranges that overlap or touch become one, empty ones vanish."""
    joined: list[range] = []
    for rows in sorted(filter(len, ranges), key=lambda rows: rows.start):
        if joined and rows.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, rows.stop))
        else:
            joined.append(rows)
    return tuple(joined)


def without(rows: range, others: Iterable[range]) -> Rows:
    """What is left of `rows`, ascending."""
    left, start = [], rows.start
    for other in join(meet(rows, other) for other in others):
        left.append(range(start, other.start))
        start = other.stop
    return tuple(filter(len, (*left, range(start, rows.stop))))


def hull(rows: Rows) -> range:
    """From the first of ascending `rows` to the last, with the holes."""
    return range(rows[0].start, rows[-1].stop) if rows else range(0)


def count(rows: Iterable[range]) -> int:
    """How many rows there are, a row in two ranges counted twice."""
    return sum(map(len, rows))


def rows_text(rows: Iterable[range]) -> str:
    """`0:4,12:16,20:30:2`, as one writes slices."""
    return ",".join(f"{piece.start}:{piece.stop}" + f":{piece.step}" * (piece.step > 1) for piece in rows)
