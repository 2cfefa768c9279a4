"""Every call of flex_attention becomes the canonical node.

    product = q @ k.mT
    scores = where(k <= q, product / 8 + table[h, k - q], -inf)         # mask_mod, score_mod
    y = ringopt::flex(q, k, v, product, scores)
        ->
    y = ringopt::attention(q, k, v, None, [table], None, None, "causal", "{...}", 0, 1/8)

What a score is made of is read element by element (ringopt/recognize/scores.py), as for attention that is spelled out.
After: no node is over queries and keys for the sake of flex_attention. Where a score cannot be read the whole graph is
refused, because only the original operator can do without scores of all pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from ringopt.calls import AttentionCall, FlexOpCall
from ringopt.expr.bands import Known
from ringopt.expr.simplify import substitute
from ringopt.expr.terms import load, loads, score
from ringopt.ir.nodes import descendants, shape_of, value_of
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ops import operators
from ringopt.recognize.crosscheck import reading_of_scores
from ringopt.recognize.emit import multiplied
from ringopt.recognize.lift import Cone, Unreadable
from ringopt.recognize.reading import Reading
from ringopt.recognize.scores import NotAttention, Scores, peel_scores
from ringopt.rewrite import Facts, Rewrite

OF_TORCH = re.compile(r'\s*File "[^"]*nn/attention/flex_attention\.py"')  # frames below the line of the program


@dataclass(frozen=True)
class Read:
    """What is done to the product, and how the report and `ringopt::attention` say it."""

    scores: Scores
    reading: Reading


@dataclass(frozen=True)
class Called:
    """A call of flex_attention, and what reading its scores gives."""

    node: fx.Node
    call: FlexOpCall
    found: Read | Refusal


@dataclass(frozen=True)
class FindFlex(Rewrite[fx.Node, Called]):
    """Rewrites flex_attention as `ringopt::attention`, its score_mod and mask_mod read as expressions."""

    name = "find_flex"
    reads = ("values",)
    writes = ("relied_on", "sites")

    def subjects(self, facts: Facts) -> Iterable[fx.Node]:
        calls: list[fx.Node] = facts.graph.find_nodes(op="call_function", target=operators.flex.default)
        return calls

    def match(self, node: fx.Node, facts: Facts) -> Called:
        call = FlexOpCall.of(node)
        return Called(node, call, read(node, call, facts))

    def check(self, found: Called, facts: Facts) -> Refusal | None:
        return found.found if isinstance(found.found, Refusal) else None

    def refuse(self, found: Called, refusal: Refusal, facts: Facts) -> None:
        raise GraphRefused(refusal)

    def rewrite(self, found: Called, facts: Facts) -> None:
        """Replaces one call; factors of the scores that a query has for itself are multiplied into q."""
        graph, node, call = facts.graph, found.node, found.call
        assert isinstance(found.found, Read)
        scores, reading = found.found.scores, found.found.reading
        node.meta["stack_trace"] = OF_TORCH.split(node.meta.get("stack_trace") or "")[0]
        with graph.inserting_before(node):
            q = multiplied(graph, call.q, scores.factors, call.sizes, node)
            new = AttentionCall(
                q,
                call.k,
                call.v,
                sources=list(reading.sources),
                pattern=reading.pattern,
                mask=reading.mask.text,
                scale=scores.scale,
            ).emit(graph, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        info = SiteInfo.at(new, "flex", reading.name, reading.name != "full")
        info.notes += reading.notes
        facts.context.sites[new] = info

    def finish(self, facts: Facts) -> None:
        facts.context.sort_sites(facts.graph)


def read(node: fx.Node, call: FlexOpCall, facts: Facts) -> Read | Refusal:
    """Once it is clear that it computes what the program does."""
    try:
        return proved(node, call, facts)
    except NotAttention as problem:
        return Refusal(f"flex_attention: {problem.sentence}", node)
    except Unreadable as problem:
        return Refusal(f"flex_attention: {problem.refusal.sentence}", node)


def proved(node: fx.Node, call: FlexOpCall, facts: Facts) -> Read:
    """Raises NotAttention and Unreadable."""
    product, learned = call.product, facts.carries.__getitem__
    cone = Cone(facts.constants, call.sizes, stops={product})
    main = load(product, cone.index(shape_of(product), "bhqk"), value_of(product).dtype)
    term = cone.element(call.scores)
    if [each for each in loads(term) if each.source is product] != [main]:
        raise NotAttention("a score is no function of the product of its own query and key")
    below = descendants(product, node)
    scores = peel_scores(term, main, cone, learned, below.__contains__)
    scores.nan = False  # flex_attention makes rows that see nothing 0
    original = substitute(term, leaves={main: score(main.dtype)})
    known = Known(cone.known, cone.sizes)
    return Read(scores, reading_of_scores(scores, known, learned, original if cone.is_known(original) else None))
