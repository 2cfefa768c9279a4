"""What a tile holds beside the sums that it is added to, in bytes: its results, its mask, what its kernel works in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ringopt.context_parallel.geometry.pattern import Band, Kind, Pattern
from ringopt.context_parallel.geometry.segmented import TwoStretches
from ringopt.context_parallel.geometry.strided import Strided
from ringopt.context_parallel.plan.exchange import Block, Cargo
from ringopt.context_parallel.plan.tiling import strip_ends
from ringopt.cost.simulate import Heads
from ringopt.hardware.devices import limits_of

# Bytes an element while the mask of a pattern is made (geometry/visibility.py): of distances in 64 bits and three
# comparisons; of ends of rows, the comparisons alone.
OF_DISTANCES, OF_ENDS = 11, 3

# Queries and keys that PyTorch's flash attention for the CPU takes at once, from so many queries on; one thread.
FLASH_QUERIES = ((768, 256), (192, 64), (0, 32))
FLASH_KEYS = 512


@dataclass(frozen=True)
class Sums:
    """Bytes of results and gradients of so many rows: `wide` as sums, else in the dtype of the operands."""

    heads: Heads
    queries: int
    keys: int

    @property
    def narrow(self) -> bool:
        """Whether operands have fewer bits than sums."""
        return self.heads.itemsize < self.heads.wide

    @property
    def out(self) -> int:
        return self._of_queries(self.heads.value_dim, self.heads.itemsize)

    @property
    def wide_out(self) -> int:
        return self._of_queries(self.heads.value_dim, self.heads.wide)

    @property
    def lse(self) -> int:
        return self._of_queries(1, self.heads.wide)

    @property
    def dq(self) -> int:
        return self._of_queries(self.heads.key_dim, self.heads.itemsize)

    @property
    def wide_dq(self) -> int:
        return self._of_queries(self.heads.key_dim, self.heads.wide)

    @property
    def dkv(self) -> int:
        return self.keys * self.heads.row()

    @property
    def wide_dkv(self) -> int:
        return self.keys * self.heads.row(Cargo.BACK)

    def _of_queries(self, width: int, itemsize: int) -> int:
        return self.queries * self.heads.batch * self.heads.q_heads * width * itemsize


@dataclass(frozen=True)
class TileBytes:
    """Of one tile: the most while the mask of its pattern is made, and then until its kernel is done; what is there
    while it is added to the sums; and of that the mask, which is kept until another is made."""

    making: int
    working: int
    adding: int
    kept: int


def forward_tile(pattern: Pattern, block: Block, heads: Heads, rows: int, fresh: bool = False) -> TileBytes:
    """Of a piece of a block (plan/tiling.py), of which `rows` queries or so are computed at a time. `fresh`: of which
    there are no sums yet, so that its results are copied and not merged."""
    largest = max(end - first for first, end in pairwise(strip_ends(len(block.queries), rows)))
    part = Sums(heads, largest, len(block.keys))
    making, mask = masks(pattern, block, heads)
    given = mask + part.out + part.lse
    merging = 0 if fresh else 2 * part.lse + part.lse // heads.wide + part.wide_out * part.narrow
    return TileBytes(making, given + scratch(part), given + merging, mask)


def first_tile(pattern: Pattern, block: Block, heads: Heads) -> TileBytes:
    """Of one that is computed at once, and whose results become the sums; of the log-sum-exp a copy, for a kernel has
    its dims in another order."""
    part = Sums(heads, len(block.queries), len(block.keys))
    making, mask = masks(pattern, block, heads)
    working = mask + part.out + part.lse + scratch(part)
    return TileBytes(making, working, mask + part.lse, mask)


def backward_tile(pattern: Pattern, block: Block, heads: Heads) -> TileBytes:
    """Of a whole piece; grouped heads are repeated for a kernel that knows none, and their gradients summed."""
    part, groups = Sums(heads, len(block.queries), len(block.keys)), heads.q_heads // heads.kv_heads
    making, mask = masks(pattern, block, heads)
    if heads.kernel == "math":
        given = part.wide_dq + part.wide_dkv
        return TileBytes(making, mask + part.lse + given + scratch(part, True), mask + given, mask)
    cast = max(part.wide_dq, part.wide_dkv // 2) * part.narrow  # of what is added to a sum of more bits
    if groups == 1:
        given = mask + part.dq + part.dkv
        return TileBytes(making, given + part.lse + scratch(part, True), given + cast, mask)
    repeated = 2 * groups * part.dkv  # keys and values, and their gradients
    working = max(scratch(part, True), part.wide_dkv)
    given = mask + part.dq
    return TileBytes(making, given + part.lse + repeated + working, given + part.wide_dkv + cast, mask)


def masks(pattern: Pattern, block: Block, heads: Heads) -> tuple[int, int]:
    """Of the mask of a pattern that cuts through the block: while it is made, and from then on."""
    elements = len(block.queries) * len(block.keys) * (block.kind is Kind.PARTIAL)
    of_distances = isinstance(pattern, (Band, Strided, TwoStretches))
    making = OF_DISTANCES if of_distances else max(OF_ENDS, 1 + heads.itemsize)
    return elements * making, elements * heads.itemsize


def scratch(part: Sums, backward: bool = False) -> int:
    """What a kernel works in. Those for GPUs are taken to work in registers and shared memory."""
    heads, keys = part.heads, part.keys
    if heads.kernel == "flash_cpu":
        most = next(at_once for least, at_once in FLASH_QUERIES if part.queries >= least)
        rows, keys = min(part.queries, most), min(keys, FLASH_KEYS)
        scores = rows * keys * (heads.wide + heads.itemsize * part.narrow)
        return part.out + 2 * scores if backward else scores + rows * (heads.value_dim + 2) * heads.wide
    if heads.kernel == "math":
        scores = (
            min(part.queries * keys * heads.batch * heads.q_heads, max(limits_of(heads.device).scores, keys))
            * heads.wide
        )
        copies = part.wide_dkv * part.narrow
        return copies + (4 if backward else 2) * scores
    return 0
