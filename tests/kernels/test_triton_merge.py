"""Sums over tiles in Triton: its interpreter against the sums that PyTorch makes, and compiled for a GPU that is not
here."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor.merge_lse import merge_
from ringopt.kernels import fused
from ringopt.kernels.base import HIDDEN

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The kernels as Triton's interpreter runs them, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module = fresh()
    return module


def fresh() -> ModuleType:
    """The module anew: Triton decides when it decorates a function who runs it."""
    spec = importlib.util.find_spec("ringopt.kernels.triton_merge")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def softmaxes(rows: int, dim: int, dtype: torch.dtype, seed: int, tokens_first: bool = True) -> tuple[Tensor, Tensor]:
    """Of 2 x 3 heads. Some rows see nothing; what is told of these is not to be read."""
    made = torch.Generator().manual_seed(seed)
    shape = (2, rows, 3, dim) if tokens_first else (2, 3, rows, dim)
    out = torch.randn(shape, generator=made).to(dtype)
    out = out.transpose(1, 2) if tokens_first else out
    lse = torch.randn(2, 3, rows, generator=made) * 5
    lse[0, 0, : rows // 3], lse[1, 2, seed % 3 :: 3] = HIDDEN, HIDDEN
    return out.masked_fill((lse == HIDDEN).unsqueeze(-1), 0.0), lse


def merged_one_by_one(rows: int, dim: int, parts: list[tuple[int, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros(2, 3, rows, dim), torch.full((2, 3, rows), HIDDEN)
    for first, some, its in parts:
        place = slice(first, first + some.shape[2])
        merge_(out[:, :, place], lse[:, :, place], some, its)
    return out, lse


@pytest.mark.parametrize(
    ("number", "dtype", "dim"), [(1, torch.float32, 16), (2, torch.float16, 40), (4, torch.bfloat16, 128)]
)
def test_parts_are_merged_at_once(interpreted: ModuleType, number: int, dtype: torch.dtype, dim: int) -> None:
    rows, places = 70, ((0, 70), (35, 35), (3, 20), (35, 35))[:number]
    parts = [(first, *softmaxes(size, dim, dtype, i, tokens_first=i != 1)) for i, (first, size) in enumerate(places)]
    expected, expected_lse = merged_one_by_one(rows, dim, parts)
    garbage = [(some.masked_fill((its == HIDDEN).unsqueeze(-1), torch.nan), its) for _, some, its in parts]
    for narrow in (torch.float32, dtype):
        out, lse = torch.full((2, 3, rows, dim), torch.nan, dtype=narrow), torch.full((2, 3, rows), torch.nan)
        interpreted.merge(out, lse, (), *zip(*garbage, strict=True), [first for first, *_ in parts])
        torch.testing.assert_close(lse, expected_lse)
        tolerance = {} if narrow == torch.float32 else {"atol": 0.02, "rtol": 0.02}
        torch.testing.assert_close(out, expected.to(narrow), **tolerance)


@pytest.mark.parametrize("number", [0, 3])
def test_sums_go_on(interpreted: ModuleType, number: int) -> None:
    rows, dim = 70, 64
    parts = [(i, *softmaxes(rows - 2 * i, dim, torch.bfloat16, i)) for i in range(number)]
    sums = softmaxes(rows, dim, torch.float32, 7)
    expected, expected_lse = merged_one_by_one(rows, dim, [(0, *sums), *parts])
    given = ([some for _, some, _ in parts], [its for *_, its in parts], [first for first, *_ in parts])
    away, away_lse = torch.empty(2, 3, rows, dim, dtype=torch.bfloat16), torch.empty(2, 3, rows)
    interpreted.merge(away, away_lse, sums, *given)
    interpreted.merge(*sums, sums, *given)
    torch.testing.assert_close(sums, (expected, expected_lse))
    torch.testing.assert_close((away, away_lse), (expected.bfloat16(), expected_lse), atol=0.02, rtol=0.02)


def test_views_of_sums(interpreted: ModuleType) -> None:
    out, lse = softmaxes(40, 32, torch.float32, 0)
    part, its = softmaxes(20, 32, torch.float32, 1)
    expected = merged_one_by_one(20, 32, [(0, out[:, :, ::2], lse[:, :, ::2]), (0, part, its)])
    left = out[:, :, 1::2].clone()
    view = (out[:, :, ::2], lse[:, :, ::2])
    interpreted.merge(*view, view, [part], [its], [0])
    torch.testing.assert_close(view, expected)
    assert torch.equal(out[:, :, 1::2], left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_at_once(interpreted: ModuleType, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 70, 64), (2, 2, 33, 64), (2, 2, 33, 40), (2, 1, 5, 0))
    wholes = [torch.randn(b, h, s + 9, d, generator=made) for b, h, s, d in sizes]
    totals = [whole[:, :, 4 : 4 + size[2]] for whole, size in zip(wholes, sizes, strict=True)]
    parts = [torch.randn(b, s, h, d, generator=made).to(dtype).transpose(1, 2) for b, h, s, d in sizes]
    expected = [whole.clone() for whole in wholes]
    for whole, part in zip(expected, parts, strict=True):
        whole[:, :, 4 : 4 + part.shape[2]] += part
    interpreted.add(totals, parts)
    torch.testing.assert_close(wholes, expected)


def compiled(function: Any, arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: arguments.get(name, "constexpr") for name in function.arg_names}
    # That strides, sizes and places in memory are multiples of 16, as Triton finds when it launches.
    places = {name: i for i, name in enumerate(function.arg_names)}
    attributes = {
        (places[name], *where): [["tt.divisibility", 16]] for name, kind in arguments.items() for where in leaves(kind)
    }
    source = ASTSource(function, signature, {(places[n],): value for n, value in constants.items()}, attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def leaves(kind: Any) -> list[tuple[int, ...]]:
    if isinstance(kind, str):
        return [()] if kind != "i32" else []
    return [(i, *rest) for i, each in enumerate(kind) for rest in (leaves(each) if not isinstance(each, str) else [()])]


@pytest.mark.parametrize("parts", ["*fp32", "*bf16"])
@pytest.mark.parametrize(("dim", "rows"), [(64, 64), (128, 32), (256, 16)])
def test_no_sum_is_written_before_all_have_read_it(parts: str, dim: int, rows: int) -> None:
    """Of sums that are merged in place. On a GPU the warps of a program read the log-sum-exp of the same rows, each in
    its own time, and one of them writes: without a barrier a late one weighs its rows by what is new."""
    stride = ("i64", "i64", "i64")
    arguments = {
        **{"out": "*fp32", "lse": "*fp32", "sums": ("*fp32", "*fp32"), "parts": (parts,), "lses": ("*fp32",)},
        **{"strides": (stride,) * 6, "firsts": ("i32",), "lengths": ("i32",), "heads": "i32", "rows": "i32"},
    }
    made = compiled(fresh().merge_kernel, arguments, {"D": dim, "BM": rows, "BD": dim}).asm["ptx"]
    read, met, written = (
        [i for i, line in enumerate(made.splitlines()) if word in line]
        for word in ("ld.global", "bar.sync", "st.global")
    )
    assert any(read[-1] < at < written[0] for at in met)


def test_it_compiles_for_an_h100() -> None:
    module, stride = fresh(), ("i64", "i64", "i64")
    merges = [
        compiled(
            module.merge_kernel,
            {
                **{"out": "*fp32", "lse": "*fp32", "sums": sums},
                **{"parts": ("*bf16",) * parts, "lses": ("*fp32",) * parts, "strides": (stride,) * (4 + 2 * parts)},
                **{"firsts": ("i32",) * parts, "lengths": ("i32",) * parts, "heads": "i32", "rows": "i32"},
            },
            {"D": 128, "BM": 32, "BD": 128},
        )
        for sums, parts in (((), 1), (("*fp32", "*fp32"), 4))
    ]
    add = compiled(
        module.add_kernel,
        {
            **{"totals": ("*fp32",) * 3, "parts": ("*bf16",) * 3, "strides": (stride,) * 6},
            **{name: ("i32",) * 3 for name in ("heads", "rows", "dims", "pairs")},
        },
        {"BM": 32, "BD": 128},
    )
    for kernel in (*merges, add):
        text = kernel.asm["ptx"]
        assert ".target sm_90a" in text and kernel.asm["cubin"]
        assert "ld.global.v4" in text, "what is read lies dense: four words at once"


def test_it_is_not_used_where_it_cannot_be() -> None:
    assert not fused.usable(torch.zeros(4)) and not fused.usable(torch.zeros(4, device="meta"))
