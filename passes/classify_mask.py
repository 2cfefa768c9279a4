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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.fx as fx
from torch import Tensor

from ringopt.calls import AttentionCall
from ringopt.expr.bands import Known
from ringopt.expr.evaluate import evaluate
from ringopt.expr.mask import ScoreBlock
from ringopt.expr.terms import Term
from ringopt.ir.nodes import shape_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import at_hand, formula
from ringopt.ops import operators
from ringopt.recognize.additive_mask import peel
from ringopt.recognize.crosscheck import of_mask
from ringopt.recognize.lift import Cone, Unreadable
from ringopt.recognize.reading import Reading, reading_of
from ringopt.recognize.row_sources import OwnRows, element
from ringopt.rewrite import Facts, Rewrite

# A mask of more elements is compared at some blocks instead of whole.
WHOLE = 1 << 22


@dataclass(frozen=True)
class Masked:
    """An attention with a mask that was not read yet, and what reading it gives."""

    node: fx.Node
    reading: Reading | Refusal


@dataclass(frozen=True)
class ClassifyMask(Rewrite[fx.Node, Masked]):
    """Replaces mask tensors [B, H, Sq, Sk] by a pattern and an expression, read off the graph that makes them."""

    name = "classify_mask"
    reads = ("values",)
    writes = ("relied_on", "sites")

    def subjects(self, facts: Facts) -> Iterable[fx.Node]:
        return facts.context.sites

    def match(self, node: fx.Node, facts: Facts) -> Masked | None:
        if node.target is not operators.attention.default:
            return None
        call = AttentionCall.of(node)
        if call.attn_mask is None or call.pattern != "full":
            return None
        return Masked(node, read(call, call.attn_mask, facts))

    def check(self, found: Masked, facts: Facts) -> Refusal | None:
        return found.reading if isinstance(found.reading, Refusal) else None

    def rewrite(self, found: Masked, facts: Facts) -> None:
        reading, info = found.reading, facts.context.sites[found.node]
        assert isinstance(reading, Reading)
        text, sources = reading.mask.text, list(reading.sources)
        call = AttentionCall.of(found.node).replace(attn_mask=None, sources=sources, pattern=reading.pattern, mask=text)
        call.write(found.node)
        info.pattern = reading.name
        info.notes += reading.notes

    def refuse(self, found: Masked, refusal: Refusal, facts: Facts) -> None:
        info = facts.context.sites[found.node]
        info.pattern, info.refusal = "mask", refusal.sentence


def read(call: AttentionCall, given: fx.Node, facts: Facts) -> Reading | Refusal:
    """The mask `given`; sites that share one, and their sizes, share its reading."""
    sizes = dict(zip("bhqk", (*shape_of(call.q)[:3], call.rows[1]), strict=True))
    key = (given, *map(formula, sizes.values()))
    return facts.once(key, lambda: reading_of_mask(given, Cone(facts.constants, sizes), facts.carries))


def reading_of_mask(given: fx.Node, cone: Cone, carries: dict[fx.Node, bool]) -> Reading | Refusal:
    """A mask [B, H, Sq, Sk] as a pattern and an expression, or why it cannot be read."""
    learned: Callable[[fx.Node], bool] = carries.__getitem__
    try:
        term = element(cone, given, cone.index(shape_of(given), "bhqk"))
        term = OwnRows(carries).of(term, cone.stops, cone)
    except Unreadable as problem:
        return problem.refusal
    peeled = peel(term, cone, learned)
    reading = reading_of(peeled.conditions, peeled.bias, learned, known=Known(cone.known, cone.sizes))
    return contradicted(reading, given, term, cone) or reading


def contradicted(reading: Reading, given: fx.Node, term: Term, cone: Cone) -> Refusal | None:
    """Against the mask of the program, where no input reaches it."""
    if not cone.is_known(term) or any(source not in cone.known for source in reading.sources):
        return None
    sizes = {name: at_hand(size) for name, size in cone.sizes.items()}
    whole = cone.constants.get(given) if math.prod(map(at_hand, shape_of(given))) <= WHOLE else None

    def original(rows: range, keys: range) -> Tensor:
        place = ScoreBlock(sizes["b"], sizes["h"], rows, keys).coordinates()
        return whole if whole is not None else evaluate(term, place, cone.known)

    difference = of_mask(reading, sizes, cone.known, term.dtype, original, whole is not None)
    return Refusal(difference, given) if difference else None
