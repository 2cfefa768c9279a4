"""The kernels for GPUs. Numbers on a GPU where there is one; elsewhere the adapters run over stand-ins that hold what
the operators ask of their arguments (PyTorch's sources: native/transformers/cuda), and over the operators' own fake
kernels, which know names, order and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringopt.errors import OptionError
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.choose import choose_kernel
from ringopt.kernels.cuda_cudnn import CudaCudnn
from ringopt.kernels.cuda_efficient import CudaEfficient
from ringopt.kernels.cuda_flash import CudaFlash
from ringopt.kernels.math import Math
from ringopt.torch_compat import sdpa
from tests.kernels.test_kernels import check, draw, operands

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU at hand")
EACH = pytest.mark.parametrize("kernel", [CudaFlash(), CudaCudnn(), CudaEfficient()], ids=lambda kernel: kernel.name)
CUDA = torch.device("cuda")
INF = float("inf")


# ---- stand-ins ----------------------------------------------------------------------------------------------------
def fit(*tensors: Tensor) -> None:
    """What all of them ask of q, k, v, out and their gradients."""
    assert len({x.dtype for x in tensors}) == 1
    assert all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 for x in tensors)


def flash(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, debug: bool, *, scale: float) -> tuple[Any, ...]:
    fit(q, k, v)
    out, lse = Math().forward(TileInputs(q, k, v, scale, causal=causal))
    return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], None, None, None


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float,
) -> tuple[Tensor, ...]:
    fit(dout, q, k, v, out)
    offsets_q, offsets_k, longest_q, longest_k, p, causal, _state, _unused = rest
    assert (offsets_q, offsets_k, longest_q, longest_k, p) == (None, None, q.shape[2], k.shape[2], 0.0)
    return Math().backward(TileInputs(q, k, v, scale, causal=causal), WholeRows(dout, out, lse))


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, p: float, causal: bool, debug: bool, *, scale: float
) -> tuple[Any, ...]:
    assert q.shape[1] == k.shape[1] and bias is None and lse and not p
    out, logsumexp, *rest = flash(q, k, v, p, causal, debug, scale=scale)
    return out, logsumexp.unsqueeze(-1), *rest


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    assert q.shape[1] == k.shape[1] and lse.shape == (*q.shape[:3], 1)
    _seed, _offset, bias, *rest = rest  # type: ignore[assignment]
    assert bias is None
    return flash_backward(dout, q, k, v, out, lse.squeeze(-1), *rest, None, None, scale=scale)


def starts_aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
        assert all(stride % 16 == 0 for stride in bias.stride()[:3])


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: bool, p: float, causal: bool, *, scale: float
) -> tuple[Any, ...]:
    fit(q, k, v)
    starts_aligned(bias, q, k)
    assert q.shape[1] == k.shape[1] and lse and not p
    out, logsumexp = Math().forward(TileInputs(q, k, v, scale, bias, causal))
    blind = logsumexp == -INF  # here the real one is whatever it is
    logsumexp = F.pad(logsumexp.masked_fill(blind, torch.nan), (0, -q.shape[2] % 32), value=INF)
    return out.to(q.dtype).masked_fill(blind.unsqueeze(-1), torch.nan), logsumexp, None, None


def efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float,
) -> tuple[Tensor | None, ...]:
    fit(dout, q, k, v, out)
    starts_aligned(bias, q, k)
    _seed, _offset, p, needed, causal = rest
    assert lse.shape[2] % 32 == 0 and lse.is_contiguous() and not p and needed == [True, True, True, False]
    rows = WholeRows(dout, out, lse[:, :, : q.shape[2]])
    return *Math().backward(TileInputs(q, k, v, scale, bias, causal), rows), None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"flash": (flash, flash_backward), "cudnn": (cudnn, cudnn_backward)}
    both["efficient"] = (efficient, efficient_backward)  # type: ignore[assignment]
    for name, (forward, backward) in both.items():
        monkeypatch.setattr(sdpa, name, forward)
        monkeypatch.setattr(sdpa, f"{name}_backward", backward)


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_arguments_are_what_the_operators_ask(
    kernel: Kernel, dtype: torch.dtype, causal: bool, heads: tuple[int, int], stand_ins: None
) -> None:
    check(kernel, *operands(9, 9, heads, dim=20, dtype=dtype), None, causal)
    check(kernel, *operands(5, 70, heads, dim=64, dtype=dtype), None, False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_masks_start_aligned_and_hidden_rows_are_none(sizes: tuple[int, int], causal: bool, stand_ins: None) -> None:
    mask = draw(*sizes, 9, 9, seed=9)
    mask[..., 4, :] = -INF
    mask[..., 3, :4] = -INF
    check(CudaEfficient(), *operands(9, 9), mask, causal)
    check(CudaEfficient(), *operands(9, 9), mask[:, :, :1].expand(*sizes, 9, 9), causal)


def test_efficient_takes_values_of_another_width(stand_ins: None) -> None:
    q, k, _, _ = operands(9, 9)
    check(CudaEfficient(), q, k, draw(2, 2, 9, 5, seed=7), draw(2, 4, 9, 5, seed=8), None, True)


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
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


# ---- who is chosen ------------------------------------------------------------------------------------------------
def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "dims", "chosen", "reason"),
    [
        (
            "auto",
            (9, 0),
            torch.bfloat16,
            (64, 64),
            "flash",
            "flash attention is FA2; tiles with a mask are left to effic",
        ),
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
    check(kernel, *operands(9, 9, dim=20), None, True)
    check(kernel, *operands(9, 9, dim=20), draw(1, 4, 9, 9, seed=9), False)


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
