"""Stand-ins on the CPU for PyTorch's attention operators for NVIDIA GPUs: they ask of their operands what the operators
ask, and read memory by the strides that the kernels compute with, where that is not the operand's own.

Whatever a kernel reads that is no element of the operand is NaN here. Results lie in memory as the operators lay them.
Sources (pytorch): native/transformers/cuda/{attention.cu, attention_backward.cu, flash_attn/flash_api.cpp,
mem_eff_attention/kernel_{forward,backward}.h, sdp_utils.cpp}, native/cudnn/MHA.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.kernels.base import TileInputs, WholeRows
from ringopt.kernels.math import Math
from ringopt.torch_compat import sdpa

HALF = {torch.bfloat16, torch.float16}
INF = float("inf")


# ---- memory ----------------------------------------------------------------------------------------------------------
def walked(x: Tensor, strides: Sequence[int]) -> Tensor:
    """What a kernel reads that begins where `x` does and steps by `strides`, in the sizes of `x`."""
    ends = [1 + sum((size - 1) * step for size, step in zip(x.shape, by, strict=True)) for by in (x.stride(), strides)]
    memory = torch.full((max(ends),), torch.nan, dtype=x.dtype)
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()]
    memory.as_strided(x[tuple(once)].shape, x.stride()).copy_(x[tuple(once)])
    return memory.as_strided(x.shape, tuple(strides))


def loads(*operands: Tensor, dtypes: set[torch.dtype] = HALF) -> None:
    """Vectors of 16 bytes: every row, head and batch begins at one, and rows are a multiple of 8 elements."""
    assert len({x.dtype for x in operands}) == 1 and operands[0].dtype in dtypes, "refused: dtype"
    for x in operands:
        each = 16 // x.element_size()
        assert x.shape[-1] % 8 == 0 and x.stride(-1) == 1, "the last dim is a multiple of 8, and dense"
        assert x.storage_offset() % each == 0, "misaligned address"
        assert all(stride % each == 0 for stride in x.stride()[:-1]), "not correctly aligned"


def tokens_first(*sizes: int, dtype: torch.dtype) -> Tensor:
    """[B, H, S, D] in memory as [B, S, H, D]."""
    batch, heads, tokens, dim = sizes
    return torch.empty(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """In float32, the log-sum-exp in natural logarithm."""
    return Math().forward(TileInputs(q, k, v, scale, bias, causal))


def pull_back(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, rows: WholeRows
) -> list[Tensor]:
    grads = Math().backward(TileInputs(q, k, v, scale, bias, causal), rows)
    return [grad.to(q.dtype) for grad in grads]


def like(values: Tensor, layout: Tensor) -> Tensor:
    return layout.copy_(values)


def scalar(x: Tensor, dtype: torch.dtype) -> None:
    """The state of a generator, of a dropout that is not done."""
    assert x.dim() == 0 and x.dtype == dtype


# ---- flash attention 2 -----------------------------------------------------------------------------------------------
def flash(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, debug: bool, *, scale: float) -> tuple[Any, ...]:
    loads(q, k, v)
    assert q.shape[3] <= 256 and q.shape[1] % k.shape[1] == 0 and not p and not debug
    assert not causal or q.shape[2] == k.shape[2], "causal is aligned to the lower right"
    out, lse = attend(q, k, v, None, causal, scale)
    return like(out, torch.empty_like(q.transpose(1, 2)).transpose(1, 2)), lse, None, None, 0, 0, None, None, None


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))  # so does the operator
    loads(q, k, v)
    loads(dout, out)
    causal = checked(q, k, lse, rest)
    _, heads, tokens = lse.shape
    rows = WholeRows(dout, out, walked(lse, (heads * tokens, tokens, 1)))
    grads = pull_back(q, k, v, None, causal, scale, rows)
    lies = (torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
    return tuple(like(grad, layout) for grad, layout in zip(grads, lies, strict=True))


def checked(q: Tensor, k: Tensor, lse: Tensor, rest: Sequence[Any]) -> bool:
    """Whether the backward is causal."""
    starts_q, starts_k, longest_q, longest_k, p, causal, state, unused = rest
    assert (starts_q, starts_k, longest_q, longest_k, p) == (None, None, q.shape[2], k.shape[2], 0.0)
    assert state.shape == (2,) and state.dtype == torch.uint64
    scalar(unused, torch.uint64)
    assert lse.dtype == torch.float32
    return bool(causal)


def in_window(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    """What the kernel adds for a window: counted from the diagonal that ends at the last query and key. A size of all
    keys or more is none; but beside another, none is a size of all keys."""
    diagonal, keys = k.shape[2] - q.shape[2], k.shape[2]
    apart = torch.arange(keys) - torch.arange(q.shape[2])[:, None] - diagonal
    left, right = (-1 if size >= keys else size for size in (left, right))
    seen = torch.ones(q.shape[2], keys, dtype=torch.bool)
    if left >= 0 or right >= 0:
        left, right = (size if size >= 0 else keys for size in (left, right))
        seen = (apart >= -left) & (apart <= right)
    return torch.zeros(seen.shape).masked_fill(~seen, -INF)[None, None]


def flash_band(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # tokens come before heads
    loads(q, k, v)
    assert q.shape[3] <= 256 and q.shape[1] % k.shape[1] == 0
    assert rest == (None, None, q.shape[2], k.shape[2], 0.0, False, False)
    out, lse = attend(q, k, v, in_window(q, k, window_size_left, window_size_right), False, scale)
    lse = lse.masked_fill(lse == -INF, INF)  # of a row that sees nothing
    return like(out.transpose(1, 2), torch.empty_like(q.transpose(1, 2))), lse, None, None, None


def flash_band_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous()))
    loads(q, k, v)
    loads(dout, out)
    checked(q, k, lse, rest)
    _, heads, tokens = lse.shape
    rows, bias = (
        WholeRows(dout, out, walked(lse, (heads * tokens, tokens, 1))),
        in_window(q, k, window_size_left, window_size_right),
    )
    grads = pull_back(q, k, v, bias, False, scale, rows)
    return tuple(
        like(x.transpose(1, 2), torch.empty_like(y.transpose(1, 2))) for x, y in zip(grads, (q, k, v), strict=True)
    )


# ---- cuDNN -----------------------------------------------------------------------------------------------------------
def graph(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What cuDNN builds a graph of: no two elements share a place."""
    loads(q, k, v)
    assert q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1] and q.shape[3] <= 128
    assert k.shape[2] > 1 and q.shape[2] > 1
    assert all(stride or size == 1 for x in (q, k, v) for size, stride in zip(x.shape, x.stride(), strict=True))


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, stats: bool, p: float, causal: bool, debug: bool, *, scale: float
) -> tuple[Any, ...]:
    graph(q, k, v)
    assert bias is None and stats and not p and not debug
    out, lse = attend(q, k, v, None, causal, scale)
    return like(out, torch.empty_like(q)), lse.unsqueeze(-1), None, None, 0, 0, None, None, None


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    graph(q, k, v)
    loads(dout, out)
    seed, offset, bias, starts_q, starts_k, longest_q, longest_k, p, causal = rest
    assert (bias, starts_q, starts_k, longest_q, longest_k, p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
    scalar(seed, torch.int64)
    scalar(offset, torch.int64)
    batch, heads, tokens = q.shape[:3]
    assert lse.shape == (batch, heads, tokens, 1) and lse.dtype == torch.float32
    # Built graphs are kept by the strides of q, k and v: this one is that of whoever came first, with its own `out`.
    kept = torch.empty_like(q).stride()
    stats = walked(lse, (heads * tokens, tokens, 1, 1)).squeeze(-1)
    rows = WholeRows(walked(dout, kept), walked(out, kept), stats)
    grads = pull_back(q, k, v, None, causal, scale, rows)
    return tuple(like(grad, torch.empty_like(x)) for grad, x in zip(grads, (q, k, v), strict=True))


# ---- memory-efficient attention --------------------------------------------------------------------------------------
def added(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    """A mask is loaded by 16 bytes, beyond its last key where that ends within such a load."""
    if bias is None:
        return
    each = 16 // bias.element_size()
    assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
    assert bias.storage_offset() % each == 0 and all(stride % each == 0 for stride in bias.stride()[:3])
    last = sum((size - 1) * stride for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    end = bias.storage_offset() + last + -(-bias.shape[3] // each) * each
    assert end <= bias.untyped_storage().nbytes() // bias.element_size(), "reads beyond the memory of the mask"


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, stats: bool, p: float, causal: bool, *, scale: float
) -> tuple[Any, ...]:
    loads(q, k, dtypes={*HALF, torch.float32})
    loads(v, dtypes={q.dtype})
    added(bias, q, k)
    assert q.shape[1] == k.shape[1] and stats and not p
    out, lse = attend(q, k, v, bias, causal, scale)
    blind = lse == -INF  # here the real one is whatever it is
    lse = F.pad(lse.masked_fill(blind, torch.nan), (0, -q.shape[2] % 32), value=INF)
    lies = tokens_first(*q.shape[:3], v.shape[3], dtype=q.dtype)
    return like(out.masked_fill(blind.unsqueeze(-1), torch.nan), lies), lse, None, None


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
    dout = dout.transpose(1, 2).contiguous().transpose(1, 2)  # so does the operator; not with `out`
    loads(q, k, dtypes={*HALF, torch.float32})
    loads(v, dout, dtypes={q.dtype})
    added(bias, q, k)
    seed, offset, p, needed, causal = rest
    assert not p and needed == [True, True, True, False]
    scalar(seed, torch.int64)
    scalar(offset, torch.int64)
    _, heads, tokens, dim = out.shape
    assert out.storage_offset() * out.element_size() % 16 == 0, "misaligned address"
    if q.dtype in HALF:  # in float32 the sum of dout * out is made before, of tensors
        out = walked(out, (out.stride(0), out.stride(1), heads * dim, 1))
    assert lse.dtype == torch.float32 and lse.stride(0) % 8 == 0 and lse.stride(1) % 8 == 0
    padded = walked(lse, (lse.stride(0), lse.stride(1), 1))
    assert lse.shape[2] == -(-tokens // 32) * 32 and (padded[:, :, tokens:] == INF).all(), "loaded in blocks of 32"
    grads = pull_back(q, k, v, bias, causal, scale, WholeRows(dout, out, padded[:, :, :tokens]))
    lies = (tokens_first(*x.shape, dtype=x.dtype) for x in (q, k, v))
    return *(like(grad, layout) for grad, layout in zip(grads, lies, strict=True)), None


OPERATORS = {
    "flash": flash,
    "flash_backward": flash_backward,
    "flash_band": flash_band,
    "flash_band_backward": flash_band_backward,
    "cudnn": cudnn,
    "cudnn_backward": cudnn_backward,
    "efficient": efficient,
    "efficient_backward": efficient_backward,
}


def take_their_place(patch: pytest.MonkeyPatch) -> None:
    """The stand-ins are what the adapters call, until the end of the test."""
    for name, operator in OPERATORS.items():
        patch.setattr(sdpa, name, operator)
