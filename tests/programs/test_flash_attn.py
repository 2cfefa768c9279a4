"""The operators of flash-attn: stand-ins with its schemas, called as its own Python code calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tests.harness.stub_flash_attn import FlashAttnFunc, attention, third, write
from tests.harness.translation import validate

if hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
    pytest.skip("flash-attn itself is here", allow_module_level=True)

OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right, float softcap"
)
REST = "Tensor? alibi_slopes"
DENSE = f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, {REST}, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
PACKED = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    " float dropout_p, float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1,"
    " float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None,"
    " Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk,"
    f" Tensor(c!)? dv, {OPTIONS}, {REST}, bool deterministic, Tensor? rng_state=None) -> Tensor"
)
PACKED_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk,"
    " Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k,"
    f" {OPTIONS}, {REST}, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
)


def dense(q: Tensor, k: Tensor, v: Tensor, p: Any, scale: float, causal: bool, left: int, right: int, *_: Any) -> Any:
    lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    return attention(q, k, v, scale, causal, left, right, None), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, _k: Any, _m: Any, _n: Any, p: Any, scale: float, causal: bool,
    left: int = -1, right: int = -1, *_: Any,
) -> Any:  # fmt: skip
    out = attention(q[None], k[None], v[None], scale, causal, left, right, cu)[0]
    return out, q.new_zeros(q.shape[1], q.shape[0]), q.new_empty(0), torch.zeros(2, dtype=torch.int64)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    p: Any, scale: float, causal: bool, left: int, right: int, *_: Any,
) -> Tensor:  # fmt: skip
    write((dq, dk, dv), (q, k, v), dout, (scale, causal, left, right, None))
    return torch.zeros_like(lse)


def packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu: Tensor, _k: Any, _m: Any, _n: Any, p: Any, scale: float, causal: bool, left: int, right: int, *_: Any,
) -> Tensor:  # fmt: skip
    write((dq[None], dk[None], dv[None]), (q[None], k[None], v[None]), dout[None], (scale, causal, left, right, cu))
    return torch.zeros_like(lse)


def library(namespace: str) -> torch.library.Library:
    """With the operators of flash-attn, which live as long as it."""
    made = torch.library.Library(namespace, "DEF")
    for name, schema, kernel in (
        ("_flash_attn_forward", DENSE, dense),
        ("_flash_attn_varlen_forward", PACKED, packed),
        ("_flash_attn_backward", BACKWARD, backward),
        ("_flash_attn_varlen_backward", PACKED_BACKWARD, packed_backward),
    ):
        made.define(name + schema)
        made.impl(name, kernel, "CPU")
        fake = kernel if "forward" in name else lambda *given: torch.empty_like(given[5])
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=made)
    return made


HUB, FORK = "_flash_attn2_cuda_9e27194", "my_flash_attn"
LIBRARIES = [library(namespace) for namespace in ("flash_attn", HUB, FORK)]
ops = torch.ops.flash_attn


class FlashAttention(Function):
    """As flash_attn_func calls the operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        ctx.given = (0.0, 0.5, causal, *window, 0.0, None)
        out, lse, _mask, state = ops._flash_attn_forward(q, k, v, *ctx.given, return_softmax=False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        return out[..., : q.shape[-1]]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ops._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *ctx.given, False, rng_state=state)
        return dq[..., : dout.shape[-1]], dk[..., : dout.shape[-1]], dv[..., : dout.shape[-1]], None, None


class FlashVarlen(Function):
    """As flash_attn_varlen_func calls the operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, causal: bool, window: tuple[int, int]) -> Any:
        ctx.given = (0.0, 0.5, causal, *window, 0.0, None)
        out, lse, _mask, state = ops._flash_attn_varlen_forward(q, k, v, ends, ends, 6, 6, *ctx.given)
        ctx.save_for_backward(q, k, v, out, lse, ends, state)
        return out[..., : q.shape[-1]]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        q, k, v, out, lse, ends, state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ops._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, ends, ends, 6, 6, *ctx.given, False, rng_state=state
        )
        return dq[..., : dout.shape[-1]], dk[..., : dout.shape[-1]], dv[..., : dout.shape[-1]], None, None, None


class Flash(nn.Module):
    """Grouped heads, B S H D."""

    def __init__(self, way: str, causal: bool, window: tuple[int, int]) -> None:
        super().__init__()
        self.qkv, self.way, self.causal, self.window = nn.Linear(8, 16), way, causal, window

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 2)).split([4, 2, 2], 2)
        if self.way == "function":
            return FlashAttention.apply(q, k, v, self.causal, self.window).flatten(2).sin()
        if self.way == "dense":
            out = ops._flash_attn_forward(q, k, v, 0.0, 0.5, self.causal, *self.window, 0.0, None, False)[0]
            return out.flatten(2).sin()
        if self.way == "packed function":
            return FlashVarlen.apply(q[0], k[0], v[0], ends, self.causal, self.window).flatten(1).sin()
        out = ops._flash_attn_varlen_forward(q[0], k[0], v[0], ends, ends, 6, 6, 0.0, 0.5, self.causal, *self.window)
        return out[0].flatten(1).sin()


WAYS = [
    ("function", True, (-1, -1), 2), ("function", False, (3, 2), 3), ("packed", True, (-1, -1), 2),
    ("packed", False, (4, 0), 3), ("packed function", True, (-1, -1), 2), ("packed function", False, (3, 2), 3),
]  # fmt: skip


@pytest.mark.parametrize(("way", "causal", "window", "p"), WAYS)
def test_flash_attention_is_a_site(way: str, causal: bool, window: tuple[int, int], p: int) -> None:
    if way.endswith("function") and torch.__version__ < (2, 12):
        pytest.skip("the graph of the function's backward is refused, for its operator writes")
    torch.manual_seed(0)
    model = Flash(way, causal, window).double()
    if way == "packed":
        model.qkv.requires_grad_(False)  # the operator itself has no gradient
    x, ends = torch.randn(1, 13, 8, dtype=torch.float64), torch.tensor([0, 4, 9, 13], dtype=torch.int32)
    found = validate(p, model, {"x": x, "ends": ends})
    assert found.wrong == ""
    (site,) = found.report.sites
    assert site.refusal is None and "::_flash_attn" in site.form
    assert [gather.op for gather in found.report.gathers] == ["output"]


@pytest.mark.parametrize("way", ["function", "packed"])
def test_builds_of_the_hub_are_known_by_their_library(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ops", getattr(torch.ops, HUB))
    test_flash_attention_is_a_site(way, True, (-1, -1), 2)


def test_a_fork_under_a_name_of_its_own_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ops", getattr(torch.ops, FORK))
    model, x = Flash("dense", True, (-1, -1)).double().requires_grad_(False), torch.randn(1, 13, 8).double()
    found = validate(2, model, {"x": x, "ends": torch.tensor([0, 13])})
    assert found.wrong == "" and not found.report.sites


def test_what_no_rule_says_is_gathered_with_its_name() -> None:
    class Capped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x[:, None]
            y = F.scaled_dot_product_attention(q, q, q)[:, 0]
            z = y.unflatten(-1, (2, 4))
            return ops._flash_attn_forward(z, z, z, 0.0, 0.5, True, -1, -1, 30.0, None, False)[0]

    found = validate(2, Capped(), {"x": torch.randn(1, 13, 8, dtype=torch.float64)})
    assert found.wrong == ""
    assert any("it is called with softcap, which no rule says" in gather.why for gather in found.report.gathers)


# ---- flash_attn_3 ----------------------------------------------------------------------------------------------------
THIRD, HUB_THIRD = "flash_attn_3", "_flash_attn3_cuda_9e27194"
LIBRARIES += [third(namespace) for namespace in (THIRD, HUB_THIRD)]


class Third(nn.Module):
    """Grouped heads, B S H D, or packed; or the operator itself, `with` what is given."""

    def __init__(self, packed: bool, causal: bool, window: tuple[int, int], of: str = THIRD, **given: Any) -> None:
        super().__init__()
        self.qkv, self.packed, self.causal, self.window = nn.Linear(8, 16), packed, causal, window
        self.of, self.given = getattr(torch.ops, of), given

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 2)).split([4, 2, 2], 2)
        if self.given:
            return self.of._flash_attn_forward(q, k, v, causal=True, **self.given)[0].flatten(2).sin()
        if self.packed:
            out = FlashAttnFunc.apply(self.of, q[0], k[0], v[0], ends, self.causal, self.window, None)
            return out.flatten(1).sin()
        return FlashAttnFunc.apply(self.of, q, k, v, None, self.causal, self.window, 0.3).flatten(2).sin()


OF_THIRD = [
    (False, True, (-1, -1), THIRD, 2), (False, False, (3, 2), THIRD, 3), (True, True, (-1, -1), THIRD, 3),
    pytest.param(True, False, (3, 2), THIRD, 2, marks=pytest.mark.zoo), (True, True, (4, 0), HUB_THIRD, 2),
]  # fmt: skip
X = {"x": torch.randn(1, 13, 8, dtype=torch.float64), "ends": torch.tensor([0, 4, 9, 13], dtype=torch.int32)}


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="a graph with the backward's writes is refused")
@pytest.mark.parametrize(("packed", "causal", "window", "of", "p"), OF_THIRD)
def test_the_third_is_a_site(packed: bool, causal: bool, window: tuple[int, int], of: str, p: int) -> None:
    torch.manual_seed(0)
    found = validate(p, Third(packed, causal, window, of).double(), X)
    assert found.wrong == ""
    (site,) = found.report.sites
    assert site.refusal is None and [gather.op for gather in found.report.gathers] == ["output"]


@pytest.mark.parametrize(
    ("given", "why"), [({"softcap": 30.0}, "softcap"), ({"attention_chunk": 4}, "attention_chunk")]
)
def test_what_the_third_is_asked_beside_is_gathered(given: dict[str, Any], why: str) -> None:
    model = Third(False, True, (-1, -1), **given).double().requires_grad_(False)

    def beside(x: Tensor, ends: Tensor) -> Tensor:
        q = x[:, None]
        return model(F.scaled_dot_product_attention(q, q, q)[:, 0], ends)

    found = validate(2, beside, X)
    assert found.wrong == ""
    assert any(f"it is called with {why}, which no rule says" in gather.why for gather in found.report.gathers)
