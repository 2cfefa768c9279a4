"""How a block that a pattern cuts through is computed: in strips of queries, each with the keys that it needs."""

from __future__ import annotations

from functools import lru_cache

from ringopt.context_parallel.geometry.pattern import Band, Kind, Pattern
from ringopt.context_parallel.geometry.rows import Rows, meet, within
from ringopt.context_parallel.plan.exchange import Block
from ringopt.hardware.devices import OF_CORES, limits_of

# Queries of a forward tile (Limits.strip) are few enough for its output to be small beside the sums, and enough for a
# kernel to work at its best. PyTorch's for the CPU takes AT_ONCE from 768 on, and fewer below; of a number that these
# do not divide the rest costs as much as they do.
AT_ONCE = 256

# Shorter strips are taken as long as they save this part of the pairs: what is hidden in them is computed for nothing,
# and each strip costs a call of the kernel and a merge.
WORTH = 1 / 8


def least_of(kernel: str) -> int:
    """The fewest queries of a tile with a mask of its own, for a kernel by name."""
    return limits_of("cpu" if kernel in ("flash_cpu", "math") else "cuda").least


def strip_of(queries: int, device: str = "cpu") -> int:
    """Queries of a forward tile, of so many that a rank has."""
    strip = limits_of(device).strip
    return -(-max(strip, queries // 8) // AT_ONCE) * AT_ONCE if strip else max(1, queries)


def strip_ends(queries: int, strip: int) -> list[int]:
    """Where the strips of a tile end, from 0 on: the last has up to three quarters more than `strip`, or less."""
    return [*range(0, max(1, queries - strip * 3 // 4), strip), queries]


def placeless(pattern: Pattern, block: Block) -> Block:
    """The block moved to the first rows, where nothing but its place depends on that: a band only knows distances, so
    that of the many blocks of a window most are one."""
    queries, keys = block.queries, block.keys
    if not isinstance(pattern, Band) or not queries.step == keys.step == 1:
        return block
    first = min(queries.start, keys.start)
    queries, keys = (range(rows.start - first, rows.stop - first) for rows in (queries, keys))
    return Block(queries, keys, block.kind)


@lru_cache(maxsize=4096)
def pieces(pattern: Pattern, block: Block, kernel: str) -> tuple[Block, ...]:
    """What a kernel is given of a block at once, where no mask but that of the pattern is made."""
    if block.kind is not Kind.PARTIAL:
        return (block,)
    rows = queries_at_once(pattern, block.queries, block.keys, least_of(kernel))
    cut = strips(pattern, block.queries, block.keys, min(rows, max(1, OF_CORES.mask // len(block.keys))))
    found = (Block(queries, keys, pattern.kind(queries, keys)) for queries, keys in cut)
    return tuple(piece for piece in found if piece.kind is not Kind.EMPTY)


def band_seen(pattern: Pattern, queries: range, keys: range) -> tuple[int, int] | None:
    """(low, high) where query i of `queries` sees the keys j of `keys` with low <= j - i < high, at least one, and the
    last query the last key. None where it is not so, or where flash attention would not see it so: it counts windows
    from the last query and key on, and one of more than all keys as one of all."""
    if not isinstance(pattern, Band) or not queries.step == keys.step == 1:
        return None
    apart = queries.start - keys.start
    low, high, beyond = pattern.low + apart, pattern.high + apart, len(keys) - len(queries)
    right = high - 1 - beyond
    counted = right < len(keys) or beyond >= 0
    return (low, high) if high > 0 and low <= beyond and right >= 0 and counted else None


@lru_cache(maxsize=1024)
def joined(pattern: Pattern, blocks: tuple[Block, ...], pieces: Rows) -> tuple[Block, ...]:
    """The same pairs in fewer blocks: strips of a band, one after the other, that share keys of one piece, and queries
    of one of `pieces`. For a kernel that needs no mask for a band."""
    found: list[Block] = []
    for block in blocks:
        whole = _both(pattern, found[-1], block) if found else None
        if whole is not None and any(within(whole.queries, piece) for piece in pieces):
            found[-1] = whole
        else:
            found.append(block)
    return tuple(found)


def _both(pattern: Pattern, one: Block, other: Block) -> Block | None:
    queries = range(one.queries.start, other.queries.stop)
    keys = range(min(one.keys.start, other.keys.start), max(one.keys.stop, other.keys.stop))
    follows = one.queries.stop == other.queries.start and meet(one.keys, other.keys)
    if not follows or band_seen(pattern, queries, keys) is None:
        return None
    return Block(queries, keys, pattern.kind(queries, keys))


@lru_cache(maxsize=4096)
def queries_at_once(pattern: Pattern, queries: range, keys: range, least: int) -> int:
    """Of a block: halved as long as that is WORTH it, down to `least`. For windows a quarter of the width or so."""
    step, pairs = len(queries), computed(pattern, queries, keys, len(queries))
    while step // 2 >= least and (fewer := computed(pattern, queries, keys, -(-step // 2))) <= pairs * (1 - WORTH):
        step, pairs = -(-step // 2), fewer
    return step


def computed(pattern: Pattern, queries: range, keys: range, step: int) -> int:
    """Pairs of strips of `step` queries."""
    return sum(len(some) * len(others) for some, others in strips(pattern, queries, keys, step))


def strips(pattern: Pattern, queries: range, keys: range, step: int) -> list[tuple[range, range]]:
    """The queries in strips of `step`, each with the keys that it sees some of."""
    pieces = (queries[first : first + step] for first in range(0, len(queries), step))
    return [(some, pattern.narrowed(some, keys)) for some in pieces]
