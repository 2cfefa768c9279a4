"""Dropout of attention weights whose mask is a function of the place, not of the order in which numbers are drawn.

Weight (b, h, q, k) is kept iff a hash of (seed, b, h, q, k) says so: all global, h over query heads. So the mask is the
same whatever the number of ranks, the layout, the strategy and the cutting into tiles are, and the backward makes it
anew (counter-based, as Philox in Salmon et al. 2011; the mixing is that of SplitMix64, Steele et al. 2014).

Only int64 operations, which wrap alike in eager code and in compiled code. But a place is never multiplied: compiled
code would have its products in the arithmetic of loop variables, where C++ takes overflow for impossible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The constants of SplitMix64 and the increment of its counter, as signed numbers.
FIRST, SECOND, ROWS = (number - 2**64 for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))
KEYS = 0x5851F42D4C957F2D  # another increment: the numbers of keys are not those of rows


Rows = range | Tensor  # their numbers
Places = int | Rows  # how many from 0, which may be open, or their numbers


@dataclass(frozen=True)
class Dropout:
    """Weights are zeroed with probability `p`, the others divided by 1 - p. `seed`: int64, no dims."""

    p: float
    seed: Tensor

    @property
    def least(self) -> int:
        """Weights are kept from this number of their place on: of the signed ones, a share of p lies below."""
        return int(self.p * 2**64) - 2**63

    @property
    def keep(self) -> float:
        """What the others are multiplied with."""
        return 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0

    def factor(self, b: Places, h: Places, q_rows: Rows, kv_rows: Rows, dtype: torch.dtype) -> Tensor:
        """[b, h, queries, keys]: what weights are multiplied with, 0 or 1 / (1 - p). Rows are global, `b` and `h` how
        many rows of the batch and heads there are, or their numbers."""
        return self.kept(b, h, q_rows, kv_rows).to(dtype) * self.keep

    def kept(self, b: Places, h: Places, q_rows: Rows, kv_rows: Rows) -> Tensor:
        """[b, h, queries, keys], bool."""
        device, rows = self.seed.device, mixed(self.seed + ROWS)
        batch, heads = (counted(each, device) for each in (b, h))
        for dim, places in enumerate((batch, heads, counted(q_rows, device))):
            rows = mixed(rows ^ places.view([-1 if i == dim else 1 for i in range(4)]))
        keys = mixed(mixed(self.seed + KEYS) ^ counted(kv_rows, device))
        if self.least >= 2**63:
            return torch.zeros((), dtype=torch.bool, device=device).expand(*rows.shape[:3], keys.shape[0])
        return scrambled(rows ^ keys) >= self.least


def counted(places: Places, device: torch.device) -> Tensor:
    """int64 indices on `device`: of a tensor itself, of a range, or of the first `places` numbers."""
    if isinstance(places, Tensor):
        return places
    if isinstance(places, range):
        return torch.arange(places.start, places.stop, places.step, device=device)
    return torch.arange(places, device=device)


def mixed(x: Tensor) -> Tensor:
    """A bijection of the 64-bit numbers: each bit of `x` changes each bit of the result half of the time."""
    x = scrambled(x)
    return x ^ shifted(x, 31)


def scrambled(x: Tensor) -> Tensor:
    """As `mixed`, good in the upper bits only."""
    x = (x ^ shifted(x, 30)) * FIRST
    return (x ^ shifted(x, 27)) * SECOND


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic, and fills in ones."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
