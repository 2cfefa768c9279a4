"""Inputs that many models share: a batch of two, seeded."""

from __future__ import annotations

import math

import torch

BATCH = 2


def normal(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def ids(length: int, batch: int = BATCH) -> torch.Tensor:
    """Token ids; small numbers are special tokens in many vocabularies."""
    return torch.randint(5, 100, (batch, length), generator=torch.Generator().manual_seed(0))


def right_padded(length: int) -> torch.Tensor:
    """1 where there is a token: the last quarter of the second sequence is padding."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, length - max(1, length // 4) :] = 0
    return mask


def square(length: int, patch: int = 8) -> int:
    """The side of an image of at most `length` square patches, at least two by two."""
    return patch * max(2, math.isqrt(length))


def pixels(side: int, channels: int = 3) -> torch.Tensor:
    return normal(BATCH, channels, side, side)
