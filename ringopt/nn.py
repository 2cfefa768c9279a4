"""Dilated attention as modules, with the layouts and the argument names of torch.

They compute on the whole sequence that they are given, on one device. Compiled with backend="ring" they are sites of
their model as any attention is, and the sequence is spread over the ranks.

    layer = nn.TransformerEncoderLayer(768, 16, batch_first=True)
    layer.self_attn = ringopt.nn.MultiheadDilatedAttention(768, 16, (2048, 4096), (1, 2), batch_first=True)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringopt.arguments import check_causal, check_numbers, check_operands
from ringopt.context_parallel.geometry.dilation import Dilation
from ringopt.errors import OptionError
from ringopt.ops import operators
from ringopt.ops.dropout import SEEDS

__all__ = ["DilatedAttention", "MultiheadDilatedAttention"]

COMPAT = (None, "torchscale")


class DilatedAttention(nn.Module):
    """Dilated self-attention (Ding et al., LongNet, 2023), called as `F.scaled_dot_product_attention` is.

    segment_lengths, dilation_rates   (w, r) of each pattern: of each segment of w rows head j takes every r-th one
    dilation_offsets                  from which row on: "paper" (j mod r) or "torchscale" (j // ceil(heads / r))
    compat                            "torchscale": the outputs and gradients of microsoft/torchscale, for models that
                                      were trained with it: its offsets, weights of the patterns without gradient, and
                                      without causal segments padded with keys of zeros

    Raises OptionError for what is no dilation. Lengths need not divide one another, nor the sequence. A place (token,
    head) that no pattern takes is 0, with a warning.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dilation_offsets: str = "paper",
        compat: str | None = None,
    ):
        super().__init__()
        if compat not in COMPAT:
            raise OptionError(f"compat={compat!r}: expected one of {', '.join(map(repr, COMPAT))}")
        mixing = compat == "torchscale"
        offsets = "torchscale" if mixing else dilation_offsets
        self.dilation, causal = (
            Dilation.asked(segment_lengths, dilation_rates, is_causal, offsets, mixing) for is_causal in (False, True)
        )
        self.patterns = {False: self.dilation.text, True: causal.text}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """[B, Hq, S, Dv] of query [B, Hq, S, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]. `attn_mask` says which keys
        are no padding, [1|B, 1, 1, S] of bool; causal beside it is for `is_causal`. Which weights are dropped with
        probability `dropout_p` follows from one number of the default generator. Raises OptionError."""
        if not torch.compiler.is_compiling():
            check_operands(query, key, value, enable_gqa)
            check_causal(is_causal)
            check_numbers(dropout_p, scale)
        shapes = [list(x.shape) for x in (query, key, value)]
        if not query.dim() == key.dim() == value.dim() == 4 or query.shape[2] != key.shape[2]:
            raise OptionError(f"dilated self-attention takes [B, H, S, D] tensors of one S; found {shapes}")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise OptionError(f"{query.shape[1]} query heads over {key.shape[1]} KV heads need enable_gqa=True")
        compiling = torch.compiler.is_compiling()
        if not compiling and (sentence := self.dilation.sentence_of_left_out(query.shape[2], query.shape[1])):
            warnings.warn(sentence, stacklevel=2)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        seed = torch.randint(SEEDS, (), dtype=torch.int64, device=query.device) if dropout_p > 0 else None
        pattern = self.patterns[is_causal]
        out: Tensor = operators.attention(query, key, value, attn_mask, [], None, seed, pattern, "", dropout_p, scale)
        return out

    def extra_repr(self) -> str:
        return self.dilation.text


class MultiheadDilatedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of a sequence with itself, dilated. Its parameters have the names and shapes of torch's,
    so a state dict of one is that of the other.

    Raises OptionError for what is no dilation.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        dilation_offsets: str = "paper",
        compat: str | None = None,
    ):
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype)
        # torch's encoder layer would compute undilated attention from the weights of a module that says True.
        self._qkv_same_embed_dim = False
        self.attention = DilatedAttention(segment_lengths, dilation_rates, dilation_offsets, compat)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(output, None), in the layout of the query: [S, B, E], with `batch_first` [B, S, E], or [S, E].

        `key_padding_mask` [B, S] is True for padding, or as nn.TransformerEncoderLayer makes it: 0, and -inf for
        padding. `attn_mask` may only be there to say causal, beside `is_causal`. Raises OptionError.
        """
        if need_weights:
            raise OptionError("MultiheadDilatedAttention(need_weights=True): no rank ever holds the weights")
        if attn_mask is not None and not is_causal:
            raise OptionError(
                "MultiheadDilatedAttention takes no attn_mask but with is_causal=True, where it says the same; padding "
                "is for key_padding_mask"
            )
        batched = query.dim() == 3
        operands = [x if batched else x.unsqueeze(0) for x in (query, key, value)]
        if batched and not self.batch_first:
            operands = [x.transpose(0, 1) for x in operands]
        bias = self.in_proj_bias
        weights, biases = self.in_proj_weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
        heads = [
            F.linear(x, weight, bias).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip(operands, weights, biases, strict=True)
        ]
        seen = None if key_padding_mask is None else seen_of(key_padding_mask)[:, None, None]
        dropout_p = self.dropout if self.training else 0.0
        out = self.out_proj(self.attention(*heads, seen, dropout_p, is_causal).transpose(1, 2).flatten(2))
        if batched and not self.batch_first:
            out = out.transpose(0, 1)
        return (out if batched else out.squeeze(0)), None


def seen_of(padding: Tensor) -> Tensor:
    """[B, S] bool, True for what is no padding, of a key_padding_mask [B, S] or [S]."""
    padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
    if padding.dtype == torch.bool:
        return ~padding
    hidden = padding == float("-inf")
    if not torch.compiler.is_compiling() and bool((padding.masked_fill(hidden, 0.0) != 0).any()):
        raise OptionError("key_padding_mask: expected bool, True for padding, or numbers that are 0 and -inf")
    return ~hidden
