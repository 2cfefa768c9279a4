"""causal-conv1d: its convolution over the last tokens of each channel, spelled out in torch, of which ranks send each
other K - 1 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ringopt.torch_compat.dynamo_calls import not_traced


def conv_form(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of `causal_conv1d_fn`. With states before or behind the tokens it is left to the library."""
    untraced = not_traced(original)

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        final_states_out: Tensor | None = None,
        activation: str | None = None,
    ) -> Any:
        if initial_states is not None or return_final_states or final_states_out is not None:
            how = (seq_idx, initial_states, return_final_states, final_states_out, activation)
            return untraced(x, weight, bias, *how)
        return convolved(x, weight, bias, seq_idx, activation)

    return causal_conv1d_fn


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str | None) -> Tensor:
    """[B, D, L] by [D, K], computed and activated in the type of the weight. `seq_idx` [B, L] says which packed
    sequence a token is of: it reads no other."""
    rows, taps = x.to(weight.dtype), weight.shape[-1]
    if seq_idx is None:
        out = F.conv1d(rows, weight.unsqueeze(1), bias, padding=taps - 1, groups=x.shape[1])[..., : x.shape[-1]]
    else:
        out = rows * weight[:, -1:]
        for back in range(1, taps):
            before, of = F.pad(rows, (back, 0))[..., : x.shape[-1]], F.pad(seq_idx, (back, 0), value=-1)
            same = of[..., : x.shape[-1]] == seq_idx
            out = out + before * same[:, None] * weight[:, taps - 1 - back : taps - back]
        out = out if bias is None else out + bias[:, None]
    return (F.silu(out) if activation in ("silu", "swish") else out).to(x.dtype)
