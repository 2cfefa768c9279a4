"""mamba-ssm (2.0.4 and later): the state spaces of Mamba 2, as its signatures have them.

    out, last = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, ...)        x [B, L, H, P], state [B, H, P, N]
    out = mamba_split_conv1d_scan_combined(zxbcdt, ...)       the convolution before it, the norm and product behind it

The state decays by a number for each head. The second is spelled out around the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.frontend.libraries.causal_conv1d import convolved
from ringopt.frontend.libraries.opaque import LibraryScan
from ringopt.rules.declare import Declaration, ScanRule
from ringopt.scans.segment_map import wide
from ringopt.torch_compat.dynamo_calls import not_traced

MODULE = "mamba_ssm.ops.triton.ssd_combined"


HEADS = {**dict.fromkeys(("x", "dt", "B", "C", "z"), 2), **dict.fromkeys(("A", "D", "dt_bias"), 0)}
HEADS |= {"initial_states": 1, "0": 2, "1": 1}


def fake_chunk_scan(x: Tensor, B: Tensor, C: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The result, and the last state [B, H, P, N] in float32 or wider."""
    batch, _tokens, heads, inner = x.shape
    return x.new_empty(x.shape), x.new_empty((batch, heads, inner, B.shape[-1]), dtype=wide(x.dtype))


def says(**given: Any) -> Declaration:
    """One decay a head, and all of the state with it."""
    return ScanRule(
        ("x", "dt", "B", "C", "z"), "initial_states", axes=("point", "point", "free", "free"), additive=("x",),
        segments="seq_idx", heads=HEADS,
    )  # fmt: skip


CHUNK_SCAN = LibraryScan(
    MODULE,
    "mamba_chunk_scan_combined",
    ("x", "dt", "A", "B", "C", "D?", "z?", "dt_bias?", "initial_states?", "seq_idx?"),
    {"chunk_size": "int", "dt_softplus": "bool?", "dt_limit": "float[]?"},
    "return_final_states",
    fake_chunk_scan,
    says,
    alone=True,
)


def split_form(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of `mamba_split_conv1d_scan_combined`. With a last state, or an MLP in it, it is left to the library."""
    untraced = not_traced(original)
    scanned = CHUNK_SCAN.form(getattr(sys.modules[MODULE], CHUNK_SCAN.name))

    def mamba_split_conv1d_scan_combined(
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        activation: str | None = "silu",
        rmsnorm_weight: Tensor | None = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Tensor | None = None,
        outproj_bias: Tensor | None = None,
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
        state_dtype: torch.dtype | None = None,
    ) -> Any:
        heads, inner = (D.shape[0], headdim or 0) if D.dim() == 1 else D.shape
        dim, channels = heads * inner, conv1d_weight.shape[0]
        if return_final_states or state_dtype is not None or zxbcdt.shape[-1] != dim + channels + heads:
            more = (rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups, norm_before_gate)
            first = (zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit)
            last = {} if state_dtype is None else {"state_dtype": state_dtype}
            return untraced(*first, return_final_states, activation, *more, **last)
        z, xbc, dt = zxbcdt.split([dim, channels, heads], -1)
        xbc = convolved(xbc.mT, conv1d_weight, conv1d_bias, seq_idx, activation).mT
        x, b, c = xbc.split([dim, (channels - dim) // 2, (channels - dim) // 2], -1)
        x, z = x.unflatten(-1, (heads, inner)), z.unflatten(-1, (heads, inner))
        out = scanned(
            x, dt, A, b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1)), chunk_size, D=D,
            z=z if rmsnorm_weight is None else None, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx,
            dt_softplus=True, dt_limit=dt_limit,
        ).flatten(-2)  # fmt: skip
        if rmsnorm_weight is not None:
            out = gated_norm(out, z.flatten(-2), rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
        return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)

    return mamba_split_conv1d_scan_combined


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, before: bool) -> Tensor:
    """Of each group of channels by its root mean square, in float32 or wider; the gate comes behind it or before."""
    rows, gate = x.to(wide(x.dtype)), F.silu(z.to(wide(z.dtype)))
    parts = (rows if before else rows * gate).unflatten(-1, (groups, -1))
    normed = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight.to(rows.dtype)
    gated: Tensor = normed * gate if before else normed
    return gated.to(x.dtype)
