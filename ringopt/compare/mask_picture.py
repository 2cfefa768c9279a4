"""The mask of an attention as a picture in blocks: what is seen, and who computes it in which step of the exchange.

Read off the same plan that the executor runs: a block is computed by the rank, and in the step, that has its middle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import ascii_lowercase, digits
from typing import Any

import torch.fx as fx

from ringopt.compare.program_files import TENSORS
from ringopt.context_parallel.geometry.dilation import dilation_of, is_dilated
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.expr.mask import Mask
from ringopt.ir.nodes import value_of
from ringopt.output.drawn import MaskPicture

TORCH = "aten::scaled_dot_product_attention"
BLOCKS = 24  # a mask is drawn in about as many blocks a side
MOST = 32  # and in no more, so that each rank has blocks of its own
DIGITS = digits + ascii_lowercase
ALL_RANKS, NOTHING = "*", "."


def pattern_text(name: str, arguments: Mapping[str, Any]) -> str:
    """The structure that an attention operator is called with: "causal", "window(64)", or "full" without one."""
    if name == TORCH:
        return "causal" if arguments.get("is_causal") else "full"
    return str(arguments["pattern"])


def mask_picture(
    name: str, arguments: Mapping[str, Any], plan: Plan | None = None, number: Callable[[Any], int] | None = None
) -> MaskPicture | None:
    """None where sizes are open, unless they have a `number`. `plan` says who computes what."""
    names = ("query", "key", "value") if name == TORCH else ("q", "k", "v")
    query, key, _values = (value_of(arguments[of]) for of in names)
    rows, keys = (
        value_of(arguments[length]) if isinstance(arguments.get(length), fx.Node) else arguments.get(length, own)
        for length, own in (("q_length", length_of(query)), ("kv_length", length_of(key)))
    )
    given = arguments.get("attn_mask") is not None
    if number is not None and None not in (rows, keys) and not arguments.get("mask"):  # which may name open sizes
        rows, keys = number(rows), number(keys)
    if not isinstance(rows, int) or not isinstance(keys, int):
        return None
    text = pattern_text(name, arguments)
    if is_dilated(text):
        return dilated_picture(text, arguments.get("length", rows), query.shape[1])
    return picture_of(text, arguments.get("mask") or "", rows, keys, plan, given)


def picture_of(
    text: str, mask_text: str, rows: int, keys: int, plan: Plan | None = None, given: bool = False
) -> MaskPicture:
    """Of a pattern and a mask by their texts. `given`: a tensor hides more."""
    seen = _seen(text, mask_text, rows, keys, (given, plan.ranks if plan is not None else 1))
    return MaskPicture(seen, *(_computed(plan, rows, keys) if plan is not None else ()))


@lru_cache(maxsize=256)
def _seen(text: str, mask_text: str, rows: int, keys: int, how: tuple[bool, int]) -> tuple[str, ...]:
    """`how`: whether a tensor hides more, and the number of ranks. Layers are alike: each is drawn once."""
    pattern, mask, lines = pattern_of(text, rows, keys), Mask.parse(mask_text), []
    given, ranks = how
    for some in _blocks(rows, ranks):
        kinds = []
        for others in _blocks(keys, ranks):
            banded, seen = pattern.kind(some, others).value, mask.kind(_axis_ranges(some, others), {})
            if "empty" in (banded, seen):
                kinds.append(NOTHING)
            elif given or (seen == "partial" and mask.sources):
                kinds.append("?")
            else:
                kinds.append("#" if banded == seen == "full" else "/")
        lines.append("".join(kinds))
    return tuple(lines)


def length_of(value: Any) -> Any:
    """Of a tensor [..., rows, width]; None of what is none."""
    return value.shape[-2] if isinstance(value, TENSORS) else None


def dilated_picture(text: str, length: Any, heads: int) -> MaskPicture:
    """Of all heads together; who computes what is not drawn."""
    mark, sees = {Kind.EMPTY: NOTHING, Kind.FULL: "#", Kind.PARTIAL: "/"}, dilation_of(text).kind
    blocks = _blocks(length, 1) if isinstance(length, int) else []
    return MaskPicture(tuple("".join(mark[sees(some, others, length, heads)] for others in blocks) for some in blocks))


def _axis_ranges(rows: range, keys: range) -> dict[str, range]:
    return {"b": range(1), "h": range(1), "q": rows, "k": keys}


def _blocks(length: int, ranks: int) -> list[range]:
    """Of equal length; where that can be, each of the two chunks of a rank has equally many."""
    many = BLOCKS // (2 * ranks) * 2 * ranks or min(2 * ranks, MOST)
    many = min(many, length)
    return [range(length * i // many, length * (i + 1) // many) for i in range(many)]


@lru_cache(maxsize=256)
def _computed(plan: Plan, rows: int, keys: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of each block the rank and the step; () where ranks have no digits."""
    middles = [[(block[0] + block[-1]) // 2 for block in _blocks(length, plan.ranks)] for length in (rows, keys)]
    if isinstance(plan, HeadExchange):
        return tuple(ALL_RANKS * len(middles[1]) for _ in middles[0]), ()
    if plan.ranks > len(DIGITS):
        return (), ()
    ranks, steps = ([[NOTHING] * len(middles[1]) for _ in middles[0]] for _ in range(2))
    for rank in range(plan.ranks):
        for number, step in enumerate(plan.forward(rank)):
            for block in step.blocks:
                for i in _inside(middles[0], block.queries):
                    for j in _inside(middles[1], block.keys):
                        ranks[i][j], steps[i][j] = DIGITS[rank], DIGITS[min(number, len(DIGITS) - 1)]
    return tuple(map("".join, ranks)), tuple(map("".join, steps))


def _inside(middles: Sequence[int], rows: range) -> range:
    return range(bisect_left(middles, rows.start), bisect_left(middles, rows.stop))
