"""The word of a tensor: its bytes in the order of its elements, all of them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.distributed import consistency
from ringopt.distributed.tensor_digest import MODULUS, ROW, STEP, factors, of_rows, signed, word_of
from ringopt.errors import RingMismatchError
from ringopt.tools.benchmarks.lab.fake_cuda import LaunchCounter, fake_cuda, missing
from tests.harness.threads import ThreadMesh, run_on_threads

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


def word(x: Tensor) -> int:
    return int(word_of(x))


def drawn(dtype: torch.dtype, count: int) -> Tensor:
    data = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype)


def by_hand(x: Tensor) -> int:
    data = bytes(x.contiguous().view(-1).view(torch.uint8).tolist())
    split = len(data) // 4 * 4
    numbers = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, split, 4)]
    rows = [numbers[i : i + ROW] for i in range(0, len(numbers), ROW)] + [list(data[split:])]
    table, total = factors(torch.device("cpu")).tolist(), 0
    for row in filter(None, rows):
        total = total * STEP + sum(a * b for a, b in zip(row, table, strict=False))
    return signed(total % MODULUS)


@pytest.mark.parametrize("count", [1, 3, 1000, ROW, 2 * ROW + 777])
def test_it_is_what_it_says(count: int) -> None:
    x = torch.randint(0, 255, (4 * count + 3,), dtype=torch.uint8)
    assert word(x) == by_hand(x)
    assert bool((factors(torch.device("cpu")) % 2 == 1).all()) and STEP % 2 == 1


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_device_takes_more_rows_at_a_time_and_comes_to_the_same(rows: int) -> None:
    x = torch.randint(-9, 9, (5, ROW), dtype=torch.int32)
    assert int(of_rows(x, rows)) == by_hand(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_of_every_dtype_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = drawn(dtype, 37)
    found = {word(x)}
    for place in range(37):
        other = x.clone()
        other.view(torch.uint8)[place * dtype.itemsize] ^= 1
        found.add(word(other))
    assert len(found) == 38
    assert word(x) == word(x.clone())


def test_bytes_decide() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    assert word(zero) != word(-zero) and word(nan) == word(nan.clone())
    x = torch.arange(12.0)
    assert word(x) != word(x.flip(0)) and word(x[:11]) != word(x)
    signs = [x.clone() for _ in range(2)]
    signs[0][[2, 5]] *= -1  # of two elements the highest bits: multipliers of few bits would cancel them
    signs[1][[3, 5]] *= -1
    assert len({word(x), *map(word, signs)}) == 3


def lazily_changed() -> list[tuple[Tensor, Tensor]]:
    z = torch.randn(3, 4, dtype=torch.complex64)
    x = torch.randint(0, 2, (5, 7), dtype=torch.bool)
    return [
        (z.conj(), z.conj().resolve_conj()),
        (z.conj().imag, z.conj().imag.resolve_neg().clone()),
        (x.t(), x.t().contiguous()),
        (x.view(-1)[1:30], x.view(-1)[1:30].clone()),
        (x[:, :1].expand(5, 7), x[:, :1].expand(5, 7).contiguous()),
        (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),) * 2,
        (torch.ones(0, 3), torch.ones(0, 3)),
        (torch.tensor(2.5), torch.tensor(2.5)),
        (torch.arange(9.0)[::9], torch.tensor([0.0])),  # one element, whose stride torch keeps
        (torch.ones(3, requires_grad=True), torch.ones(3)),
    ]


def test_memory_does_not_count() -> None:
    for x, same in lazily_changed():
        assert word(x) == word(same)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes(mode: Any) -> None:
    with mode():
        inside = word(torch.ones(5))
    assert inside == word(torch.ones(5))


def test_it_takes_little_memory() -> None:
    x = torch.zeros(64 * ROW, dtype=torch.int32)
    factors(x.device)
    with torch.profiler.profile(profile_memory=True) as profile:
        word_of(x)
    held, most = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most <= 4 * 8 * ROW, most


@pytest.mark.skipif(bool(missing()), reason=missing() or "there is a compiler")
def test_inputs_on_a_device_are_hashed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GB of parameters take seconds to come to the host, and as long again to be hashed there."""
    monkeypatch.setattr(consistency, "bytes_of", lambda value: repr(value).encode() if value == 3 else pytest.fail())
    with fake_cuda():
        given = [torch.zeros(1 << 20, device="cuda"), 3, torch.zeros(5, 7, dtype=torch.bfloat16, device="cuda")]
        with LaunchCounter() as watched:
            found = consistency.digests_of(given, torch.device("cuda"))
    assert found.shape == (3, consistency.WORDS) and found.is_cuda and not watched.reads


def test_ranks_compare_what_is_hashed_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "is_away", lambda value: isinstance(value, Tensor))

    def compared(mesh: ThreadMesh, odd: bool) -> str:
        weight = torch.ones(300, 300)
        weight[17, 4] += odd * mesh.rank
        try:
            consistency.compare_ranks(mesh, [1], ["x", "weight", "scale"], [torch.zeros(0), weight, 0.5])
        except RingMismatchError as error:
            return str(error)
        return ""

    assert run_on_threads(2, lambda mesh: compared(mesh, False)) == ["", ""]
    for sentence in run_on_threads(2, lambda mesh: compared(mesh, True)):
        assert "inputs differ from those of rank 0: weight on ranks [1]" in sentence
