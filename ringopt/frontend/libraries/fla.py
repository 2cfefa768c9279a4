"""flash-linear-attention (fla 0.3 and later): its chunked recurrences, B T H D, as its signatures have them.

    o, last = chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, ..., cu_seqlens)

The state [B, H, K, V] is of float32. All are affine in it: a decay, and for delta rules a product with k along K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ringopt.frontend.libraries.opaque import LibraryScan
from ringopt.rules.declare import Declaration, ScanRule
from ringopt.scans.segment_map import wide

Axis = Literal["point", "mixed", "free"]
HEADS = {**dict.fromkeys(("q", "k", "v", "g", "beta", "0"), 2), "initial_state": 1, "1": 1}
HEADS |= dict.fromkeys(("A_log", "dt_bias", "g_gamma"), 0)
COMMON = ("initial_state?", "cu_seqlens?")
SCALE = {"scale": "float?", "state_v_first": "bool?"}
DELTA = {"use_qk_l2norm_in_kernel": "bool?"}
GATES = {"use_beta_sigmoid_in_kernel": "bool?", "allow_neg_eigval": "bool?", "use_gate_in_kernel": "bool?"}
BOUNDS = {"safe_gate": "bool?", "lower_bound": "float?"}


def fake(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The result and the last state, of as many heads as v has."""
    packed = given["cu_seqlens"]
    sequences = v.shape[0] if packed is None else packed.shape[0] - 1
    sides = (v.shape[-1], k.shape[-1]) if given.get("state_v_first") else (k.shape[-1], v.shape[-1])
    return v.new_empty(v.shape, dtype=q.dtype), v.new_empty((sequences, v.shape[2], *sides), dtype=wide(v.dtype))


def state_rule(tokens: tuple[str, ...], along_k: Axis) -> Callable[..., Declaration]:
    """Of a state whose map does `along_k` along K, and the same for all V."""

    def says(state_v_first: Any = None, **given: Any) -> Declaration:
        heads = {name: dim for name, dim in HEADS.items() if name in given or name.isdigit()}
        sides: tuple[Axis, Axis] = ("free", along_k) if state_v_first else (along_k, "free")
        return ScanRule(tokens, axes=("point", "point", *sides), additive=("v",), segments="cu_seqlens", heads=heads)

    return says


def of_fla(folder: str, tokens: str, others: str, values: dict[str, str], along_k: Axis) -> LibraryScan:
    """`chunk_*` of a folder of fla.ops."""
    names = tuple(tokens.split())
    rules = state_rule(tuple(name.rstrip("?") for name in names), along_k)
    tensors = (*names, *others.split(), *COMMON)
    return LibraryScan(f"fla.ops.{folder}", f"chunk_{folder}", tensors, values, "output_final_state", fake, rules)


FLA = (
    of_fla("gated_delta_rule", "q k v g beta", "A_log? dt_bias?", {**SCALE, **DELTA, **GATES}, "mixed"),
    of_fla("kda", "q k v g beta", "A_log? dt_bias?", {**SCALE, **DELTA, **GATES, **BOUNDS}, "mixed"),
    of_fla("delta_rule", "q k v beta", "", {"scale": "float?", **DELTA}, "mixed"),
    of_fla("gla", "q k v g", "", SCALE, "point"),
    of_fla("simple_gla", "q k v g?", "g_gamma?", SCALE, "free"),
)
