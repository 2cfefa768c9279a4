"""A word of 64 bits for the bytes of a tensor, computed where it lies, in a few operators and little memory.

The bytes, in the order of the elements whatever the strides, are numbers of 32 bits. Each is multiplied by an odd
number of its place, and all are summed modulo 2^64. So a change of one number always changes the word; two tensors
that differ in several have the same word by chance alone, once in 2^32 at most. What counts are bytes: -0.0 is not 0.0,
and a NaN is equal to itself.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MODULUS = 2**64
STEP = 0x9E3779B97F4A7C15  # odd; a row of numbers counts as many times its power as rows follow it
ROW = 1 << 16  # numbers: 256 KiB, which a cache holds beside its products
ROWS_ON_DEVICE = 64  # at a time, for a device would wait for the host between shorter ones


@torch.no_grad()
def word_of(x: Tensor) -> Tensor:
    """One int64 on the device of `x`."""
    data = bytes_in_order(x)
    split = len(data) // 4 * 4
    numbers, rest = aligned_numbers(data[:split]), data[split:]
    split = len(numbers) // ROW * ROW
    total = of_rows(numbers[:split].view(-1, ROW), 1 if x.device.type == "cpu" else ROWS_ON_DEVICE)
    for tail in (numbers[split:], rest):
        if len(tail):
            total = total * signed(STEP) + (tail * factors(x.device)[: len(tail)]).sum()
    return total


def of_rows(rows: Tensor, at_a_time: int) -> Tensor:
    """The word of int32 [count, ROW], so many rows in one operator."""
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for part in rows.split(at_a_time) if len(rows) else ():
        sums, count = (part * factors(rows.device)).sum(1), len(part)
        total = total * signed(STEP**count) + (sums * powers(rows.device)[-count:]).sum()
    return total


def bytes_in_order(x: Tensor) -> Tensor:
    """uint8 [bytes], in the order of the elements; in the memory of `x` where it is contiguous."""
    whole = x.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def aligned_numbers(data: Tensor) -> Tensor:
    """As numbers of 32 bits; a copy where a view of a byte in the midst of one gives none."""
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


@cache
def factors(device: torch.device) -> Tensor:
    """Odd numbers at random, the same in every process."""
    source = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (ROW,), dtype=torch.int64, generator=source, device="cpu")
    return (drawn * 2 + 1).to(device)


@cache
def powers(device: torch.device) -> Tensor:
    """Of STEP, the last of which is 1."""
    found = [signed(STEP**i) for i in reversed(range(ROWS_ON_DEVICE))]
    return torch.tensor(found, dtype=torch.int64, device=device)


def signed(number: int) -> int:
    """The int64 that has the lowest 64 bits of `number`."""
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2
