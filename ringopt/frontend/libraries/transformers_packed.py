"""Attention of packed sequences in models of transformers, as one attention with a mask.

    if is_flash_attention_requested(config):
        out, _ = attention_interface(self, q, k, v, attention_mask=None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, ...)
    else:
        splits = [torch.split(x, lengths.tolist(), dim=2) for x in (q, k, v)]
        out = torch.cat([attention_interface(self, q, k, v, attention_mask=None, ...)[0] for q, k, v in zip(*splits)])

Vision towers are written so: of each image (or window of one) the patches see each other. Only data say how many images
there are, and Dynamo ends its graph in each layer. Where a backend takes sizes that data decide, and the attention is
that of SDPA, Dynamo is told to trace the first branch, and SDPA is given what it would ignore: a mask of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ringopt.frontend.data_sizes.traced_again import takes_sizes
from ringopt.torch_compat.dynamo import backends_compiling
from ringopt.torch_compat.dynamo_calls import in_the_place_of_calls, not_traced
from ringopt.torch_compat.operators import ASSERT_TENSOR

ASKED = "is_flash_attention_requested"
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def teach_packed(asked: Callable[..., Any], sdpa: Callable[..., Any]) -> None:
    """Of transformers' functions `is_flash_attention_requested` and `sdpa_attention_forward`."""
    form = masked(sdpa)

    def requested(*args: Any, **kwargs: Any) -> bool:
        return True

    def in_place_of_asking(code: CodeType, names: Mapping[str, Any]) -> Callable[..., Any] | None:
        packed = attends_packed(code) and names.get("attention_mask") is None and sdpa in names.values()
        return requested if packed and takes_sizes(backends_compiling()) else None

    def in_place_of_attention(code: CodeType, names: Mapping[str, Any]) -> Callable[..., Any] | None:
        return form if in_place_of_asking(code, names) else None

    in_the_place_of_calls(asked, sdpa, in_place_of_asking, in_place_of_attention)


def attends_packed(code: CodeType) -> bool:
    """Whether a function has both branches."""
    keywords = (name for each in code.co_consts if isinstance(each, tuple) for name in each)
    return ASKED in code.co_names and PACKED[0] in keywords and any("tolist" in each.co_names for each in within(code))


def within(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from within(each)


def masked(sdpa: Callable[..., Any]) -> Callable[..., Any]:
    """SDPA of packed sequences. One with another mask is left to the program."""
    untraced = not_traced(sdpa)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **given: Any) -> Any:
        if mask or given["attention_mask"] is not None:
            return untraced(module, query, key, value, *mask, **given)
        packed = {name: given.pop(name, None) for name in PACKED}
        ends, others = (packed[name] for name in PACKED[:2])
        of_queries = sequences(ends, query)
        of_keys = of_queries if others is ends else sequences(others, key)
        given["attention_mask"] = of_queries[:, None] == of_keys[None, :]
        return sdpa(module, query, key, value, **given)

    return attend


def sequences(ends: Tensor, x: Tensor) -> Tensor:
    """The number of the sequence of each token of x [B, H, S, D], all of which have to be in one, as `split` asks."""
    starts = ends - ends[0]
    whole = (starts[-1] == x.shape[2]) & (starts.diff() >= 0).all()
    ASSERT_TENSOR[-1](whole, "the lengths of packed sequences do not add up to their tokens")
    return torch.searchsorted(starts, torch.arange(x.shape[2], device=x.device, dtype=starts.dtype), right=True)
