"""How ranks share a recurrence whose step is not affine in what it carries (a GRU, a gate that reads the state).

by heads   a batch, heads or channels that know nothing of each other part alike: each rank has all steps of its own
in turn    each rank has its own steps, and runs them when the one before it hands on what it carries: as long as on one
           process, but nothing that has tokens is gathered
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.ir.nodes import op_name, shape_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import elements, is_open
from ringopt.scans.affine import prove_affine
from ringopt.scans.body import from_text
from ringopt.scans.call import ScanCall
from ringopt.scans.independent import independent_dims
from ringopt.scans.kernel import ScanKernel
from ringopt.scans.trace import Kinds


def can_be_shared(text: str, kinds: Kinds, steps: Any, ranks: int, tokens: set[int]) -> bool:
    """In either way; by heads where the number of steps is known. Not where the steps are no `tokens` of an attention,
    and the loop has many of these that know nothing of each other: it goes over levels of each, which ranks share as it
    stands."""
    found = independent_dims(text, kinds)
    if elements([steps]) not in tokens and any(one.size in tokens for one in found):
        return False
    heads = not is_open(steps) and any(one.size % ranks == 0 for one in found)
    return heads or pays_in_turn(text, kinds, steps, ranks)


def attended_lengths(graph: fx.Graph) -> set[int]:
    """How many tokens the attentions of a graph have, at the sizes at hand."""
    calls = (node for node in graph.nodes if op_name(node) == "scaled_dot_product_attention")
    return {elements([shape_of(x)[-2]]) for node in calls for x in node.args[:2] if isinstance(x, fx.Node)}


def pays_in_turn(text: str, kinds: Kinds, steps: Any, ranks: int) -> bool:
    """Whether what is handed on is less than what the steps read, which would be gathered: it is not in a loop over
    layers, which carries a whole sequence. `kinds` are those of the operands of a step."""
    body = from_text(text)
    carries, xs = kinds[: body.carries], kinds[body.carries : body.carries + body.xs]
    floating = all(kind.dtype.is_floating_point for kind in carries)
    return floating and 2 * ranks * sum(kind.bytes for kind in carries) <= elements([steps]) * sum(x.bytes for x in xs)


def runs_in_turn(node: fx.Node) -> bool:
    """Whether the ranks run a recurrence of a sharded graph so."""
    kernel = OpCall.of(node).arguments.get("kernel")
    if kernel is not None:
        return ScanKernel.read(kernel).axes is None
    call = ScanCall.of(node)
    return isinstance(prove_affine(call.text, call.kinds), Refusal)
