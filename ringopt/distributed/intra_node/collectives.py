"""All-gather and all-reduce over ranks of one node: each reads from the others what it needs, with no ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringopt.distributed.intra_node import messages as local_links
from ringopt.distributed.intra_node.messages import End, LocalLinks, Offer

PARTS, SUMS = 1, 2  # streams: the operands of each rank, and the chunks that each has summed
# Operands are read in pieces that are still in the cache when they are added.
PIECE = 1 << 18  # bytes


@dataclass
class Together:
    """Several messages as one work; `then` is called after the last."""

    links: LocalLinks
    ends: Sequence[End]
    then: Callable[[], None] | None = None

    def wait(self) -> None:
        """Waits for all. Raises RuntimeError."""
        self.links.wait(self.ends)
        if self.then is not None:
            self.then()


class LocalCollectives:
    """Collectives of all ranks of a mesh: the n-th of this rank matches the n-th of the others, whatever messages are
    between."""

    def __init__(self, links: LocalLinks, rank: int):
        self._links, self._rank, self._number = links, rank, 0

    def gather(self, parts: Mapping[int, Tensor]) -> Together:
        """All-gather. `parts`: by rank, contiguous and of one size; this rank has filled its own, the others are
        filled."""
        links, lines = self._links, self._links.lines.values()
        with links.lock:
            self._number += 1
            key, mine = (PARTS, self._number), parts[self._rank]
            ends = [links.accept(line, parts[line.peer], key) for line in lines]
            return Together(links, [*ends, *[links.offer(line, mine, key) for line in lines]])

    def sum(self, x: Tensor) -> Together:
        """Sums `x`, 1-D and contiguous, in place: the same bits on all ranks and in every run.

        A short one is gathered, and added in the order of the ranks. Of a long one each rank sums a chunk, and sends
        the result to the others (reduce-scatter, then all-gather), so that it reads 2 (p - 1) / p of its size.
        """
        x, links, lines = x.detach(), self._links, self._links.lines.values()
        size = len(lines) + 1
        if x.nbytes <= local_links.SHORT:
            parts = x.new_empty(size, x.numel())
            parts[self._rank] = x
            return Together(links, self.gather(dict(enumerate(parts))).ends, lambda: _add_up(x, parts))
        with links.lock:
            self._number += 1
            parts_key, sums_key = (PARTS, self._number), (SUMS, self._number)
            chunks = x.tensor_split(size)
            # A chunk is written only after its owner has read this rank's operand of it, which is part of the sum.
            sums = [links.accept(line, chunks[line.peer], sums_key) for line in lines]
            brought = [links.offer(line, chunks[line.peer], parts_key) for line in lines]
            # This rank's own chunk appends to `ends` before the last of `sums` is done, for a rank that has sent its
            # sum has offered its part before. An error there is met at once, whatever a peer that failed still owes.
            ends = [*brought, *sums]
            chunk = Chunk(links, chunks[self._rank], len(lines), sums_key, ends)
            for line in lines:
                links.expect(line, parts_key, chunk.bring)
            return Together(links, ends)


@dataclass
class Chunk:
    """The chunk of a sum that this rank adds up, in the order of the ranks, when all `peers` have offered theirs.
    `ends`: of the whole sum, to which those of this chunk are added."""

    links: LocalLinks
    mine: Tensor
    peers: int
    key: tuple[int, int]
    ends: list[End]
    offers: dict[int, Offer] = field(default_factory=dict)

    def bring(self, offer: Offer) -> None:
        self.offers[offer.line.peer] = offer
        if len(self.offers) < self.peers:
            return
        lacks = False
        for _, brought in sorted(self.offers.items()):
            with torch.inference_mode():  # the serving thread may be in another mode than the posting one
                error = self.links.take(brought, self._added(), self.mine.nbytes)
            self.links.taken(brought)
            if error:
                lacks = True
                self.ends.append(End(self.links, brought.line, done=True, error=error))
        # A sum that lacks a part is invalid: peers are sent an empty message, which is an error there, too.
        found = self.mine[:0] if lacks else self.mine
        self.ends += [self.links.offer(brought.line, found, self.key) for brought in self.offers.values()]

    def _added(self) -> Iterator[tuple[int, Tensor]]:
        """(offset in bytes, buffer) of each piece to read into; it is added when the next is asked for."""
        items, numbers = self.mine.element_size(), self.mine.numel()
        most = PIECE // items
        room = self.mine.new_empty(min(most, numbers))
        for start in range(0, numbers, most):
            piece = room[: numbers - start]
            yield start * items, piece
            self.mine[start : start + len(piece)] += piece


def _add_up(x: Tensor, parts: Tensor) -> None:
    with torch.inference_mode():
        torch.sum(parts, 0, dtype=x.dtype, out=x)
