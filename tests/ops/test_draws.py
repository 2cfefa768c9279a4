"""Random numbers by position: like chance, the same wherever they are drawn from, and in compiled code too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.distributed.consistency import RingMismatchError
from ringopt.ops import operators, ring_misfits
from ringopt.ops.draws import DIGITS, KINDS, at_least, inside
from tests.harness.threads import run_on_threads

SEED, OTHER = torch.tensor([4728736676111368444, 1313131313131313131])
MILLION = (100, 100, 100)


def strides_of(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def draw(
    kind: str,
    *numbers: float,
    sizes: Sequence[int] = MILLION,
    seed: Tensor = SEED,
    dtype: torch.dtype = torch.float32,
    part: Sequence[slice] = (),
    count: int = 0,
) -> Tensor:
    """All of a tensor, or `part` of it."""
    part = part or [slice(None)] * len(sizes)
    rows = [torch.arange(size)[cut] for size, cut in zip(sizes, part, strict=True)]
    places = [each.view(-1, *(1,) * (len(sizes) - 1 - dim)) for dim, each in enumerate(rows)]
    count = count or math.prod(sizes)
    found: Tensor = operators.draw(seed, places, strides_of(sizes), count, kind, list(numbers), dtype)
    return found


# ---- like chance -----------------------------------------------------------------------------------------------------
def near(found: float, expected: float, deviation: float, count: int) -> bool:
    return abs(found - expected) < 4.5 * deviation / math.sqrt(count)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_a_share_of_p_is_dropped(p: float) -> None:
    kept = draw("kept", p, dtype=torch.bool)
    assert near(float(kept.double().mean()), 1 - p, math.sqrt(p * (1 - p)), kept.numel())
    assert draw("kept", 0.0, dtype=torch.bool).all() and not draw("kept", 1.0, dtype=torch.bool).any()
    assert torch.equal(draw("kept", p, 1.7), kept * 1.7), "what is kept is multiplied"


def test_a_number_at_the_edge_is_kept_in_compiled_code_as_well() -> None:
    """One in 2^32 lies there: no test of many draws would see it, and ranks of two kinds would differ."""
    words = torch.tensor([-8, -7, -6], dtype=torch.int32)
    eager = partial(at_least, least=-7, dtype=torch.float32)
    traced = make_fx(eager, tracing_mode="fake")(words)
    assert eager(words).tolist() == traced(words).tolist() == [0, 1, 1]


class Ends:
    """Bits that are all 0, or all 1."""

    def __init__(self, bit: int) -> None:
        self.bit = bit

    def upper(self, digits: int, word: int = 0) -> Tensor:
        return torch.tensor(self.bit * (2**digits - 1))


@pytest.mark.parametrize("dtype, digits", [(torch.float32, 24), (torch.float64, 53)])
def test_numbers_whose_logarithm_is_taken_are_never_0_or_1(dtype: torch.dtype, digits: int) -> None:
    """By the same distance at both ends, of which no test of many draws would see anything."""
    low, high = (inside(Ends(bit), dtype).item() for bit in (0, 1))
    assert (low, 1 - high) == (2.0**-digits, 2.0**-digits)




def test_numbers_are_evenly_spread() -> None:
    """Chi-square over 1000 bins, and the distance of Kolmogorov and Smirnov."""
    x = draw("uniform", 0, 1, dtype=torch.float64).flatten()
    n = len(x)
    assert float(x.min()) >= 0 and float(x.max()) < 1
    counts = torch.histc(x, 1000, 0, 1)
    chi = float(((counts - n / 1000) ** 2).sum() / (n / 1000))
    assert abs(chi - 999) < 4.5 * math.sqrt(2 * 999)
    at = torch.arange(n, dtype=torch.float64)
    x = x.sort().values
    assert float(torch.maximum((x - at / n).abs(), (x - (at + 1) / n).abs()).max()) < 2 / math.sqrt(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    x = draw("normal", 0, 1, dtype=dtype).double().flatten()
    n = len(x)
    for power, (expected, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert near(float((x**power).mean()), expected, math.sqrt(variance), n)
    x = (x.sort().values / math.sqrt(2)).erf() / 2 + 0.5
    assert float((x - torch.arange(n, dtype=torch.float64) / n).abs().max()) < 2 / math.sqrt(n)


MOMENTS = {  # mean and variance
    "uniform": ((2.0, 5.0), 3.5, 9 / 12),
    "normal": ((1.0, 2.0), 1.0, 4.0),
    "log_normal": ((0.0, 0.5), math.exp(0.125), math.exp(0.25) * (math.exp(0.25) - 1)),
    "exponential": ((2.0,), 0.5, 0.25),
    "geometric": ((0.25,), 4.0, 0.75 / 0.0625),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance(name: str, dtype: torch.dtype) -> None:
    numbers, mean, variance = MOMENTS[name]
    x = draw(name, *numbers, dtype=dtype).double()
    assert near(float(x.mean()), mean, math.sqrt(variance), x.numel())
    assert abs(float(x.var()) / variance - 1) < 0.02


def test_the_median_of_cauchy() -> None:
    x = draw("cauchy", 3.0, 2.0, dtype=torch.float64)
    assert near(float((x < 3).double().mean()), 0.5, 0.5, x.numel())
    assert near(float((x < 5).double().mean()), 0.75, 0.44, x.numel())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_of_16_bits_one_is_not_reached(dtype: torch.dtype) -> None:
    x = draw("uniform", 0, 1, dtype=dtype)
    assert x.dtype == dtype and float(x.max()) < 1
    assert len(x.unique()) == 2 ** DIGITS[dtype]


def test_neighbours_and_streams_know_nothing_of_each_other() -> None:
    """Along each dim, and between seeds: some of a generator, and such as differ in a bit. (In one of the lowest bits,
    streams have the same numbers at other places, in one of the highest similar ones: of two seeds that all others of
    63 bits are as likely for, that is never seen.)"""
    x = draw("uniform", 0, 1, dtype=torch.float64) - 0.5
    n = x.numel()
    for dim in range(3):
        for step in (1, 2, 4, 32):
            both = x.narrow(dim, 0, 100 - step) * x.narrow(dim, step, 100 - step)
            assert near(float(both.mean()), 0, 1 / 12, both.numel()), (dim, step)
    drawn = torch.randint(2**63 - 1, (12,), generator=torch.Generator().manual_seed(1))
    for seed in (*drawn, *(SEED ^ (1 << bit) for bit in (20, 31, 32, 40, 50))):
        y = draw("uniform", 0, 1, seed=seed, dtype=torch.float64) - 0.5
        assert near(float((x * y).mean()), 0, 1 / 12, n), int(seed)
        assert near(float((x * y.roll(1, 2)).mean()), 0, 1 / 12, n), int(seed)
    sums = x.sum(2), x.sum(1), x.sum(0)
    assert all(abs(float(each.var()) / (100 / 12) - 1) < 4.5 * math.sqrt(2 / each.numel()) for each in sums)
    spectrum = torch.fft.fft2(x[0]).abs() / math.sqrt(100 * 100 / 12)
    assert float(spectrum.max()) < 5  # no period in either direction


def test_whole_numbers_have_62_random_bits() -> None:
    x = draw("whole", dtype=torch.int64)
    shares = torch.stack([((x >> bit) & 1).double().mean() for bit in range(62)])
    assert float(x.min()) >= 0 and not int((x >> 62).max())
    assert float((shares - 0.5).abs().max()) < 4.5 * 0.5 / 1000
    assert near(float(((x >> 31) % 2 == x % 2).double().mean()), 0.5, 0.5, x.numel())


# ---- the same --------------------------------------------------------------------------------------------------------
def numbers_of(kind: str) -> tuple[float, ...]:
    return {"kept": (0.3,), "exponential": (1.0,), "geometric": (0.3,), "whole": ()}.get(kind, (0.5, 2.0))


def dtype_of(kind: str) -> torch.dtype:
    return {"kept": torch.bool, "whole": torch.int64}.get(kind, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_that_part_of_the_whole(kind: str) -> None:
    """Also of rows that are not in order, and of more elements than eager code draws at a time."""
    numbers, dtype, sizes = numbers_of(kind), dtype_of(kind), (3, 80, 301)
    whole = draw(kind, *numbers, sizes=sizes, dtype=dtype)
    for part in ((slice(1, 2), slice(5, 50), slice(None)), (slice(None), slice(1, 70, 3), slice(7, 8))):
        found = draw(kind, *numbers, sizes=sizes, dtype=dtype, part=part)
        torch.testing.assert_close(found, whole[part], rtol=1e-14, atol=1e-14)


def test_compiled_code_draws_the_same() -> None:
    """At a size where C++ may reason about its loops, and that no vector divides."""
    torch._dynamo.reset()

    def program(seed: Tensor) -> list[Tensor]:
        return [draw(kind, *numbers_of(kind), sizes=(7, 133), seed=seed, dtype=dtype_of(kind)) for kind in KINDS]

    compiled = torch.compile(program, fullgraph=True)
    for seed in (SEED, OTHER):
        for kind, found, expected in zip(KINDS, compiled(seed), program(seed), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=kind)


def test_the_hash_is_that_of_32_bit_arithmetic() -> None:
    """triple32 in Python's unbounded integers: shifts are logical, products wrap. Places above 32 bits have a key."""
    most = 2**32 - 1

    def word(seed: int, at: int) -> int:
        key = (seed >> 32) ^ ((at >> 32) * 0xC2B2AE35 & most)
        x = (at & most) ^ (seed & most)
        x = (x ^ x >> 17) * 0xED5AD4BB & most
        x = (x ^ x >> 11 ^ key) * 0xAC4C1B51 & most
        x = (x ^ x >> 15) * 0x31848BAB & most
        return x ^ x >> 14

    seed = int(SEED)
    sizes = (3, 2**33)
    found = draw("uniform", 0, 1, sizes=(4, 9))
    places = [torch.arange(3).view(-1, 1), torch.arange(2**32 - 2, 2**32 + 3)]
    far = operators.draw(SEED, places, [sizes[1], 1], 3 * sizes[1], "uniform", [0.0, 1.0], torch.float32)
    columns = torch.arange(2**31 - 2, 2**31 + 3)  # that 32 bits hold, without a sign
    half = operators.draw(SEED, [columns], [1], 2**32, "uniform", [0.0, 1.0], torch.float32)
    for column, number in zip(columns.tolist(), half.tolist(), strict=True):
        assert number == (word(seed, column) >> 8) / 2**24
    for row in range(3):
        for column in range(5):
            assert float(found[row, column]) == (word(seed, 9 * row + column) >> 8) / 2**24
            assert float(far[row, column]) == (word(seed, sizes[1] * row + 2**32 - 2 + column) >> 8) / 2**24


def test_where_places_are_few_their_upper_half_changes_nothing() -> None:
    sizes = (5, 7)
    assert torch.equal(draw("uniform", 0, 1, sizes=sizes), draw("uniform", 0, 1, sizes=sizes, count=2**40))
    assert draw("uniform", 0, 1, sizes=()).shape == () and draw("uniform", 0, 1, sizes=(3, 0)).shape == (3, 0)


# ---- seeds -----------------------------------------------------------------------------------------------------------
def test_seeds_follow_from_the_generator() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(3)
    first, second = operators.seeds(4, cpu), operators.seeds(4, cpu)
    torch.manual_seed(3)
    assert torch.equal(operators.seeds(4, cpu), first) and len({*first.tolist(), *second.tolist()}) == 8
    torch.manual_seed(3)
    assert torch.equal(torch.compile(lambda: operators.seeds(4, cpu) + 0)(), first), "also in compiled code"


def test_seeds_that_differ_are_told_on_every_rank() -> None:
    def body(mesh: object) -> str:
        try:
            operators.agreed_seeds(torch.tensor([3, mesh.rank]), mesh.name)  # type: ignore[attr-defined]
        except RingMismatchError as error:
            return str(error)
        return ""

    told = run_on_threads(2, body)
    assert told[0] == told[1] and "the ranks draw random numbers by seeds [0, 1]" in told[0]


def test_on_a_device_seeds_are_compared_later_and_drawn_by_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks draw by those of rank 0; that they differ is told before gradients of the draws, or other seeds."""
    monkeypatch.setattr(ring_misfits, "is_host", lambda device: False)

    def body(mesh: Any) -> list[str]:
        told, mine = [], torch.tensor([3, mesh.rank])
        alike = operators.agreed_seeds(torch.tensor([4, 5]), mesh.name)
        assert alike.tolist() == [4, 5] and mesh.seeds_arriving is not None
        for then in (lambda: ring_misfits.settle_seeds(mesh), lambda: operators.agreed_seeds(alike, mesh.name)):
            assert operators.agreed_seeds(mine, mesh.name).tolist() == [3, 0]
            with pytest.raises(RingMismatchError) as raised:
                then()
            told.append(str(raised.value))
        assert mesh.seeds_arriving is None
        return told

    told = run_on_threads(2, body)
    assert told[0] == told[1] and all("by seeds [0, 1]" in each for each in told[0])


def test_each_rank_drops_elements_of_its_own() -> None:
    def body(mesh: Any) -> Tensor:
        x = torch.ones(3, 4000)
        out, kept = operators.dropout(x, torch.tensor(2**31 - 2), 0.25, mesh.name)
        again, _ = operators.dropout(x, torch.tensor(2**31 - 2), 0.25, mesh.name)
        assert torch.equal(out, again) and torch.equal(out, kept / 0.75) and abs(kept.float().mean() - 0.75) < 0.02
        assert not operators.dropout(x, torch.tensor(1), 1.0, mesh.name)[0].any()
        return kept

    first, second = run_on_threads(2, body)
    assert abs((first == second).float().mean() - (0.75**2 + 0.25**2)) < 0.02
