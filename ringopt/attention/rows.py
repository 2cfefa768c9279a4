"""Sets of sequence rows as tuples of ranges: exact, hashable, and of constant size however long the sequence.

Every range has step 1 and counts rows of the whole sequence, never of a rank's local tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

Rows = tuple[range, ...]


def meet(a: range, b: range) -> range:
    """The rows that both ranges hold; empty where they hold none."""
    # Written out: of all that a plan and its proof ask, they ask this most.
    start = a.start if a.start > b.start else b.start
    stop = a.stop if a.stop < b.stop else b.stop
    return range(start, stop if stop > start else start)


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


def count(rows: Iterable[range]) -> int:
    """How many rows there are, a row in two ranges counted twice."""
    return sum(map(len, rows))


def text(rows: Iterable[range]) -> str:
    """`0:4,12:16`, as one writes slices."""
    return ",".join(f"{piece.start}:{piece.stop}" for piece in rows)
