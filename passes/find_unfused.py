"""Attention that is spelled out becomes the canonical node.

    scores = matmul(q, k.mT) / 8 + mask                                # any product, any scaling, any mask
    y = matmul(dropout(softmax(scores, -1)), v)
        ->
    y = ringopt::attention(q, k, v, None, [...], sinks, seed, "causal", "{...}", dropout_p, 1/8)

Found by axes (ringopt/recognize/candidates.py), proved by reading every score and weight (ringopt/recognize/prove.py).
The mask is read on the way, so that classify_mask finds nothing left to do. Weights that the program also returns stay
computed as they were. After: every softmax that is no attention, or could not be proved to be, has its reason; and so
have exponentials of scores that are no softmax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.contraction import product_of
from ringopt.dims.rules import rule_of
from ringopt.expr.bands import Known
from ringopt.expr.simplify import substitute
from ringopt.expr.terms import Term, constant, dumps, loads
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import (
    emit,
    emit_attention,
    is_aten,
    module_path,
    op_name,
    requires_grad,
    shape_of,
    source_line,
    value_of,
)
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.passes.find_attention import draw_seed, with_positive_scale
from ringopt.pipeline import Context, Pass, SiteInfo
from ringopt.recognize.candidates import SOFTMAX, Candidate, Roles, candidates
from ringopt.recognize.crosscheck import of_scores
from ringopt.recognize.prove import Found, Prover
from ringopt.recognize.reading import Reading, reading_of
from ringopt.recognize.scores import NotAttention

aten = torch.ops.aten

EXPONENTIALS = ("exp", "exp2")


class FindUnfused(Pass):
    name = "find_unfused"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        graph = gm.graph
        softmaxes = [node for node in graph.nodes if op_name(node) in SOFTMAX]
        if softmaxes:
            find_all(graph, softmaxes, context)
            context.sort_sites(graph)
        tell_exponentials(graph, context)


def find_all(graph: fx.Graph, softmaxes: Sequence[fx.Node], context: Context) -> None:
    products = {node: product for node in graph.nodes if (product := product_of(node)) is not None}
    carries = requires_grad(graph)
    prover = Prover(Constants(graph, context.values, context.relied_on), carries)
    done: dict[fx.Node, fx.Node] = {}
    reasons: dict[fx.Node, NotAttention] = {}
    tried: dict[fx.Node, Candidate] = {}
    for candidate in list(candidates(products)):
        softmax = candidate.softmax
        if candidate.values.node in done:
            continue
        candidate = as_it_stands(candidate)
        try:
            found = prover.prove(candidate)
            reading = read(found, carries)
            alone = escapes(candidate, found) and context.mesh.size == 1
        except NotAttention as problem:
            if softmax not in reasons or not problem.look_alike:
                reasons[softmax], tried[softmax] = problem, candidate
            continue
        info = info_of(candidate, reading, found)
        if alone:
            info.notes.append("the program returns its weights: one process computes them, and the attention as it was")
        context.sites[candidate.values.node if alone else rewrite(graph, found, reading)] = info
        done[candidate.values.node] = softmax
    rewritten = set(done.values())
    for softmax in softmaxes:
        if softmax not in rewritten:
            tell(softmax, reasons.get(softmax), tried.get(softmax), context)


def as_it_stands(candidate: Candidate) -> Candidate:
    """With the operands that its products have now: an attention before it may have been rewritten."""
    scores, values = product_of(candidate.scores.node), product_of(candidate.values.node)
    assert scores is not None and values is not None
    return replace(candidate, scores=scores, values=values)


def tell(softmax: fx.Node, reason: NotAttention | None, candidate: Candidate | None, context: Context) -> None:
    """A softmax without a site: a look-alike is left alone, attention that could not be proved is a refused site."""
    if reason is not None and candidate is not None and not reason.look_alike:
        where = source_line(softmax)
        info = SiteInfo(module_path(softmax), "unfused", "mask", True, where, refusal=reason.sentence)
        context.sites[candidate.values.node] = info
        return
    sentence = reason.sentence if reason else "what it normalises is no product of two activations"
    leave("softmax", softmax, sentence, context)


def leave(name: str, node: fx.Node, sentence: str, context: Context) -> None:
    where = f" in {module_path(node)}" if module_path(node) else ""
    context.left_alone.append(Refusal(f"{name} {list(shape_of(node))}{where}: {sentence}", node))


def tell_exponentials(graph: fx.Graph, context: Context) -> None:
    """Weights that are exponentials of scores, and were made no softmax (find_softmax.py)."""
    exponentials = {node for node in graph.nodes if op_name(node) in EXPONENTIALS and leads_anywhere(node)}
    if not exponentials:
        return
    products = {node: product for node in graph.nodes if (product := product_of(node)) is not None}
    weights = dict.fromkeys(one.softmax for one in candidates(products, EXPONENTIALS) if one.summed)
    for node in filter(exponentials.__contains__, weights):
        leave(op_name(node), node, "its rows are not divided by their plain sum, so they are no softmax", context)


# ---- weights that are used elsewhere ---------------------------------------------------------------------------------
KEPT = frozenset(("mean", "sum", "div", "mul", "stack", "cat", "getitem"))  # on the way to an output, with numbers only


def escapes(candidate: Candidate, found: Found) -> bool:
    """Whether the program returns its weights too: they may be computed beside the attention. Raises NotAttention for
    weights that take part in what follows."""
    end = candidate.values.node
    inside = between(candidate.softmax, end)
    ordered = [node for node in end.graph.nodes if node in inside]
    users = [user for node in ordered for user in node.users if user not in inside and user is not end]
    others = [user for user in users if leads_anywhere(user)]
    if not all(map(only_leaves, others)):
        names = ", ".join(dict.fromkeys(op_name(user) or user.op for user in others))
        raise NotAttention(f"its weights are used elsewhere too, by {names}", True)
    if others and found.dropout_p:
        raise NotAttention("the program returns its weights after dropout: attention would drop others")
    return bool(others)


def between(start: fx.Node, end: fx.Node) -> set[fx.Node]:
    """The nodes on the ways from `start` to `end`, without `end`."""
    found: set[fx.Node] = set()
    stack = [end]
    reached = {start}
    node = start
    while node is not end:
        node = node.next
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    while stack:
        for above in stack.pop().all_input_nodes:
            if above in reached and above not in found:
                found.add(above)
                stack.append(above)
    return found


def leads_anywhere(node: fx.Node) -> bool:
    """Whether an output of the program depends on `node`."""
    seen, stack = {node}, [node]
    while stack:
        each = stack.pop()
        if each.op == "output":
            return True
        for user in each.users:
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def only_leaves(node: fx.Node) -> bool:
    """Whether the way from `node` ends in outputs and meets no other value, but for views and means."""
    if node.op == "output":
        return True
    alone = len(node.all_input_nodes) == 1 or op_name(node) in ("stack", "cat")
    plain = op_name(node) in KEPT or torch.Tag.pointwise not in getattr(node.target, "tags", ())
    return alone and plain and all(map(only_leaves, node.users))


# ---- the canonical node ----------------------------------------------------------------------------------------------
def read(found: Found, carries: dict[fx.Node, bool]) -> Reading:
    """Raises NotAttention where the reading is not what the program does."""
    scores = found.scores
    how = (scores.score, scores.nan, Known(found.known or {}, found.roles.sizes), scores.nan and scores.stops)
    reading = reading_of(scores.conditions, scores.bias, carries.__getitem__, *how)
    if found.original is not None and not scores.shifts:
        sizes = {name: at_hand(size) for name, size in found.roles.sizes.items()}
        said = of_scores(reading, scores, sizes, found.known, found.original)
        if said:
            raise NotAttention(said)
    return reading


def rewrite(graph: fx.Graph, found: Found, reading: Reading) -> fx.Node:
    candidate, roles, scores = found.roles.candidate, found.roles, found.scores
    end = candidate.values.node
    with graph.inserting_before(end):
        q, k, v = operands(graph, roles)
        q = multiplied(graph, q, scores.factors, roles.sizes, end)
        q, scale = with_positive_scale(graph, q, scores.scale)
        v = multiplied(graph, v, [factor for factor in found.factors if "k" in factor.axes], roles.sizes, end)
        sinks = sinks_of(graph, found, roles, end) if found.sinks is not None else None
        seed = draw_seed(graph, end) if found.dropout_p else None
        pattern, text, sources = reading.pattern, reading.mask.text, list(reading.sources)
        args = (q, k, v, None, sources, sinks, seed, pattern, text, found.dropout_p, scale)
        node = emit_attention(graph, args, end)
        rows = [factor for factor in found.factors if "k" not in factor.axes]
        result = multiplied(graph, node, rows, roles.sizes, end)
        result = as_product(graph, result, roles, end)
    end.replace_all_uses_with(result)
    return node


def info_of(candidate: Candidate, reading: Reading, found: Found) -> SiteInfo:
    names = [] if reading.name == "full" else [reading.name]
    names += ["sinks"] if found.sinks is not None else []
    softmax, pattern = candidate.softmax, " & ".join(names) or "full"
    info = SiteInfo(module_path(softmax), "unfused", pattern, reading.name != "full", source_line(softmax))
    if found.dropout_p:
        info.notes.append(f"dropout {found.dropout_p:g}: the same weights are dropped on any number of ranks")
    info.notes += reading.notes
    return info


def operands(graph: fx.Graph, roles: Roles) -> tuple[fx.Node, fx.Node, fx.Node]:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], of one dtype."""
    candidate, canonical = roles.candidate, roles.canonical
    scores, values = candidate.scores, candidate.values
    key_side = candidate.key_side
    assert key_side is not None
    features = scores.contracted
    letters = {letter: (letter,) for letter in scores.sizes()}
    q = arranged(
        graph, scores.operands[1 - key_side], [letters[x] if x else () for x in scores.letters[1 - key_side]],
        [canonical["b"], canonical["h"], canonical["q"], features], roles,
    )  # fmt: skip
    k = arranged(
        graph, scores.operands[key_side], [letters[x] if x else () for x in scores.letters[key_side]],
        [canonical["b"], roles.kv_heads, canonical["k"], features], roles,
    )  # fmt: skip
    own = value_axes(candidate)
    v = arranged(
        graph, candidate.value, [own[x] if x else () for x in values.letters[1 - candidate.side]],
        [canonical["b"], roles.kv_heads, canonical["k"], features_of_values(candidate)], roles,
    )  # fmt: skip
    kind = value_of(q).dtype
    for operand in (k, v):
        kind = torch.promote_types(kind, value_of(operand).dtype)
    q, k, v = (x if value_of(x).dtype == kind else emit(graph, aten.to.dtype, (x, kind), x) for x in (q, k, v))
    return q, k, v


def value_axes(candidate: Candidate) -> dict[str, tuple[str, ...]]:
    """The axes of each letter of the second product: those of the weights, and its own for features."""
    found: dict[str, tuple[str, ...]] = {}
    for letter, dim in zip(candidate.values.letters[candidate.side], candidate.dims[candidate.weights], strict=True):
        if letter:
            found[letter] = dim
    for letter in candidate.values.own(1 - candidate.side):
        found[letter] = (f"{letter}.v",)
        candidate.axes.sizes[f"{letter}.v"] = candidate.values.sizes()[letter]
    return found


def features_of_values(candidate: Candidate) -> tuple[str, ...]:
    return tuple(f"{letter}.v" for letter in candidate.values.own(1 - candidate.side))


def arranged(
    graph: fx.Graph, operand: fx.Node, dims: Sequence[Sequence[str]], roles: Sequence[Sequence[str]], of: Roles
) -> fx.Node:
    """`operand`, whose dims run along the axes `dims`, with one dim for each of `roles`; axes it lacks are expanded."""
    axes = of.candidate.axes
    operand, dims = untransposed(operand, dims)
    have = [name for dim in dims for name in axes.whole(dim)]
    want = [axes.whole(role) for role in roles]
    flat = [name for role in want for name in role]
    node = shaped(graph, operand, [axes.sizes[name] for name in have])
    order = [have.index(name) for name in flat if name in have]
    if order != sorted(order):
        node = emit(graph, aten.permute.default, (node, order), operand)
    missing = [name for name in flat if name not in have]
    if missing:
        node = shaped(graph, node, [axes.sizes[name] if name in have else 1 for name in flat])
        node = emit(graph, aten.expand.default, (node, [axes.sizes[name] for name in flat]), operand)
    return shaped(graph, node, [axes.size(role) for role in want])


def untransposed(operand: fx.Node, dims: Sequence[Sequence[str]]) -> tuple[fx.Node, Sequence[Sequence[str]]]:
    """The tensor below transpositions, which are about to be done anew."""
    while op_name(operand) in ("transpose", "permute", "t", "mT", "swapaxes", "movedim") and is_aten(operand):
        rule = rule_of(operand)
        if rule is None:
            break
        below = {dim: dims[out] for out, dim in rule.operands[0].items()}
        operand, dims = operand.args[0], [below[dim] for dim in range(len(dims))]
    return operand, dims


def shaped(graph: fx.Graph, node: fx.Node, sizes: list[int]) -> fx.Node:
    return node if list(shape_of(node)) == sizes else emit(graph, aten.reshape.default, (node, sizes), node)


def as_product(graph: fx.Graph, node: fx.Node, roles: Roles, like: fx.Node) -> fx.Node:
    """The output [B, Hq, Sq, Dv] as the second product had it."""
    candidate = roles.candidate
    axes, own = candidate.axes, value_axes(candidate)
    canonical = roles.canonical
    flat = [*canonical["b"], *canonical["h"], *canonical["q"], *axes.whole(features_of_values(candidate))]
    want = [name for letter in candidate.values.out if letter for name in axes.whole(own[letter])]
    node = shaped(graph, node, [axes.sizes[name] for name in flat])
    order = [flat.index(name) for name in want]
    if order != sorted(order):
        node = emit(graph, aten.permute.default, (node, order), like)
    node = shaped(graph, node, list(shape_of(like)))
    kind = value_of(like).dtype
    return node if value_of(node).dtype == kind else emit(graph, aten.to.dtype, (node, kind), like)


# ---- factors and sinks -----------------------------------------------------------------------------------------------
def multiplied(
    graph: fx.Graph, node: fx.Node, factors: Sequence[Term], sizes: Mapping[str, int], like: fx.Node
) -> fx.Node:
    """[B, H, S, D] times terms over b, h and rows; `sizes` of the axes."""
    for factor in factors:
        value = constant(factor)
        other: Any = value if value is not None else tabulated(graph, factor, sizes, like)
        target = aten.mul.Scalar if value is not None else aten.mul.Tensor
        product = emit(graph, target, (node, other), like)
        kind = value_of(node).dtype
        node = product if value_of(product).dtype == kind else emit(graph, aten.to.dtype, (product, kind), like)
    return node


def sinks_of(graph: fx.Graph, found: Found, roles: Roles, like: fx.Node) -> fx.Node:
    """[1|B, Hq]."""
    assert found.sinks is not None
    table = tabulated(graph, found.sinks, roles.sizes, like)
    batch = shape_of(table)[0]
    table = emit(graph, aten.reshape.default, (table, [batch, shape_of(table)[1]]), like)
    sizes = [batch, roles.sizes["h"]]
    return table if list(shape_of(table)) == sizes else emit(graph, aten.expand.default, (table, sizes), like)


def tabulated(graph: fx.Graph, term: Term, axes: Mapping[str, int], like: fx.Node) -> fx.Node:
    """[1|B, 1|H, 1|rows, 1]: a term as a tensor."""
    sources = list(dict.fromkeys(load.source for load in loads(term)))
    numbers = {source: i for i, source in enumerate(sources)}
    rows = "k" if "k" in term.axes else "q"
    sizes = [axes[name] if name in term.axes else 1 for name in ("b", "h", rows)]
    text = json.dumps(dumps(substitute(term, sources=numbers)), separators=(",", ":"))
    return emit(graph, operators.tabulate.default, (sources, text, rows, sizes), like)
