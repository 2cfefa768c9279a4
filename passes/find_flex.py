"""Every call of flex_attention becomes the canonical node.

    product = q @ k.mT
    scores = where(k <= q, product / 8 + table[h, k - q], -inf)         # mask_mod, score_mod
    y = ringopt::flex(q, k, v, product, scores)
        ->
    y = ringopt::attention(q, k, v, None, [table], None, None, "causal", "{...}", 0, 1/8)

What a score is made of is read element by element (ringopt/graph/scores.py), as for attention that is spelled out.
After: no node is over queries and keys for the sake of flex_attention. Where a score cannot be read the whole graph is
refused, because only the original operator can do without scores of all pairs.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.graph.cone import Cone, Unreadable
from ringopt.graph.constants import Constants
from ringopt.graph.nodes import emit, module_path, requires_grad, shape_of, value_of
from ringopt.graph.reading import reading_of
from ringopt.graph.refusal import Refusal
from ringopt.graph.scores import NotAttention, Scores, peel_scores
from ringopt.graph.spelled_reading import descendants
from ringopt.graph.terms import load, loads
from ringopt.passes.find_unfused import in_order, multiplied
from ringopt.pipeline import Context, GraphRefused, Pass, SiteInfo


class FindFlex(Pass):
    name = "find_flex"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        graph = gm.graph
        calls = graph.find_nodes(op="call_function", target=torch.ops.ringopt.flex.default)
        if not calls:
            return
        constants = Constants(graph, context.values, context.relied_on)
        carries = requires_grad(graph)
        for node in calls:
            try:
                scores = read(node, constants, carries)
            except (NotAttention, Unreadable) as problem:
                raise GraphRefused(Refusal(f"flex_attention: {sentence_of(problem)}", node)) from problem
            new, info = rewrite(graph, node, scores, carries)
            context.sites[new] = info
        in_order(graph, context)


def sentence_of(problem: NotAttention | Unreadable) -> str:
    return problem.sentence if isinstance(problem, NotAttention) else problem.refusal.sentence


def sizes_of(node: fx.Node) -> dict[str, int]:
    return dict(zip("bhqk", shape_of(node.args[3]), strict=True))  # type: ignore[arg-type]


def read(node: fx.Node, constants: Constants, carries: dict[fx.Node, bool]) -> Scores:
    _q, _k, _v, product, given = node.args
    assert isinstance(product, fx.Node) and isinstance(given, fx.Node)
    cone = Cone(constants, sizes_of(node), stops={product})
    main = load(product, cone.index(shape_of(product), "bhqk"), value_of(product).dtype)
    term = cone.element(given)
    products = [each for each in loads(term) if each.source is product]
    if products != [main]:
        raise NotAttention("a score is no function of the product of its own query and key")
    below = descendants(product, node)
    scores = peel_scores(term, main, cone, carries.__getitem__, below.__contains__)
    scores.nan = False  # flex_attention makes rows that see nothing 0
    return scores


def rewrite(
    graph: fx.Graph, node: fx.Node, scores: Scores, carries: dict[fx.Node, bool]
) -> tuple[fx.Node, SiteInfo]:
    q, k, v, _product, _scores = node.args
    assert isinstance(q, fx.Node)
    reading = reading_of(scores.conditions, scores.bias, carries.__getitem__, scores.score)
    with graph.inserting_before(node):
        q = multiplied(graph, q, scores.factors, sizes_of(node), node)
        args = (q, k, v, None, list(reading.sources), None, None, reading.pattern, reading.mask.text, 0.0, scores.scale)
        new = emit(graph, torch.ops.ringopt.attention.default, args, node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new, SiteInfo(module_path(new), "flex", reading.name, reading.name != "full")
