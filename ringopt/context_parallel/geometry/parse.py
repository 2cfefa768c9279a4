"""Attention patterns by their texts, such as "causal" or "window(4096)"."""

from __future__ import annotations

import re
from functools import lru_cache

from ringopt.context_parallel.geometry.block_sparse import blocks_of
from ringopt.context_parallel.geometry.pattern import Full, Pattern, Window
from ringopt.context_parallel.geometry.segmented import structure_of
from ringopt.errors import OptionError

WINDOW = re.compile(r"window\((\d+)(,both)?\)")


@lru_cache(maxsize=4096)
def pattern_of(text: str, q_length: int, kv_length: int) -> Pattern:
    """The pattern that `text` names: "full", "causal", "window(4096)" (causal), "window(4096,both)", one of
    segmented.py: "window(4096,sinks=4)", "window(4096,both,sinks=4)", "prefix(64)", "chunked(128)" (causal),
    "chunked(128,both)", "documents(0,5,17)" (causal), "documents(0,5,17,both)", or of block_sparse.py:
    "blocks(64x64;0:1;0:1+2:3)" (causal), "blocks(64x64;0:1;0:1+2:3,both)". "causal(rate=2)", "full(rate=2)" and windows
    that end in ",rate=2)" see every second key of these (strided.py).

    Raises OptionError for another text, PlanError for a length or a width below 1.
    """
    if text in ("full", "causal"):
        return Full(q_length, kv_length, text == "causal")
    if window := WINDOW.fullmatch(text):
        return Window(q_length, kv_length, window[2] is None, int(window[1]))
    if (structure := structure_of(text, q_length, kv_length)) is not None:
        return structure
    if (blocks := blocks_of(text, q_length, kv_length)) is not None:
        return blocks
    raise OptionError(
        f"attention pattern {text!r} is unknown; patterns are 'full', 'causal', 'window(4096)', 'window(4096,both)', "
        "'window(4096,sinks=4)', 'prefix(64)', 'chunked(128)', 'chunked(128,both)', 'documents(0,5,17)', "
        "'documents(0,5,17,both)', 'causal(rate=2)', 'full(rate=2)', 'window(4096,rate=2)' "
        "and 'blocks(64x64;0:1;0:1+2:3)' (of each block of queries the blocks of keys)"
    )
