"""Attention that is spelled out becomes the canonical node.

    scores = matmul(q, k.mT) / 8 + mask                                # any product, any scaling, any mask
    y = matmul(dropout(softmax(scores, -1)), v)
        ->
    y = ringopt::attention(q, k, v, None, [...], sinks, seed, "causal", "{...}", dropout_p, 1/8)

Found by axes (ringopt/recognize/candidates.py), proved by reading every score and weight (ringopt/recognize/prove.py).
Rows that see nothing are NaN or, behind `_safe_softmax` and what does the same by hand, 0, and so is their gradient.
The mask is read on the way, so that classify_mask finds nothing left to do. Weights that the program also returns stay
computed as they were. After: every softmax that is no attention, or could not be proved to be, has its reason; and so
have exponentials of scores that are no softmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch.fx as fx

from ringopt.expr.bands import Known
from ringopt.ir.nodes import module_path, op_name, shape_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.pipeline import Context
from ringopt.recognize.candidates import Candidate, candidates, escapes, exponentials, products_of, softmaxes
from ringopt.recognize.crosscheck import reading_of_scores
from ringopt.recognize.emit import emit_found
from ringopt.recognize.prove import Found, Prover
from ringopt.recognize.reading import Reading
from ringopt.recognize.scores import NotAttention
from ringopt.rewrite import Facts, Rewrite


@dataclass(frozen=True)
class Attempt:
    """A candidate, and what proving it gives: what is attention, read; or why it is none."""

    candidate: Candidate
    proof: Proof | NotAttention


@dataclass(frozen=True)
class Proof:
    """`alone`: one process, which computes the weights that the program returns, and the attention as it was."""

    found: Found
    reading: Reading
    alone: bool


@dataclass(frozen=True)
class Book:
    """What became of the softmaxes of a graph: by the second product of an attention the softmax that is `part_of` it;
    of one that is part of none an attempt that was `refused`, with no look-alike where there was such."""

    part_of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    refused: dict[fx.Node, tuple[Candidate, NotAttention]] = field(default_factory=dict)


@dataclass(frozen=True)
class FindUnfused(Rewrite[Candidate, Attempt]):
    """Rewrites attention that is spelled out in matrix products and a softmax as `ringopt::attention`."""

    name = "find_unfused"
    reads = ("values", "mesh")
    writes = ("relied_on", "sites", "left_alone")
    optional = True
    lost = "attention that is spelled out in products is not found, and keys are gathered for it"

    def subjects(self, facts: Facts) -> Iterable[Candidate]:
        return candidates(products_of(facts.graph)) if softmaxes(facts.graph) else ()

    def match(self, candidate: Candidate, facts: Facts) -> Attempt | None:
        if candidate.values.node in facts.once(Book, Book).part_of:
            return None
        candidate = candidate.as_it_stands()
        try:
            return Attempt(candidate, proved(candidate, facts))
        except NotAttention as problem:
            return Attempt(candidate, problem)

    def check(self, found: Attempt, facts: Facts) -> Refusal | None:
        why = found.proof
        return Refusal(why.sentence, found.candidate.softmax) if isinstance(why, NotAttention) else None

    def rewrite(self, found: Attempt, facts: Facts) -> None:
        candidate, proof = found.candidate, found.proof
        assert isinstance(proof, Proof)
        node = candidate.values.node if proof.alone else emit_found(facts.graph, proof.found, proof.reading)
        facts.context.sites[node] = info_of(candidate, proof)
        facts.once(Book, Book).part_of[candidate.values.node] = candidate.softmax

    def refuse(self, found: Attempt, refusal: Refusal, facts: Facts) -> None:
        """For now: another candidate with this softmax may do."""
        refused, softmax = facts.once(Book, Book).refused, found.candidate.softmax
        assert isinstance(found.proof, NotAttention)
        if softmax not in refused or not found.proof.look_alike:
            refused[softmax] = found.candidate, found.proof

    def finish(self, facts: Facts) -> None:
        graph, context, book = facts.graph, facts.context, facts.once(Book, Book)
        for softmax in softmaxes(graph):
            if softmax not in book.part_of.values():
                note_refusal(softmax, book.refused.get(softmax), context)
        context.sort_sites(graph)
        for node in exponentials(graph):
            _leave_alone(node, "its rows are not divided by their plain sum, so they are no softmax", context)


def proved(candidate: Candidate, facts: Facts) -> Proof:
    """Raises NotAttention."""
    found = facts.once(Prover, lambda: Prover(facts.constants, facts.carries)).prove(candidate)
    known = Known(found.known or {}, found.roles.sizes)
    reading = reading_of_scores(found.scores, known, facts.carries.__getitem__, found.original)
    return Proof(found, reading, escapes(candidate, found.dropout_p) and facts.context.mesh.size == 1)


def note_refusal(softmax: fx.Node, refused: tuple[Candidate, NotAttention] | None, context: Context) -> None:
    """A softmax without a site: a look-alike is left alone, attention that could not be proved is a refused site."""
    if refused is None:
        _leave_alone(softmax, "what it normalises is no product of two activations", context)
    elif refused[1].look_alike:
        _leave_alone(softmax, refused[1].sentence, context)
    else:
        info = SiteInfo.at(softmax, "unfused", "mask", True)
        context.sites[refused[0].values.node] = replace(info, refusal=refused[1].sentence)


def _leave_alone(node: fx.Node, sentence: str, context: Context) -> None:
    what = f"{op_name(node).removeprefix('_')} {list(shape_of(node))}"
    where = f" in {module_path(node)}" if module_path(node) else ""
    context.left_alone.append(Refusal(f"{what}{where}: {sentence}", node))


def info_of(candidate: Candidate, proof: Proof) -> SiteInfo:
    """The site of an attention that was proved, as the report shows it."""
    found, reading = proof.found, proof.reading
    names = [] if reading.name == "full" else [reading.name]
    names += ["sinks"] if found.sinks is not None else []
    softmax, pattern = candidate.softmax, " & ".join(names) or "full"
    info = SiteInfo.at(softmax, "unfused", pattern, reading.name != "full")
    if found.dropout_p:
        info.notes.append(f"dropout {found.dropout_p:g}: the same weights are dropped on any number of ranks")
    info.notes += reading.notes
    if proof.alone:
        info.notes.append("the program returns its weights: one process computes them, and the attention as it was")
    return info
