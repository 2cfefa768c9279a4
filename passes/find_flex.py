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
from dataclasses import dataclass

import torch.fx as fx

from ringopt.expr.bands import Known
from ringopt.expr.simplify import substitute
from ringopt.expr.terms import load, loads, score
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import emit_attention, module_path, requires_grad, shape_of, source_line, value_of
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.pipeline import Context, Pass
from ringopt.recognize.crosscheck import of_scores
from ringopt.recognize.emit import multiplied
from ringopt.recognize.lift import Cone, Unreadable
from ringopt.recognize.prove import descendants
from ringopt.recognize.reading import Reading, reading_of
from ringopt.recognize.scores import NotAttention, Scores, peel_scores

OF_TORCH = re.compile(r'\s*File "[^"]*nn/attention/flex_attention\.py"')  # frames below the line of the program


@dataclass(frozen=True)
class FindFlex(Pass):
    """Rewrites flex_attention as `ringopt::attention`, its score_mod and mask_mod read as expressions."""

    name = "find_flex"
    reads = ("values",)
    writes = ("relied_on", "sites")

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        graph = gm.graph
        calls = graph.find_nodes(op="call_function", target=operators.flex.default)
        if not calls:
            return
        constants = Constants(graph, context.values, context.relied_on)
        carries = requires_grad(graph)
        for node in calls:
            try:
                scores, reading = read(node, constants, carries)
            except (NotAttention, Unreadable) as problem:
                raise GraphRefused(Refusal(f"flex_attention: {sentence_of(problem)}", node)) from problem
            new, info = rewrite(graph, node, scores, reading)
            context.sites[new] = info
        context.sort_sites(graph)


def sentence_of(problem: NotAttention | Unreadable) -> str:
    """The reason why a flex_attention cannot be read."""
    return problem.sentence if isinstance(problem, NotAttention) else problem.refusal.sentence


def sizes_of(node: fx.Node) -> dict[str, int]:
    """Sizes of the axes b, h, q, k, from the product [B, H, Sq, Sk]."""
    return dict(zip("bhqk", shape_of(node.args[3]), strict=True))


def read(node: fx.Node, constants: Constants, carries: dict[fx.Node, bool]) -> tuple[Scores, Reading]:
    """What is done to the product. Raises NotAttention and Unreadable."""
    _q, _k, _v, product, given = node.args
    assert isinstance(product, fx.Node) and isinstance(given, fx.Node)
    cone = Cone(constants, sizes_of(node), stops={product})
    main = load(product, cone.index(shape_of(product), "bhqk"), value_of(product).dtype)
    term = cone.element(given)
    if [each for each in loads(term) if each.source is product] != [main]:
        raise NotAttention("a score is no function of the product of its own query and key")
    below = descendants(product, node)
    scores = peel_scores(term, main, cone, carries.__getitem__, below.__contains__)
    scores.nan = False  # flex_attention makes rows that see nothing 0
    reading = reading_of(
        scores.conditions, scores.bias, carries.__getitem__, scores.score, known=Known(cone.known, cone.sizes)
    )
    original = substitute(term, leaves={main: score(main.dtype)})
    if cone.is_known(original) and not scores.shifts:
        sizes = {name: at_hand(size) for name, size in cone.sizes.items()}
        said = of_scores(reading, scores, sizes, cone.known, original)
        if said:
            raise NotAttention(said)
    return scores, reading


def rewrite(graph: fx.Graph, node: fx.Node, scores: Scores, reading: Reading) -> tuple[fx.Node, SiteInfo]:
    """Replaces one call; factors of the scores that a query has for itself are multiplied into q."""
    q, k, v, _product, _scores = node.args
    assert isinstance(q, fx.Node)
    node.meta["stack_trace"] = OF_TORCH.split(node.meta.get("stack_trace") or "")[0]
    with graph.inserting_before(node):
        q = multiplied(graph, q, scores.factors, sizes_of(node), node)
        args = (q, k, v, None, list(reading.sources), None, None, reading.pattern, reading.mask.text, 0.0, scores.scale)
        new = emit_attention(graph, args, node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    info = SiteInfo(module_path(new), "flex", reading.name, reading.name != "full", source_line(new))
    info.notes += reading.notes
    return new, info
