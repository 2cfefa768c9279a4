"""The kernels for GPUs. Numbers on a GPU where there is one; elsewhere the adapters run over stand-ins, which ask of
their arguments what the operators ask and read memory as they do (cuda_operators.py), and over the operators' own fake
kernels, which know names, order and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringopt.context_parallel.geometry.pattern import Band, Full
from ringopt.context_parallel.plan.tiling import band_seen
from ringopt.errors import OptionError
from ringopt.hardware.devices import device_of
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.choose import WithOthers, choose_kernel, kernel_on
from ringopt.kernels.cuda import is_assumed
from ringopt.kernels.cuda_cudnn import CudaCudnn
from ringopt.kernels.cuda_efficient import CudaEfficient
from ringopt.kernels.cuda_flash import CudaFlash
from ringopt.kernels.math import Math
from tests.kernels.cuda_operators import take_their_place
from tests.kernels.test_kernels import TOLERANCE, check, draw, operands, written_out

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU at hand")
EACH = pytest.mark.parametrize("kernel", [CudaFlash(), CudaCudnn(), CudaEfficient()], ids=lambda kernel: kernel.name)
CUDA = torch.device("cuda")
INF = float("inf")


# ---- stand-ins ----------------------------------------------------------------------------------------------------
@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    take_their_place(monkeypatch)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_arguments_are_what_the_operators_ask(
    kernel: Kernel, dtype: torch.dtype, causal: bool, heads: tuple[int, int], stand_ins: None
) -> None:
    if dtype == torch.float32 and kernel.name != "efficient":
        pytest.skip("16 bits only")
    check(kernel, *operands(9, 9, heads, dim=20, dtype=dtype), None, causal)
    check(kernel, *operands(5, 70, heads, dim=64, dtype=dtype), None, False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_masks_start_aligned_and_hidden_rows_are_none(sizes: tuple[int, int], causal: bool, stand_ins: None) -> None:
    mask = draw(*sizes, 9, 9, seed=9)
    mask[..., 4, :] = -INF
    mask[..., 3, :4] = -INF
    for dtype in (torch.float32, torch.bfloat16):
        given, wide = operands(9, 9, dtype=dtype), mask.to(dtype)
        check(CudaEfficient(), *given, wide, causal)
        check(CudaEfficient(), *given, wide[:, :, :1].expand(*sizes, 9, 9), causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_efficient_takes_values_of_another_width(dtype: torch.dtype, stand_ins: None) -> None:
    q, k, _, _ = operands(9, 9, dtype=dtype)
    v, dout = (draw(2, heads, 9, 5, dtype=dtype, seed=heads) for heads in (2, 4))
    check(CudaEfficient(), q, k, v, dout, None, True)


# ---- memory: every layout in which operands come ---------------------------------------------------------------------
def within(x: Tensor, *sizes: int, place: tuple[slice, ...] = (...,)) -> Tensor:
    """`x` in a part of a tensor of these sizes, NaN elsewhere."""
    view = torch.full(sizes, torch.nan, dtype=x.dtype)[place]
    return view.copy_(x)


def bits_beside(x: Tensor) -> Tensor:
    """As rows of queries travel: with two other tensors of the width, and 32 bits."""
    batch, heads, tokens, dim = x.shape
    return within(x, batch, heads, tokens, 3 * dim + 4 // x.element_size(), place=(..., slice(dim, 2 * dim)))


def second_piece(x: Tensor) -> Tensor:
    """In one buffer after what is no multiple of 16 bytes."""
    memory = torch.full((x.numel() + 6,), torch.nan, dtype=x.dtype)
    return memory[6:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.contiguous(),
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "some tokens": lambda x: within(
        x, *x.shape[:2], x.shape[2] + 7, x.shape[3], place=(..., slice(3, -4), slice(None))
    ),
    "some tokens, tokens first": lambda x: within(
        x.transpose(1, 2), x.shape[0], x.shape[2] + 7, x.shape[1], x.shape[3], place=(slice(None), slice(3, -4))
    ).transpose(1, 2),
    "every second token": lambda x: within(
        x, *x.shape[:2], 2 * x.shape[2], x.shape[3], place=(..., slice(0, None, 2), slice(None))
    ),
    "some heads": lambda x: within(x, x.shape[0], x.shape[1] + 3, *x.shape[2:], place=(slice(None), slice(1, -2))),
    "packed projections": lambda x: within(
        x.transpose(1, 2), x.shape[0], x.shape[2], 3, *x.shape[1::2], place=(slice(None), slice(None), 1)
    ).transpose(1, 2),
    "rows of other widths": bits_beside,
    "second piece": second_piece,
    "heads innermost": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "tokens innermost": lambda x: x.mT.contiguous().mT,
}


def check_laid_out(
    kernel: Kernel, given: list[Tensor], mask: Tensor | None, causal: bool, lay: Callable[[Tensor], Tensor]
) -> None:
    """`check`, of q, k, v, dout, out and lse as `lay` puts them."""
    q, k, v, dout = map(lay, given)
    leaves, tolerance = [x.double().requires_grad_() for x in (q, k, v)], TOLERANCE[q.dtype]
    expected = written_out(*leaves, mask, causal, 0.3)
    right = torch.autograd.grad(expected[0], leaves, dout.double())
    tile = TileInputs(q, k, v, 0.3, mask, causal)
    out, lse = kernel.forward(tile)
    whole = within(lse, *lse.shape[:2], lse.shape[2] + 5, place=(..., slice(2, -3)))
    found = kernel.backward(tile, WholeRows(dout, lay(out.to(q.dtype)), whole))
    for got, wanted in zip((out, lse, *found), (*expected, *right), strict=True):
        torch.testing.assert_close(got.double(), wanted.detach(), rtol=tolerance, atol=tolerance * 5)


@pytest.mark.sample(4)
@EACH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_memory_is_read_as_it_lies(kernel: Kernel, layout: str, dtype: torch.dtype, stand_ins: None) -> None:
    if dtype == torch.float32 and kernel.name != "efficient":
        pytest.skip("16 bits only")
    for heads, dim, causal in (((4, 2), 16, True), ((3, 3), 20, False), ((2, 1), 8, True)):
        for queries, keys in ((7, 7), (1, 2), (2, 5)):
            tile_causal = causal and queries == keys
            if kernel.name == "cudnn" and queries == 1:
                continue
            given = list(operands(queries, keys, heads, dim=dim, dtype=dtype))
            masks = [None, draw(1, heads[0], queries, keys, dtype=dtype, seed=9)] if kernel.masks else [None]
            for mask in masks:
                check_laid_out(kernel, given, mask, tile_causal, LAYOUTS[layout])


@EACH
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 1, 2, 3)], ids=str)
def test_expanded_operands(kernel: Kernel, dims: tuple[int, ...], stand_ins: None) -> None:
    """A latent expanded over the batch, one KV head over all, the gradient of a sum."""

    def lay(x: Tensor) -> Tensor:
        return x[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(4))].expand(x.shape)

    check_laid_out(kernel, list(operands(6, 6, (4, 2), dim=16, dtype=torch.bfloat16)), None, True, lay)


def test_what_cudnn_does_not_take_goes_to_another(stand_ins: None) -> None:
    kernel = WithOthers(CudaCudnn(), CudaEfficient())
    for queries, keys in ((1, 9), (9, 1), (1, 1), (9, 9)):
        check(kernel, *operands(queries, keys, dtype=torch.bfloat16), None, False)


class Span(Full):
    """Any band; one pattern for each is enough elsewhere."""

    low, high = 0, 0  # type: ignore[assignment]


def span(queries: int, keys: int, low: int, high: int) -> Band:
    found = type("Band", (Span,), {"low": low, "high": high})
    return found(queries, keys)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("queries", "keys", "bands"), [(7, 7, 39), (5, 11, 36), (8, 5, 4), (10, 5, 0)])
def test_windows_are_arguments_of_flash(queries: int, keys: int, bands: int, stand_ins: None) -> None:
    """Every band of which each query sees a key, and the last query the last."""
    q, k, v, dout = operands(queries, keys, dtype=torch.bfloat16)
    apart, seen = torch.arange(keys) - torch.arange(queries)[:, None], 0
    for low in range(1 - queries, keys, 3):
        for high in range(max(1, low + 1), keys + queries):
            tile = TileInputs(q, k, v, 0.3, band=(low, high))
            if band_seen(span(queries, keys, low, high), range(queries), range(keys)) is None:
                assert not CudaFlash().takes(tile)
                continue
            assert CudaFlash().takes(tile) and not CudaEfficient().takes(tile)
            hidden = torch.zeros(queries, keys).masked_fill((apart < low) | (apart >= high), -INF)
            right = replace(tile, mask=hidden[None, None].to(q.dtype), band=None)
            expected = Math().forward(right)
            found = CudaFlash().forward(tile)
            rows = WholeRows(dout, expected[0].to(q.dtype), expected[1])
            grads = zip(CudaFlash().backward(tile, rows), Math().backward(right, rows), strict=True)
            for got, wanted in (*zip(found, expected, strict=True), *grads):
                torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)
            seen += 1
    assert seen == bands


# ---- the operators' own fake kernels ------------------------------------------------------------------------------
@EACH
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_operators_are_called_as_this_torch_has_them(kernel: Kernel, kv_heads: int) -> None:
    with FakeTensorMode():
        q, k = (
            torch.empty(2, heads, rows, 60, dtype=torch.bfloat16, device=CUDA)
            for heads, rows in ((4, 10), (kv_heads, 12))
        )
        mask = torch.empty(1, 4, 10, 12, device=CUDA) if kernel.masks else None
        tile = TileInputs(q, k, k, 0.3, mask)
        out, lse = kernel._forward(tile)
        grads = kernel._backward(tile, WholeRows(out, out, lse))
        if kernel.bands:
            tile = replace(tile, band=(-3, 5))
            assert [x.shape for x in kernel._forward(tile)] == [out.shape, lse.shape]
            assert [x.shape for x in kernel._backward(tile, WholeRows(out, out, lse))] == [x.shape for x in grads]
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


# ---- who is chosen ------------------------------------------------------------------------------------------------
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "dims", "chosen", "reason"),
    [
        (
            "auto",
            (8, 0),
            torch.bfloat16,
            (64, 64),
            "flash",
            "attention is FA2; tiles with a mask are left to efficient",
        ),
        (
            "auto",
            (9, 0),
            torch.bfloat16,
            (64, 64),
            "cudnn",
            "PyTorch's own first choice on this device; tiles with a mask",
        ),
        ("auto", (10, 3), torch.float16, (64, 64), "cudnn", "PyTorch's own first choice on this device"),
        ("auto", (12, 0), torch.bfloat16, (64, 64), "flash", "the fastest that supports this case"),
        ("auto", (9, 0), torch.bfloat16, (256, 256), "flash", "the fastest that supports this case"),
        ("auto", (8, 9), torch.bfloat16, (208, 208), "efficient", "and up to 224 on compute capability 8.9; found 208"),
        ("auto", (12, 1), torch.bfloat16, (224, 224), "efficient", "on compute capability 12.1; found 224"),
        ("auto", (8, 6), torch.bfloat16, (232, 232), "flash", "the fastest that supports this case"),
        ("auto", (8, 6), torch.bfloat16, (192, 192), "flash", "the fastest that supports this case"),
        ("auto", (8, 0), torch.bfloat16, (208, 208), "flash", "the fastest that supports this case"),
        ("auto", (9, 0), torch.float32, (64, 64), "efficient", "flash has no torch.float32; it has torch.bfloat16"),
        ("auto", (9, 0), torch.float64, (64, 64), "math", "kernel efficient has no torch.float64"),
        ("auto", (9, 0), torch.bfloat16, (64, 32), "efficient", "flash needs values as wide as keys; found 32 and 64"),
        ("auto", (9, 0), torch.bfloat16, (512, 512), "efficient", "flash has heads of up to 256; found 512"),
        ("auto", (7, 5), torch.float16, (64, 64), "efficient", "flash needs compute capability 8.0; this GPU has 7.5"),
        ("auto", (6, 0), torch.bfloat16, (64, 64), "math", "efficient needs compute capability 8.0; this GPU has 6.0"),
        ("cudnn", (9, 0), torch.float16, (64, 64), "cudnn", "asked for; tiles with a mask are left to efficient"),
    ],
)
def test_choice_on_a_gpu(
    name: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    dims: tuple[int, int],
    chosen: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpu(monkeypatch, capability)
    kernel, said = choose_kernel(name, dtype, CUDA, *dims)
    assert kernel.name == chosen
    assert reason in said


@pytest.mark.parametrize(
    ("hardware", "name", "dtype", "dim", "chosen"),
    [
        ("h100", "auto", torch.bfloat16, 128, "cudnn"),
        ("h100", "flash", torch.bfloat16, 128, "flash"),
        ("b200", "auto", torch.float16, 256, "flash"),
        ("a100", "auto", torch.bfloat16, 128, "flash"),
        ("a100", "auto", torch.float32, 128, "efficient"),
        ("v100", "auto", torch.bfloat16, 128, "math"),
    ],
)
def test_choice_for_a_gpu_that_is_not_here(hardware: str, name: str, dtype: torch.dtype, dim: int, chosen: str) -> None:
    kernel, said = kernel_on(device_of(hardware), name, dtype, dim, dim)
    assert kernel.name == chosen and said.endswith(f"(on {hardware})")
    assert not is_assumed()
    with pytest.raises(OptionError, match="flash_cpu runs on the CPU"):
        kernel_on(device_of(hardware), "flash_cpu", dtype, dim, dim)


def test_cudnn_is_first_where_pytorch_has_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))

    def chosen() -> str:
        return choose_kernel("auto", torch.bfloat16, CUDA, 64, 64)[0].name

    assert chosen() == "cudnn"
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
        assert chosen() == "flash"
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
        assert chosen() == "flash"
    with monkeypatch.context() as patch:  # what the user has activated
        patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3", raising=False)
        assert chosen() == "flash"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert chosen() == "flash"
        with pytest.raises(OptionError, match="kernel cudnn is not deterministic"):
            choose_kernel("cudnn", torch.bfloat16, CUDA, 64, 64)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "version", lambda: 91002)
        assert chosen() == "flash"
        with pytest.raises(OptionError, match="kernel cudnn needs cuDNN 91501, as cuDNN counts versions; found 91002"):
            choose_kernel("cudnn", torch.bfloat16, CUDA, 64, 64)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("flash", "option kernel='flash': kernel flash runs on NVIDIA GPUs, and the tensors are on cpu"),
        ("cudnn", "option kernel='cudnn': kernel cudnn runs on NVIDIA GPUs"),
    ],
)
def test_a_kernel_of_another_device_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        choose_kernel(name, torch.bfloat16, torch.device("cpu"), 64, 64)


def test_masked_tiles_go_to_the_other(monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    kernel, _ = choose_kernel("flash", torch.bfloat16, CUDA, 20, 20)
    given = operands(9, 9, dim=20, dtype=torch.bfloat16)
    check(kernel, *given, None, True)
    check(kernel, *given, draw(1, 4, 9, 9, dtype=torch.bfloat16, seed=9), False)


# ---- a GPU --------------------------------------------------------------------------------------------------------
@GPU
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_on_a_gpu(kernel: Kernel, dtype: torch.dtype) -> None:
    for heads, dim in (((4, 4), 64), ((6, 2), 20), ((3, 1), 128)):
        if (refusal := kernel.supports(dtype, CUDA, dim, dim)) is not None:
            pytest.skip(refusal.sentence)
        given = [x.to(CUDA) for x in operands(70, 70, heads, dim=dim, dtype=dtype)]
        mask = draw(1, heads[0], 70, 70, seed=9)
        mask[..., 4, :] = -INF
        for causal in (False, True):
            for one in (None, mask.to(CUDA)) if kernel.masks else (None,):
                check(kernel, *given, one, causal)
