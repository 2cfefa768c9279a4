"""Dilated attention as a set of rows (Ding et al., LongNet, 2023, sections 2.2 and 2.3).

A pattern is (w, r): the sequence is cut into segments of w rows, and head j takes every r-th row of a segment, from its
offset on. Queries and keys are cut alike, so what is left of a segment attends to itself, and causal is the plain
triangle of what is left. Several patterns are one softmax over all their keys, a key of two patterns counted twice:
partial softmaxes merged by log-sum-exp, with the gradients that this has.

    kept(w, r, j) = {t : (t mod w) mod r == offset(j)}

Any length, segment and rate: the last segment is shorter, and nothing is padded. (torchscale and fkodom pad with keys
of zeros that take part in the softmax, or ask for lengths that divide.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.errors import OptionError
from ringopt.options import check_dilation

# "dilated(2048:1,4096:2)", then what is not the default
TEXT = re.compile(r"dilated\((\d+:\d+(?:,\d+:\d+)*)(,causal)?(,torchscale offsets)?(,torchscale mixing)?\)")


@dataclass(frozen=True)
class Kept:
    """The rows t of `length` with (t mod segment) mod rate == offset."""

    length: int
    segment: int
    rate: int
    offset: int

    @property
    def segments(self) -> int:
        return -(-self.length // self.segment)

    def rows(self, number: int) -> range:
        """The kept rows of a segment; the last may have none."""
        start, stop = number * self.segment, min((number + 1) * self.segment, self.length)
        return range(min(start + self.offset, stop), stop, self.rate)

    def before(self, row: int) -> int:
        """How many rows before `row` are kept."""
        number, rest = divmod(row, self.segment)
        return number * len(range(self.offset, self.segment, self.rate)) + len(range(self.offset, rest, self.rate))

    def within(self, number: int, rows: range) -> range:
        """Which of the kept rows of a segment, counted from its first, are among `rows`."""
        kept = self.rows(number)
        first, last = (-(-(edge - kept.start) // self.rate) for edge in (rows.start, rows.stop))
        first = min(max(first, 0), len(kept))
        return range(first, min(max(last, first), len(kept)))

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(rows that a segment keeps, how many such segments there are)."""
        whole, rest = divmod(self.length, self.segment)
        yield len(range(self.offset, self.segment, self.rate)), whole
        yield len(range(self.offset, rest, self.rate)), 1

    @property
    def padded(self) -> int:
        """Rows of one head to which torchscale pads every segment."""
        return -(-self.segment // self.rate)


@dataclass(frozen=True)
class DilatedTerm:
    """The heads of one pattern that keep the same rows: `heads` of the queries, `kv_heads` of keys and values.

    Query head i of them attends with the i // groups-th of `kv_heads`, or where `spread` is given, with the
    spread[i]-th.
    """

    kept: Kept
    heads: range
    kv_heads: Sequence[int]
    spread: tuple[int, ...] | None = None

    def pairs(self, causal: bool) -> int:
        """Pairs of query and key of one head."""
        return sum(many * (size * (size + 1) // 2 if causal else size * size) for size, many in self.kept.sizes())


@dataclass(frozen=True)
class Dilation:
    """Patterns (segment_lengths[i], dilation_rates[i]) under one softmax.

    offsets            "paper": head j begins with row j mod r of a segment; "torchscale": j // ceil(heads / r), which
                       blocks of neighbouring heads have in common
    torchscale_mixing  what torchscale computes: the weights of the patterns carry no gradient, and without causal a
                       segment is padded with keys of zeros up to the next multiple of its rate and length

    Raises OptionError for what is no dilation.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = False
    offsets: str = "paper"
    torchscale_mixing: bool = False

    def __post_init__(self) -> None:
        check_dilation(self.segment_lengths, self.dilation_rates, self.offsets)

    @classmethod
    def asked(
        cls, segment_lengths: Any, dilation_rates: Any, causal: bool, offsets: str, torchscale_mixing: bool = False
    ) -> Dilation:
        """From what a user gave, lists included."""
        check_dilation(segment_lengths, dilation_rates, offsets)
        return cls(tuple(segment_lengths), tuple(dilation_rates), causal, offsets, torchscale_mixing)

    @cached_property
    def text(self) -> str:
        """What `dilation_of` reads."""
        patterns = ",".join(f"{w}:{r}" for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True))
        more = (
            (self.causal, "causal"),
            (self.offsets == "torchscale", "torchscale offsets"),
            (self.torchscale_mixing, "torchscale mixing"),
        )
        return f"dilated({','.join([patterns, *(name for given, name in more if given)])})"

    def offset(self, head: int, heads: int, rate: int) -> int:
        return head % rate if self.offsets == "paper" else head // -(-heads // rate)

    def terms(self, length: int, heads: int, kv_heads: int) -> tuple[DilatedTerm, ...]:
        """Of all patterns, for each offset the heads that have it."""
        return _terms(self, length, heads, kv_heads)

    def pairs(self, length: int, heads: int) -> int:
        """Pairs of query and key of all heads; a pair of two patterns is two."""
        return sum(term.pairs(self.causal) * len(term.heads) for term in self.terms(length, heads, heads))

    def kind(self, queries: range, keys: range, length: int, heads: int) -> Kind:
        """What the queries see of the keys: something of it in some head, or all of it in all heads."""
        seen = Kind.EMPTY
        for term in self.terms(length, heads, heads):
            w = term.kept.segment
            both = range(max(queries[0], keys[0]) // w, min(queries[-1], keys[-1]) // w + 1)
            one = queries[0] // w == queries[-1] // w == keys[0] // w == keys[-1] // w
            if term.kept.rate == 1 and one and not (self.causal and keys[-1] > queries[0]):
                return Kind.FULL
            for number in both:
                mine, theirs = (term.kept.within(number, rows) for rows in (queries, keys))
                if mine and theirs and not (self.causal and theirs[0] > mine[-1]):
                    seen = Kind.PARTIAL
                    break
        return seen

    def left_out(self, length: int, heads: int) -> tuple[int, int]:
        """Rows that no head keeps, and (row, head) that no pattern keeps: their output is 0."""
        return _left_out(self, length, heads)

    def sentence_of_left_out(self, length: int, heads: int) -> str:
        """A sentence on `left_out`, "" where all are kept."""
        rows, places = self.left_out(length, heads)
        if not places:
            return ""
        return (
            f"{self.text} keeps {rows} of {length} tokens in no head, and leaves {places} of {length * heads} places "
            "(token, head) out: their output is 0. A pattern of rate 1 keeps all"
        )


def is_dilated(pattern: str) -> bool:
    """Whether a pattern is that of dilated attention (LongNet, Ding et al. 2023), rather than one attention with a
    mask."""
    return pattern.startswith("dilated(")


@lru_cache(maxsize=1024)
def dilation_of(text: str) -> Dilation:
    """The dilation that `text` names, such as "dilated(2048:1,4096:2,causal)". Raises OptionError for another text."""
    found = TEXT.fullmatch(text)
    if found is None:
        raise OptionError(
            f"attention pattern {text!r} is no dilation; expected such as 'dilated(2048:1,4096:2,causal)'"
        )
    pairs = [tuple(map(int, pair.split(":"))) for pair in found[1].split(",")]
    lengths, rates = zip(*pairs, strict=True)
    return Dilation(lengths, rates, bool(found[2]), "torchscale" if found[3] else "paper", bool(found[4]))


@lru_cache(maxsize=1024)
def _terms(dilation: Dilation, length: int, heads: int, kv_heads: int) -> tuple[DilatedTerm, ...]:
    made = []
    for segment, rate in zip(dilation.segment_lengths, dilation.dilation_rates, strict=True):
        offsets = [dilation.offset(head, heads, rate) for head in range(heads)]
        for offset in sorted(set(offsets)):
            mine = [head for head in range(heads) if offsets[head] == offset]
            step = mine[1] - mine[0] if len(mine) > 1 else 1
            kept = Kept(length, min(segment, length), rate, offset)
            if not kept.rows(0):
                continue  # the sequence ends before the first row of these heads
            made.append(DilatedTerm(kept, range(mine[0], mine[-1] + 1, step), *shared_heads(mine, heads // kv_heads)))
    return tuple(made)


def shared_heads(heads: list[int], groups: int) -> tuple[Sequence[int], tuple[int, ...] | None]:
    """KV heads of some query heads, each once, and `spread` of a Term where these are not shared evenly."""
    of = [head // groups for head in heads]
    each = sorted(set(of))
    share = len(heads) // len(each)
    step = each[1] - each[0] if len(each) > 1 else 1
    even = range(each[0], each[-1] + 1, step)
    if list(even) == each and of == [head for head in each for _ in range(share)]:
        return even, None
    return tuple(each), tuple(each.index(head) for head in of)


@lru_cache(maxsize=256)
def _left_out(dilation: Dilation, length: int, heads: int) -> tuple[int, int]:
    if 1 in dilation.dilation_rates:
        return 0, 0
    in_some, places = bytearray(length), 0
    alike: dict[tuple[int, ...], int] = {}
    for head in range(heads):
        offsets = tuple(dilation.offset(head, heads, rate) for rate in dilation.dilation_rates)
        alike[offsets] = alike.get(offsets, 0) + 1
    for offsets, many in alike.items():
        in_one = bytearray(length)
        for w, r, offset in zip(dilation.segment_lengths, dilation.dilation_rates, offsets, strict=True):
            kept = Kept(length, min(w, length), r, offset)
            for rows in map(kept.rows, range(kept.segments)):
                for marks in (in_one, in_some):
                    marks[rows.start : rows.stop : r] = b"\1" * len(rows)
        places += many * in_one.count(0)
    return in_some.count(0), places
