"""What pages draw of a report, as data: masks in blocks, strategies that were compared, the cost of each module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MaskPicture:
    """A mask in blocks, queries down and keys across; a text has one row of blocks, a character one block.

    seen   of the block: "." nothing, "/" some, "#" all, "?" as tensors decide
    ranks  which rank computes it, as a digit to base 36; "*": all ranks, each for some heads; "." none. () where that
           is not known
    steps  in which step of the exchange, likewise
    """

    seen: tuple[str, ...]
    ranks: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What one strategy is predicted to cost a rank: seconds and bytes sent, of both directions in training; bytes that
    it holds at most, and whether these are allowed."""

    strategy: str
    seconds: float
    bytes: int
    held: int
    fits: bool


@dataclass(frozen=True)
class ModuleFigures:
    """What the operators of one module cost this rank in one forward, modules within it aside.

    flops, whole  of products: of all, and of those that every rank does whole
    sent, held    bytes that go to other ranks, and of the values that it makes
    gathered      bytes of values that were needed whole
    seconds       predicted, of both directions in training; 0 where no rates are known
    """

    module: str
    nodes: int
    flops: int = 0
    whole: int = 0
    sent: int = 0
    held: int = 0
    gathered: int = 0
    seconds: float = 0.0
