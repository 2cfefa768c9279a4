"""Random numbers by position: a function of a seed and of the index of the element in the unsharded tensor.

    seeds(3, cpu)                                  one seed each for the three draws of a program, by its generator
    draw(seed, [rows, columns], [512, 1], ...)     the elements at rows x columns of a tensor [n, 512]

So whoever has some rows draws what the whole has there, whatever rank that is: a counter-based generator (Salmon et al.
2011, Parallel random numbers: as easy as 1, 2, 3). The hash is triple32 of Wellons' hash prospector, three rounds of
xor-shift and multiply with a bias near that of a random bijection, keyed by both halves of the seed: 32-bit lanes, of
which a CPU has twice as many as of 64 bits, and that a GPU multiplies in one instruction. Draws are pointwise, so a
compiler fuses them with what reads them, and computes them again in the backward where that is cheaper than to keep.

As in context_parallel/executor/dropout.py, products that wrap are of mixed numbers, never of places themselves:
compiled code would have them in the arithmetic of loop variables, where C++ takes overflow for impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.ops.attention import LIBRARY
from ringopt.ops.ring_misfits import agree_on_seeds
from ringopt.ops.tags import ON_HOST

# Of triple32: shifts and factors; the last shift has no factor. As signed numbers, as are the keys of the second word.
ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))
LAST = 14
WORDS = ((0, 0), (0x9E3779B9 - 2**32, 0x85EBCA6B - 2**32))
ABOVE = 0xC2B2AE35 - 2**32  # a factor for the upper half of a place; odd, so that no two halves share a key
BLOCK = 1 << 16  # elements that eager code draws at a time: what a cache holds, with what is made on the way


# ---- seeds -----------------------------------------------------------------------------------------------------------
@torch.library.custom_op("ringopt::seeds", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def seeds(count: int, device: torch.device) -> Tensor:
    """int64 [count], by the default generator of the device, in compiled code as in eager code."""
    return torch.randint(2**63 - 1, (count,), dtype=torch.int64, device=device)


@seeds.register_fake
def _(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


@torch.library.custom_op("ringopt::agreed_seeds", mutates_args=(), tags=ON_HOST)
def agreed_seeds(given: Tensor, group: str) -> Tensor:
    """The seeds, which all ranks have alike. Raises RingMismatchError on all of them where they do not."""
    mesh = mesh_of(group)
    return (agree_on_seeds(mesh, given) if mesh.size > 1 else given).clone()


@agreed_seeds.register_fake
def _(given: Tensor, group: str) -> Tensor:
    return torch.empty_like(given)


# ---- draws -----------------------------------------------------------------------------------------------------------
LIBRARY.define(
    "draw(Tensor seed, Tensor[] places, SymInt[] strides, SymInt count, str kind, float[] numbers, ScalarType dtype) "
    "-> Tensor",
    tags=(torch.Tag.pointwise,),
)


def draw(
    seed: Tensor,
    places: Sequence[Tensor],
    strides: Sequence[int],
    count: int,
    kind: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """Random numbers of a `kind` (KINDS), with the parameters `numbers` of their distribution.

    seed     int64, no dims: which stream
    places   int64, of one dim each and ones behind it: by dim, which places of the whole tensor the result has
    strides  of the dims of the whole tensor, row-major
    count    its elements
    """
    if any(place.numel() == 0 for place in places):
        return seed.new_empty([place.shape[0] for place in places], dtype=dtype)
    wide = isinstance(count, torch.SymInt) or count > 2**32
    if is_eager(seed) and seed.device.type == "cpu":
        return in_blocks(seed, places, strides, wide, kind, numbers, dtype)
    at = sum((place * stride for place, stride in zip(places, strides, strict=True)), torch.zeros_like(seed))
    return KINDS[kind](Bits(seed, at, wide), numbers, dtype)


LIBRARY.impl("draw", draw, "CompositeImplicitAutograd")


# `draw` as one call, which no tracer takes apart: for code that no compiler fuses.
drawn = torch.library.custom_op("ringopt::drawn", draw, mutates_args=())


@drawn.register_fake
def _(seed: Tensor, places: Sequence[Tensor], *given: Any) -> Tensor:
    return seed.new_empty([place.shape[0] for place in places], dtype=given[-1])


def is_eager(x: Tensor) -> bool:
    """Whether numbers are computed here and now."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def in_blocks(
    seed: Tensor,
    places: Sequence[Tensor],
    strides: Sequence[int],
    wide: bool,
    kind: str,
    numbers: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """The same, so that what is made on the way stays in the cache. Places that need 32 bits are added up as such:
    they are half as large."""
    at = [place * stride for place, stride in zip(places, strides, strict=True)] or [seed.new_zeros(1)]
    held = torch.int64 if wide else torch.int32
    first, last = sum(at[:-1], seed.new_zeros(1)).reshape(-1, 1).to(held), at[-1].reshape(-1).to(held)
    made = torch.empty(len(first), len(last), dtype=dtype)
    columns = min(len(last), BLOCK)
    rows = BLOCK // columns
    for row in range(0, len(first), rows):
        for column in range(0, len(last), columns):
            block = first[row : row + rows] + last[column : column + columns]
            value = KINDS[kind](Bits(seed, block, wide), numbers, dtype)
            made[row : row + rows, column : column + columns] = value
    return made.view([place.shape[0] for place in places])


class Bits:
    """The random bits at places `at` of the stream `seed`; `wide` where places need more than 32 bits."""

    def __init__(self, seed: Tensor, at: Tensor, wide: bool):
        self.low, self.high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
        self.at, self.above = at.to(torch.int32), (at >> 32).to(torch.int32) * ABOVE if wide else None

    def word(self, number: int) -> Tensor:
        """32 of them, as int32."""
        low, high = WORDS[number]
        key = self.high ^ high if self.above is None else (self.high ^ high) ^ self.above
        (first, one), (second, two), (third, three) = ROUNDS
        x = self.at ^ (self.low ^ low)  # a new tensor, written to where that spares eager code another
        x.bitwise_xor_(shifted(x, first)).mul_(one)
        x.bitwise_xor_(shifted(x, second)).bitwise_xor_(key).mul_(two)
        x.bitwise_xor_(shifted(x, third)).mul_(three)
        return x.bitwise_xor_(shifted(x, LAST))

    def upper(self, count: int, number: int = 0) -> Tensor:
        """The upper `count` bits of a word, from 0."""
        return shifted(self.word(number), 32 - count)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic, and fills in ones."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


# ---- distributions ---------------------------------------------------------------------------------------------------
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def wider(dtype: torch.dtype) -> torch.dtype:
    """What is computed in, of results of a dtype."""
    return torch.float64 if dtype in (torch.float64, torch.int64) else torch.float32


def unit(bits: Bits, dtype: torch.dtype) -> Tensor:
    """From 0 to 1, without 1: each number as likely, of all that have as many digits behind the point as the dtype."""
    digits = DIGITS[dtype]
    if digits <= 32:
        return bits.upper(digits).to(dtype) * 2.0**-digits
    return (bits.upper(27).to(dtype) * 2.0**26 + bits.upper(26, 1).to(dtype)) * 2.0**-53


def inside(bits: Bits, dtype: torch.dtype, word: int = 0) -> Tensor:
    """From 0 to 1, without both: halfway between numbers of one digit less. In float64 both words are read."""
    if dtype == torch.float32:
        return (bits.upper(23, word).to(dtype) + 0.5) * 2.0**-23
    return (bits.upper(26, word).to(dtype) * 2.0**26 + bits.upper(26, 1 - word).to(dtype) + 0.5) * 2.0**-52


def kept(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """False with probability `numbers[0]`; else what follows there, if anything does."""
    least = round(numbers[0] * 2**32) - 2**31  # of the signed numbers, such a share lies below
    word = bits.word(0)
    found = torch.zeros_like(word, dtype=dtype) if least >= 2**31 else at_least(word, least, dtype)
    return found.mul_(numbers[1]) if len(numbers) > 1 else found


def at_least(word: Tensor, least: int, dtype: torch.dtype) -> Tensor:
    """(word >= least).to(dtype), which eager code writes at once: to turn bool into numbers takes as long as to draw
    them."""
    if is_eager(word):
        return torch.ge(word, least, out=torch.empty_like(word, dtype=dtype))
    return (word >= least).to(dtype)


def uniform(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """From `numbers[0]` to `numbers[1]`."""
    first, last = numbers
    if (first, last) == (0.0, 1.0):
        return unit(bits, dtype)
    return (unit(bits, wider(dtype)) * (last - first) + first).to(dtype)


def gauss(bits: Bits, dtype: torch.dtype) -> Tensor:
    """Box and Muller's: the radius by one word, the angle by the other."""
    radius, angle = bits.upper(32 - 1, 0).to(dtype), bits.upper(32 - 1, 1).to(dtype)
    return torch.sqrt(torch.log((radius + 0.5) * 2.0**-31) * -2.0) * torch.cos(angle * (2 * math.pi * 2.0**-31))


def normal(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Of mean `numbers[0]` and standard deviation `numbers[1]`."""
    mean, deviation = numbers
    found = gauss(bits, wider(dtype))
    return (found if (mean, deviation) == (0.0, 1.0) else found * deviation + mean).to(dtype)


def log_normal(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Numbers whose logarithm is normal."""
    mean, deviation = numbers
    return torch.exp(gauss(bits, wider(dtype)) * deviation + mean).to(dtype)


def cauchy(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Of median `numbers[0]` and half width at half maximum `numbers[1]`."""
    median, width = numbers
    return (torch.tan((inside(bits, wider(dtype)) - 0.5) * math.pi) * width + median).to(dtype)


def exponential(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Of rate `numbers[0]`."""
    return (torch.log(inside(bits, wider(dtype))) * (-1.0 / numbers[0])).to(dtype)


def geometric(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """How many trials until one succeeds, each with probability `numbers[0]`."""
    return torch.ceil(torch.log(inside(bits, wider(dtype))) * (1.0 / math.log1p(-numbers[0]))).to(dtype)


def whole(bits: Bits, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """62 bits, from 0."""
    return ((bits.upper(31).to(torch.int64) << 31) | bits.upper(31, 1).to(torch.int64)).to(dtype)


KINDS: dict[str, Callable[[Bits, Sequence[float], torch.dtype], Tensor]] = {
    "kept": kept, "uniform": uniform, "normal": normal, "log_normal": log_normal, "cauchy": cauchy,
    "exponential": exponential, "geometric": geometric, "whole": whole,
}  # fmt: skip
