"""What is passed by hand, checked: an OptionError says what was asked, what was found, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import parsed
from ringopt.context_parallel.plan.plan_of import NAMES
from ringopt.errors import OptionError
from ringopt.options import KernelName

MASK_DIMS = ("mask batch", "mask heads", "mask rows", "mask keys")


def check_operands(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    """What one rank can check on its shard; what has to match over all ranks they compare (recognize/crosscheck.py)."""
    if not all(isinstance(x, Tensor) for x in (query, key, value)):
        kinds = ", ".join(type(x).__name__ for x in (query, key, value))
        raise OptionError(f"attention takes tensors as query, key, value; found {kinds}")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise OptionError(f"attention takes [B, H, S, D] tensors; found {_shapes(query, key, value)}")
    if not query.is_floating_point():
        raise OptionError(f"attention takes tensors of a floating dtype; found {query.dtype}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise OptionError(f"{heads} query heads over {kv_heads} KV heads need enable_gqa=True")
    if not heads or not kv_heads:
        raise OptionError(f"attention takes heads, one at least; found {_shapes(query, key, value)}")
    if heads % kv_heads:
        raise OptionError(f"{heads} query heads cannot share {kv_heads} KV heads: that is no multiple")


def check_whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Of one process, which has nobody to compare with."""
    (batch, heads, rows, dim), found = query.shape, _shapes(query, key, value)
    if (key.shape[0], value.shape[0]) != (batch, batch) or key.shape[1:3] != value.shape[1:3] or key.shape[3] != dim:
        raise OptionError(
            f"attention: {found} do not fit: batch sizes are equal, query and key have one head dim, and each key has "
            "its value"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise OptionError(f"attention: one dtype for all; found {query.dtype}, {key.dtype}, {value.dtype}")
    if not query.device == key.device == value.device:
        raise OptionError(f"attention: one device for all; found {query.device}, {key.device}, {value.device}")
    if mask is not None and 2 <= mask.dim() <= 4:
        sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        allowed = ((1, batch), (1, heads), (1, rows), (1, key.shape[2]))
        if any(size not in fits for size, fits in zip(sizes, allowed, strict=True)):
            raise OptionError(f"attention: an attn_mask of {list(mask.shape)} does not fit {found}")


def check_mask(mask: Any) -> None:
    """Raises OptionError unless `mask` is None or a tensor of 2 to 4 dims, bool or floating."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(
            f"attention takes an attn_mask of bool (True is seen) or of a floating dtype (added to the scores); found "
            f"{found}"
        )
    if not 2 <= mask.dim() <= 4:
        raise OptionError(f"attention takes an attn_mask of 2 to 4 dims; found {list(mask.shape)}")


def check_causal(is_causal: Any) -> None:
    """Raises OptionError unless `is_causal` is a bool."""
    if not isinstance(is_causal, bool):
        raise OptionError(f"attention(is_causal={is_causal!r}): expected True or False")


def check_numbers(dropout_p: Any, scale: Any) -> None:
    """Raises OptionError unless `dropout_p` is in [0, 1] and `scale` None or finite."""
    if not _is_number(dropout_p) or not 0.0 <= dropout_p <= 1.0:
        raise OptionError(f"attention(dropout_p={dropout_p!r}): a probability is from 0 to 1")
    if scale is not None and not (_is_number(scale) and -math.inf < scale < math.inf):
        raise OptionError(f"attention(scale={scale!r}): a number, or None for 1 / sqrt(head dim)")


def check_layout(layout: Any) -> None:
    """Is there one of this name?"""
    parsed(layout)


def check_names(layout: Any, strategy: Any, kernel: Any) -> None:
    """On one process as well, where nothing follows from them: a script is tried there first."""
    check_layout(layout)
    for what, name, known in (
        ("strategy", strategy, ("auto", *NAMES, "hybrid")),
        ("kernel", kernel, get_args(KernelName)),
    ):
        if name not in known:
            raise OptionError(f"attention({what}={name!r}): expected one of {', '.join(map(repr, known))}")


def pattern_text_of(is_causal: bool, window: Any, sinks: Any, rate: int) -> str:
    """The pattern as text (context_parallel/geometry/pattern.py)."""
    if window is not None and not (type(window) is int and window >= 1):
        raise OptionError(
            f"attention(window={window!r}): a query sees at least 1 key, itself; expected a whole number of keys"
        )
    if sinks is not None and (window is None or type(sinks) is not int or sinks < 0):
        raise OptionError(
            f"attention(sinks={sinks!r}): how many first keys are seen beside a window, or a tensor of one logit for "
            f"each head; window={window}"
        )
    if window is None:
        return "causal" if is_causal else "full"
    more = ((not is_causal, "both"), (sinks, f"sinks={sinks}"), (rate > 1, f"rate={rate}"))
    return f"window({','.join([str(window), *(text for given, text in more if given)])})"


def window_rates(asked: Any, heads: int) -> tuple[int, ...]:
    """Of a window: one of each query head."""
    if asked is None:
        return (1,) * heads
    whole = isinstance(asked, (tuple, list)) and all(type(rate) is int and rate >= 1 for rate in asked)
    if not whole or len(asked) not in (1, heads):
        raise OptionError(
            f"attention(dilation_rates={asked!r}) beside a window: a tuple of one whole number, 1 or more, or of one "
            f"for each of {heads} query heads"
        )
    return tuple(asked) * (heads // len(asked))


def logits_of(sinks: Tensor, query: Tensor) -> Tensor:
    """Of sinks, [1|B, Hq]."""
    batch, heads = query.shape[:2]
    if list(sinks.shape) not in ([heads], [1, heads], [batch, heads]) or not sinks.is_floating_point():
        raise OptionError(
            f"attention(sinks=...) takes one logit for each head, [{heads}] or [1 or {batch}, {heads}] of a floating "
            f"dtype, or how many first keys are seen beside a window; found {list(sinks.shape)} {sinks.dtype}"
        )
    return sinks.reshape(-1, heads)


def padding_of(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """A key padding mask, all that dilated attention takes, as [1|B, 1, 1, keys]."""
    if mask is None:
        return None
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dtype != torch.bool or len(sizes) > 4 or sizes[0] not in (1, batch) or sizes[1:] != (1, 1, keys):
        raise OptionError(
            f"dilated attention takes an attn_mask of keys alone, [{batch}, 1, 1, {keys}] of bool with all keys of the "
            f"sequence (True is seen); found {list(mask.shape)} {mask.dtype}"
        )
    return mask.reshape(sizes)


def counts_of(name: str, asked: Any) -> list[int]:
    """One number or several, of ranks or of rows."""
    counts = [asked] if type(asked) is int else asked
    whole = isinstance(counts, Iterable) and not isinstance(counts, str)
    counts = list(counts) if whole else []
    if not counts or any(type(one) is not int or one < 1 for one in counts):
        raise OptionError(f"{name}={asked!r}: expected whole numbers, 1 or more")
    return counts


def count_of(name: str, asked: Any) -> int:
    """One number, of ranks or of rows."""
    if type(asked) is not int or asked < 1:
        raise OptionError(f"{name}={asked!r}: expected a whole number, 1 or more")
    return asked


def check_model(model: Any) -> None:
    """Of what is traced."""
    if not callable(model) or isinstance(model, type):
        raise OptionError(f"model={model!r}: expected a module or a function, and behind it the inputs of one call")


def dim_of(name: str, x: Any, dim: Any) -> int:
    """`dim` of `x`, from the front."""
    if not isinstance(x, Tensor):
        raise OptionError(f"{name} takes a tensor; found {type(x).__name__}")
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        raise OptionError(f"{name}(dim={dim!r}) of a tensor of sizes {list(x.shape)}: it has dims 0 to {x.dim() - 1}")
    return dim % x.dim()


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
