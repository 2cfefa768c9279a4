"""FLOPs that a rank spends when an operator runs, 2 a multiplication: the formulas behind the table of traits
(traits.py). Of attention, only the pairs that the pattern's structure lets see each other.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch.fx as fx

from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.cost.simulate import flops_of, pairs_of
from ringopt.dims.op_families import TRANSPOSED_CONVOLUTIONS
from ringopt.dims.products import is_counted, summed
from ringopt.ir.nodes import op_name
from ringopt.ops.picked_sizes import picked_evenly
from ringopt.ops.scan_sizes import affine_of, graphs_run, stages_of, step_of
from ringopt.ops.sized_call import Operand, SizedCall
from ringopt.ops.traffic import dilated_plan, heads_of, ring_plan


def attention(call: SizedCall) -> int:
    """On one device."""
    if is_dilated(call["pattern"]):
        return replace(heads_of(call), q_heads=1).flops(dilated_plan(call).pairs(0), False)
    return pairs_by_sdpa(call, "qkv", call["pattern"])


def sdpa(call: SizedCall) -> int:
    """torch's own; its `attn_mask` may hide more."""
    return pairs_by_sdpa(call, ("query", "key", "value"), "causal" if call["is_causal"] else "full")


def pairs_by_sdpa(call: SizedCall, names: str | tuple[str, ...], pattern: str) -> int:
    """FLOPs of the two products of SDPA over the visible pairs of `pattern`; `names` are those of q, k and v."""
    query, key, value = (call[name].sizes for name in names)
    if len(query) < 2 or not query[-2] or not key[-2]:
        return 0
    rows, keys = range(query[-2]), range(key[-2])
    pairs = pattern_of(pattern, len(rows), len(keys)).pairs(rows, keys)
    return int(2 * prod(query[:-2]) * (query[-1] + value[-1]) * pairs)


def ring(call: SizedCall) -> int:
    """FLOPs of this rank's forward."""
    return of_plan(call, False)


def ring_back(call: SizedCall) -> int:
    """FLOPs of this rank's backward."""
    return of_plan(call, True)


def of_plan(call: SizedCall, backward: bool) -> int:
    """FLOPs of a plan on this rank; where heads are exchanged, of its share of them."""
    plan, heads = ring_plan(call), heads_of(call)
    if isinstance(plan, HeadExchange):
        share = replace(heads, q_heads=len(plan.share(call.rank)))
        return share.flops(pairs_of(plan.whole, call.rank // plan.node), backward)
    return flops_of(plan, heads, call.rank, backward)


def dilated(call: SizedCall) -> int:
    """Pairs are those of all heads."""
    return replace(heads_of(call), q_heads=1).flops(dilated_plan(call).pairs(call.rank), False)


def dilated_back(call: SizedCall) -> int:
    """FLOPs of this rank's backward; a pair of a dilated plan already counts its heads."""
    return replace(heads_of(call), q_heads=1).flops(dilated_plan(call).pairs(call.rank), True)


def windows(call: SizedCall) -> int:
    """FLOPs of a convolution."""
    return 2 * call.result.count * int(call["weight"].count_from(1))


def windows_back(call: SizedCall) -> int:
    """The gradients of the rows and of the weight."""
    return 4 * int(call["grad"].count * call["weight"].count_from(1))


# ---- tokens picked when the program runs --------------------------------------------------------------------------
def picked(call: SizedCall) -> int:
    """As if each token went to as many places as a mask has for it, shared evenly by all that pick."""
    return products(picked_evenly(call["body"], tuple((x.sizes, x.dtype) for x in call["operands"])))


def picked_back(call: SizedCall) -> int:
    """Once more, and two products for each."""
    return 3 * picked(call)


# ---- scans -----------------------------------------------------------------------------------------------------------
def product(node: fx.Node, call: SizedCall) -> int:
    """FLOPs of an operator of ATen; 0 for what is no product."""
    if op_name(node) in TRANSPOSED_CONVOLUTIONS:  # each row goes into several
        return 2 * int(call["input"].count * call["weight"].count_from(1))
    if not is_counted(node):
        return 0
    operand, first = summed(node)
    return 2 * call.result.count * int(call.sized(operand).count_from(first))


def products(graph: fx.Graph) -> int:
    """FLOPs of a graph at sizes that are numbers."""
    return sum(product(node, SizedCall.of(node, 1, 0)) for node in graph.nodes)


def steps(call: SizedCall) -> int:
    """FLOPs of a scan: those of a step, so many times."""
    first: Operand = call["xs"][0]
    return first.size(0) * products(step_of(call).module.graph)


def carried(call: SizedCall) -> int:
    """FLOPs of a scan that is affine, of what it carries alone."""
    first: Operand = call["xs"][0]
    return first.size(0) * sum(products(stage.step.graph) for stage in stages_of(call))


def steps_back(call: SizedCall) -> int:
    """Two products for each, and the states again unless they were kept."""
    return (2 if call.arguments.get("kept") else 3) * steps(call)


def segments(call: SizedCall) -> int:
    """Of a scan over ranks: the steps of this one, and what makes the map of its segments."""
    first: Operand = call["xs"][0]
    return steps(call) + first.size(0) * sum(many * products(graph) for graph, many in graphs_run(call))


def segments_back(call: SizedCall) -> int:
    """The states again, a walk back for every level, and one for the operands."""
    levels = max(1, len(affine_of(call).levels))
    return (1 + 2 * (1 + levels)) * steps(call)
