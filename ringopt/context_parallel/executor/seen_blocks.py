"""Which blocks of a tile are seen, where only the numbers of its mask say so: keys that queries picked by scores.

    mask of 256 queries x 1024 keys   ->   [(slice(0, 128), slice(0, 192)), (slice(128, 256), slice(576, 640)), ...]

The list of blocks is known only at run time, and differs from rank to rank. What no query of a block picked is not
computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch.nn.functional as F
from torch import Tensor

from ringopt.kernels.base import HIDDEN

# Of a tile with fewer blocks that nobody sees, all is computed: each piece is a call of the kernel, and merged.
HIDDEN_SHARE = 0.25


def seen_blocks(mask: Tensor, size: int) -> Sequence[tuple[slice, slice]]:
    """Pieces, queries by keys, that hold all that an additive mask [1|B, 1|Hq, queries, keys] lets see, in blocks of
    `size`; one piece where that is nearly all. Read on the host once."""
    rows, keys = mask.shape[2:]
    whole = [(slice(0, rows), slice(0, keys))]
    if mask.is_meta or max(rows, keys) <= size:
        return whole
    shown = (mask.detach() != HIDDEN).any(0).any(0)
    padded = F.pad(shown, (0, -keys % size, 0, -rows % size))
    blocks = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size)).any(3).any(1).tolist()
    count = sum(map(len, blocks))
    if sum(map(sum, blocks)) > (1 - HIDDEN_SHARE) * count:
        return whole
    return list(pieces(blocks, size, rows, keys))


def pieces(blocks: Sequence[Sequence[bool]], size: int, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Runs of blocks of keys that the same blocks of queries see, as few as rows that are alike give."""
    start = 0
    for line, alike in groupby(blocks):
        end = start + size * len(list(alike))
        first = 0
        for seen, run in groupby(line):
            last = first + size * len(list(run))
            if seen:
                yield slice(start, min(end, rows)), slice(first, min(last, keys))
            first = last
        start = end
