"""Whether sums are made in one launch: Triton is tried once, and believed only where both of its sums are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ringopt.kernels import fused
from ringopt.torch_compat.fake_tensors import FakeTensorMode

CPU = torch.device("cpu")


def merge(out: Tensor, lse: Tensor, sums: list, parts: list[Tensor], lses: list[Tensor], firsts: list[int]) -> None:
    """Of one part, which is then the whole."""
    out.copy_(parts[0])


def add(totals: list[Tensor], parts: list[Tensor]) -> None:
    totals[0] += parts[0]


def nothing(*args: object) -> None:
    """A kernel that is launched and writes nothing."""


def broken(*args: object) -> None:
    raise RuntimeError("no compiler")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., bool]]:
    """What `has_triton` says of two kernels that stand in for Triton's."""

    def found(merging: Callable[..., None], adding: Callable[..., None]) -> bool:
        operators = SimpleNamespace(merge_parts_=merging, add_parts_=adding)
        monkeypatch.setattr(torch.ops, "ringopt_kernels", operators)
        fused.has_triton.cache_clear()
        return fused.has_triton(CPU)

    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    yield found
    fused.has_triton.cache_clear()


def test_kernels_that_are_right_are_used(tried: Callable[..., bool]) -> None:
    """Ones are merged into nothing, and added to themselves."""
    assert tried(merge, add)


@pytest.mark.parametrize(
    ("merging", "adding", "why"),
    [
        (nothing, add, "its sums are wrong"),
        (merge, nothing, "its sums are wrong"),
        (broken, add, "RuntimeError: no compiler"),
        (merge, broken, "RuntimeError: no compiler"),
    ],
)
def test_a_kernel_that_fails_is_named_and_not_used(
    tried: Callable[..., bool], merging: Callable[..., None], adding: Callable[..., None], why: str
) -> None:
    with pytest.warns(UserWarning, match=f"Triton does not work on cpu, so attention merges in more launches: {why}"):
        assert not tried(merging, adding)


def test_nothing_is_tried_where_triton_is_not_installed(
    tried: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not tried(broken, broken)  # without a warning


@pytest.mark.parametrize(
    ("device", "dtype", "size", "sums"),
    [
        ("cuda", torch.float32, 4, True),
        ("cuda", torch.bfloat16, 4, True),
        ("cuda", torch.float64, 4, False),
        ("cuda", torch.float32, 0, False),
        ("cpu", torch.float32, 4, False),
    ],
)
def test_sums_of_numbers_in_at_most_32_bits_on_a_gpu_are_made_in_one_launch(
    device: str, dtype: torch.dtype, size: int, sums: bool
) -> None:
    """Of tensors without numbers nothing is tried."""
    with FakeTensorMode():
        assert fused.usable(torch.empty(size, dtype=dtype, device=device)) == sums
