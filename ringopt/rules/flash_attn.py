"""Rules for the operators that flash-attn registers, by their schemas (flash_attn 2.7 and later, flash_attn_3).

    flash_attn::_flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, ...)     B S H D
    flash_attn::_flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)                      S H D, packed
    flash_attn_3::_flash_attn_forward(q, k, v, ..., cu_seqlens_q, cu_seqlens_k, ..., softmax_scale, ...)  either

`flash_attn_func` and its kin call them inside an autograd.Function, whose backward calls the operator named here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ringopt.rules.declare import AttentionRule, Declaration, Gathered, rule

# What both say alike; q, k, v are named so.
AS_CALLED = AttentionRule(causal="causal", scale="softmax_scale", dropout="dropout_p")
FORWARD, VARLEN = "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"
OF_THIRD = "flash_attn_3::_flash_attn_forward"

# What a rule cannot say, and the values that ask for nothing of it.
BEYOND: dict[str, tuple[Any, ...]] = {
    "softcap": (0.0, None), "alibi_slopes": (None,), "block_table": (None,), "leftpad_k": (None,), "seqused_k": (None,),
    "return_softmax": (False,),
}  # fmt: skip

# Of the arguments of flash_attn_3, those that the rule reads, and those that change no number but by rounding. All
# others ask for something (new keys, paged ones, rotations, softcap, chunks, scales of 8 bits) unless None or zero.
READ = frozenset(("q", "k", "v", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"))
IDLE = frozenset(("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"))


def declare_flash_attn() -> None:
    """All, for the registry."""
    rule(FORWARD)(forward)
    rule(VARLEN)(varlen)
    rule(OF_THIRD)(third)


def forward(window_size_left: int = -1, window_size_right: int = -1, **given: Any) -> Declaration:
    """A window and `causal` match the last query and the last key."""
    window, backward = (window_size_left, window_size_right), "flash_attn::_flash_attn_backward"
    return beyond(given) or replace(AS_CALLED, layout="BSHD", window=window, align="last", backward=backward)


def varlen(window_size_left: int = -1, window_size_right: int = -1, **given: Any) -> Declaration:
    """Sequences one after the other."""
    window, backward = (window_size_left, window_size_right), "flash_attn::_flash_attn_varlen_backward"
    segments = ("cu_seqlens_q", "cu_seqlens_k")
    return beyond(given) or replace(AS_CALLED, layout="SHD", window=window, segments=segments, backward=backward)


def third(
    q: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, window_size_left: int = -1,
    window_size_right: int = -1, **given: Any,
) -> Declaration:  # fmt: skip
    """One operator for both; it draws no dropout."""
    asked = [name for name, x in given.items() if name not in READ | IDLE and (isinstance(x, Tensor) or x)]
    if asked or q.dtype.itemsize == 1:
        return unsaid(asked or ["8 bits"])
    window, backward = (window_size_left, window_size_right), "flash_attn_3::_flash_attn_backward"
    says = AttentionRule(causal="causal", scale="softmax_scale", window=window, backward=backward)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return replace(says, layout="BSHD", align="last")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return unsaid(["cumulative lengths of queries or keys alone"])
    return replace(says, layout="SHD", segments=("cu_seqlens_q", "cu_seqlens_k"))


def beyond(given: dict[str, Any]) -> Gathered | None:
    """What a call asks for that is no attention of `AttentionRule`."""
    found = [name for name, nothing in BEYOND.items() if name in given and given[name] not in nothing]
    return unsaid(found) if found else None


def unsaid(found: list[str]) -> Gathered:
    """Of what a call asks for."""
    return Gathered(f"it is called with {', '.join(found)}, which no rule says")
