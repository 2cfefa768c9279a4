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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from ringopt.dims.contraction import product_of
from ringopt.expr.bands import Known
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import module_path, op_name, requires_grad, shape_of, source_line
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.pipeline import Context, Pass
from ringopt.recognize.candidates import SOFTMAX, Candidate, candidates, escapes, leads_anywhere
from ringopt.recognize.crosscheck import of_scores
from ringopt.recognize.emit import emit_found
from ringopt.recognize.prove import Found, Prover
from ringopt.recognize.reading import Reading, reading_of
from ringopt.recognize.scores import NotAttention

EXPONENTIALS = ("exp", "exp2")


@dataclass(frozen=True)
class FindUnfused(Pass):
    """Rewrites attention that is spelled out in matrix products and a softmax as `ringopt::attention`."""

    name = "find_unfused"
    reads = ("values", "mesh")
    writes = ("relied_on", "sites", "left_alone")
    optional = True
    lost = "attention that is spelled out in products is not found, and keys are gathered for it"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        graph = gm.graph
        softmaxes = [node for node in graph.nodes if op_name(node) in SOFTMAX]
        if softmaxes:
            find_all(graph, softmaxes, context)
            context.sort_sites(graph)
        tell_exponentials(graph, context)


def find_all(graph: fx.Graph, softmaxes: Sequence[fx.Node], context: Context) -> None:
    """Proves every candidate and rewrites those that hold; the report says of each other softmax why it stays."""
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
            alone = escapes(candidate, found.dropout_p) and context.mesh.size == 1
        except NotAttention as problem:
            if softmax not in reasons or not problem.look_alike:
                reasons[softmax], tried[softmax] = problem, candidate
            continue
        info = info_of(candidate, reading, found)
        if alone:
            info.notes.append("the program returns its weights: one process computes them, and the attention as it was")
        context.sites[candidate.values.node if alone else emit_found(graph, found, reading)] = info
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
    """Notes for the report why `node` stays as it is."""
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


def info_of(candidate: Candidate, reading: Reading, found: Found) -> SiteInfo:
    """The site of an attention that was proved, as the report shows it."""
    names = [] if reading.name == "full" else [reading.name]
    names += ["sinks"] if found.sinks is not None else []
    softmax, pattern = candidate.softmax, " & ".join(names) or "full"
    info = SiteInfo(module_path(softmax), "unfused", pattern, reading.name != "full", source_line(softmax))
    if found.dropout_p:
        info.notes.append(f"dropout {found.dropout_p:g}: the same weights are dropped on any number of ranks")
    info.notes += reading.notes
    return info
