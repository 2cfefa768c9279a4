"""K and V of sequence rows: where they lie, and how they are packed into messages.

A message is one flat buffer; for each of its pieces (in order) it holds K [B, Hkv, rows, D], then V [B, Hkv, rows, Dv].
A buffer that has arrived is used in place, and sent on as it is. What else travels is a pair of tensors too: gradients
of K and V; or queries and what belongs to them (queries_move.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.rows import Rows, count, within
from ringopt.context_parallel.plan.exchange import Message
from ringopt.errors import PlanError
from ringopt.kernels.base import accumulator
from ringopt.kernels.fused import add_parts_

Pair = tuple[Tensor, Tensor]


def wide_zeros(x: Tensor) -> Tensor:
    """As `x`, in the accumulator's dtype."""
    return torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device)


@dataclass(frozen=True)
class KVShape:
    """What all rows of K and V share."""

    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> KVShape:
        return cls(k.shape[0], k.shape[1], k.shape[3], v.shape[3], dtype or k.dtype, k.device)

    def elements(self, rows: int) -> int:
        return self.batch * self.heads * rows * (self.key_dim + self.value_dim)

    def empty(self, rows: Rows) -> Packed:
        return Packed(self, rows, torch.empty(self.elements(count(rows)), dtype=self.dtype, device=self.device))


@dataclass(frozen=True, eq=False)
class Packed:
    """The buffer of one message."""

    shape: KVShape
    rows: Rows
    flat: Tensor

    def pairs(self) -> Iterator[tuple[range, Pair]]:
        """Each piece with its K and V, as views of the buffer."""
        start, shape = 0, self.shape
        for piece in self.rows:
            of_key = shape.elements(len(piece)) * shape.key_dim // (shape.key_dim + shape.value_dim)
            stop = start + shape.elements(len(piece))
            sizes = (shape.batch, shape.heads, len(piece))
            key = self.flat[start : start + of_key].view(*sizes, shape.key_dim)
            yield piece, (key, self.flat[start + of_key : stop].view(*sizes, shape.value_dim))
            start = stop

    def slice_of(self, rows: Rows) -> Tensor | None:
        """The part of the buffer that holds `rows`, of which the first is here; None unless all are, one after the
        other."""
        first = self.rows.index(rows[0])
        if self.rows[first : first + len(rows)] != rows:
            return None
        start = self.shape.elements(count(self.rows[:first]))
        return self.flat[start : start + self.shape.elements(count(rows))]


class Local:
    """Where global rows lie in a rank's local tensor, which has the rows of `ranges` in order."""

    def __init__(self, ranges: Rows):
        self.rows = count(ranges)
        self._places = list(zip(ranges, accumulate(map(len, ranges), initial=0), strict=False))

    def slice(self, rows: range) -> slice:
        """Raises PlanError for rows that are not within one of the ranges."""
        for own, start in self._places:
            if within(rows, own):
                first = start + rows.start - own.start
                return slice(first, first + len(rows) * rows.step, rows.step if rows.step > 1 else None)
        raise PlanError(f"rows {rows} are not in one piece of the local rows {[own for own, _ in self._places]}")


class Held:
    """K and V by global rows: a rank's own, and what has arrived and not been dropped."""

    def __init__(self, shape: KVShape, own: Rows, local: Local, k: Tensor, v: Tensor):
        self.shape = shape
        self._pairs = {piece: (k[:, :, local.slice(piece)], v[:, :, local.slice(piece)]) for piece in own}
        self._arrived: dict[range, Packed] = {}

    def put(self, packed: Packed) -> None:
        for piece, pair in packed.pairs():
            self._pairs[piece] = pair
            self._arrived[piece] = packed

    def drop(self, rows: Rows) -> None:
        for piece in rows:
            del self._pairs[piece], self._arrived[piece]

    def pair(self, rows: range) -> Pair:
        """K and V of `rows`, which lie within one piece; views. Raises PlanError where they are not here."""
        return find(self._pairs, rows)

    def piece_of(self, rows: range) -> range:
        """The piece within which `rows` lie. Raises PlanError where they are not here."""
        for piece in self._pairs:
            if within(rows, piece):
                return piece
        raise PlanError(f"rows {rows} are not here; here are {tuple(self._pairs)}")

    def take(self, message: Message) -> Tensor:
        """The buffer of `message`: part of the one in which its rows came, or newly packed."""
        rows = message.rows
        arrived = self._arrived.get(rows[0]) if rows else None
        flat = arrived.slice_of(rows) if arrived is not None else None
        return flat if flat is not None else self._packed(rows).flat

    def _packed(self, rows: Rows) -> Packed:
        packed = self.shape.empty(rows)
        for piece, (key, value) in packed.pairs():
            for target, source in zip((key, value), self.pair(piece), strict=True):
                target.copy_(source)
        return packed


class Gradients:
    """dK and dV in the accumulator's dtype: sums of a rank's own rows, and sums of other ranks' rows on their way home.

    The latter are made in the buffers in which they will leave, when something is first added to them. `leaving` are
    the messages of gradients that the rank will send, in order. `make_home` gives zeros for the former, when they are
    first needed.
    """

    def __init__(
        self,
        shape: KVShape,
        own: Rows,
        local: Local,
        rows: int,
        leaving: Sequence[Message],
        make_home: Callable[[], Pair] | None = None,
    ):
        self.shape, self._local, self._leaving = shape, local, list(leaving)
        self._own, self._rows, self._make_home = own, rows, make_home or self._zeros
        self._home: Pair | None = None
        self._sums: dict[Message, Packed] = {}

    def add(self, rows: range, dk: Tensor, dv: Tensor) -> None:
        """Adds to the sums of `rows`. Raises PlanError where the plan has no way home for them."""
        self.join([self.of(rows)], [(dk, dv)])

    def join(self, totals: Sequence[Pair], parts: Sequence[Pair]) -> None:
        """Adds each of `parts` to its total, in place."""
        add_parts_(list(chain(*totals)), list(chain(*parts)))

    def join_whole(self, total: Packed, part: Packed) -> None:
        """The same of all that two buffers of the same rows hold."""
        total.flat.add_(part.flat)

    def nothing(self, pair: Pair) -> None:
        """Makes of `pair` the sum of no parts, in place."""
        for tensor in pair:
            tensor.zero_()

    def blank(self, packed: Packed) -> None:
        """The same of a whole buffer."""
        packed.flat.zero_()

    def put(self, packed: Packed) -> None:
        onward = next((message for message in self._leaving if message.rows == packed.rows), None)
        if onward is None:
            self.join([self.of(piece) for piece in packed.rows], [pair for _, pair in packed.pairs()])
        elif onward in self._sums:
            self.join_whole(self._sums[onward], packed)
        else:
            self._sums[onward] = packed  # what is made here is added in the buffer that arrived

    def take(self, message: Message) -> Tensor:
        """The buffer of `message`, to which nothing can be added any more."""
        self._leaving.remove(message)
        packed = self._sums.pop(message, None)
        return packed.flat if packed is not None else self._started(message.rows).flat

    def home(self) -> Pair:
        """Of the rank's own rows: [B, Hkv, S_local, D] and [B, Hkv, S_local, Dv]."""
        if self._home is None:
            self._home = self._make_home()
        return self._home

    def _zeros(self) -> Pair:
        shape = self.shape
        dk, dv = (
            torch.empty(shape.batch, shape.heads, self._rows, dim, dtype=shape.dtype, device=shape.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        self.nothing((dk, dv))
        return dk, dv

    def _started(self, rows: Rows) -> Packed:
        packed = self.shape.empty(rows)
        self.blank(packed)
        return packed

    def of(self, rows: range) -> Pair:
        """The sums of `rows`; views. Raises PlanError where the plan has no way home for them."""
        if any(within(rows, piece) for piece in self._own):
            place = self._local.slice(rows)
            dk, dv = self.home()
            return dk[:, :, place], dv[:, :, place]
        for message in self._leaving:
            if any(within(rows, piece) for piece in message.rows):
                if message not in self._sums:
                    self._sums[message] = self._started(message.rows)
                return find(dict(self._sums[message].pairs()), rows)
        leaving = "; ".join(map(str, self._leaving)) or "nothing"
        raise PlanError(f"gradients of rows {rows} have no way home: the rank sends on {leaving}")


def find(pairs: Mapping[range, Pair], rows: range) -> Pair:
    """`rows` of the piece that holds them all; views. Raises PlanError."""
    for piece, (key, value) in pairs.items():
        if within(rows, piece):
            first = rows.start - piece.start
            place = slice(first, first + len(rows) * rows.step, rows.step)
            return key[:, :, place], value[:, :, place]
    raise PlanError(f"rows {rows} are not here; here are {tuple(pairs)}")
