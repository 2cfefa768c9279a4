"""The subgraph that makes a mask becomes a pattern, a term over (b, h, q, k), and the small tensors it reads.

    mask = (k <= q) & attention_mask[:, None, None, :]           # [B, 1, n, n]
    y = attention(q, k, v, mask, [], ..., "full", "")
        ->
    y = attention(q, k, v, None, [attention_mask], ..., "causal", '{"parts": ["visible"], ...}')

Before: functional graph, every attention a `ringopt::attention` node.
After: no [n, n] mask is computed for a site, or the site keeps its mask and a refusal that says why. Equal numbers:
conditions and biases are the program's own ops (ringopt/recognize/lift.py), and what does not depend on an input is
compared with the mask of the program here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx
from torch import Tensor

from ringopt.calls import AttentionCall
from ringopt.expr.bands import Known
from ringopt.expr.evaluate import evaluate
from ringopt.expr.mask import block_coordinates
from ringopt.expr.terms import Term
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import requires_grad, shape_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import at_hand, formula
from ringopt.ops import operators
from ringopt.pipeline import Context, Pass
from ringopt.recognize.additive_mask import peel
from ringopt.recognize.crosscheck import of_mask
from ringopt.recognize.lift import Cone, Unreadable
from ringopt.recognize.reading import Reading, reading_of
from ringopt.recognize.row_sources import OwnRows, element

# A mask of more elements is compared at some blocks instead of whole.
WHOLE = 1 << 22


@dataclass(frozen=True)
class ClassifyMask(Pass):
    """Replaces mask tensors [B, H, Sq, Sk] by a pattern and an expression, read off the graph that makes them."""

    name = "classify_mask"
    reads = ("values",)
    writes = ("relied_on", "sites")

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        reader = Reader(gm.graph, context)
        for node, info in context.sites.items():
            if node.target is not operators.attention.default:
                continue
            call = AttentionCall.of(node)
            if call.attn_mask is None or call.pattern != "full":
                continue
            found = reader.read(call, call.attn_mask)
            if isinstance(found, Refusal):
                info.pattern, info.refusal = "mask", found.sentence
                continue
            read = {"sources": list(found.sources), "pattern": found.pattern, "mask": found.mask.text}
            call.replace(attn_mask=None, **read).write(node)
            info.pattern = found.name
            info.notes += found.notes


class Reader:
    """Reads the masks of one graph; sites that share a mask share its reading."""

    def __init__(self, graph: fx.Graph, context: Context):
        self.constants = Constants(graph, context.values, context.relied_on)
        self.carries = requires_grad(graph)
        self.found: dict[tuple[object, ...], Reading | Refusal] = {}

    def read(self, call: AttentionCall, given: fx.Node) -> Reading | Refusal:
        sizes = dict(zip("bhqk", (*shape_of(call.q)[:3], call.rows[1]), strict=True))
        key = (given, *map(formula, sizes.values()))
        if key not in self.found:
            self.found[key] = self.reading(given, Cone(self.constants, sizes))
        return self.found[key]

    def reading(self, given: fx.Node, cone: Cone) -> Reading | Refusal:
        learned: Callable[[fx.Node], bool] = self.carries.__getitem__
        try:
            term = element(cone, given, cone.index(shape_of(given), "bhqk"))
            term = OwnRows(self.carries).of(term, cone.stops, cone)
        except Unreadable as problem:
            return problem.refusal
        peeled = peel(term, cone, learned)
        reading = reading_of(peeled.conditions, peeled.bias, learned, known=Known(cone.known, cone.sizes))
        return check(reading, given, term, cone) or reading


def check(reading: Reading, given: fx.Node, term: Term, cone: Cone) -> Refusal | None:
    """Against the mask of the program, where no input reaches it."""
    if not cone.is_known(term) or any(source not in cone.known for source in reading.sources):
        return None
    sizes = {name: at_hand(size) for name, size in cone.sizes.items()}
    whole = cone.constants.get(given) if math.prod(map(at_hand, shape_of(given))) <= WHOLE else None

    def original(rows: range, keys: range) -> Tensor:
        place = block_coordinates(sizes["b"], sizes["h"], rows, keys)
        return whole if whole is not None else evaluate(term, place, cone.known)

    said = of_mask(reading, sizes, cone.known, term.dtype, original, whole is not None)
    return Refusal(said, given) if said else None
