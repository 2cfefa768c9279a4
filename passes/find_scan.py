"""A recurrence becomes one scan, whatever the number of its steps.

    S1 = S0 * a[:, 0] + b[:, 0];  y0 = S1 @ c[:, 0]
    S2 = S1 * a[:, 1] + b[:, 1];  y1 = S2 @ c[:, 1]                    # a loop over chunks or tokens, unrolled
        ->
    S, y = ringopt::scan([S0], [a, b, c with dim 1 in front], [], body)        body(S, a_t, b_t, c_t) = S', y_t

Found are unrolled loops (ringopt/recognize/scans/loop.py), torch's scan (ringopt/frontend/higher_order/scan.py), which
also stands for loops that Dynamo traced as one turn (ringopt/frontend/loops), sums with decays between chunks
(segment_sums.py beside loop.py), and trees of log(n) rounds (parallel_scan.py). What reads nothing that is carried is
computed for all steps at once, before. Rewritten is a step that is affine in what it carries (ringopt/scans/affine.py),
and another where ranks can share it all the same (ringopt/scans/not_affine.py). The rest stays as it was, or is traced
turn by turn, with a reason. After: the graph is as large for any number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch.fx as fx

from ringopt.distributed.mesh import ANY
from ringopt.frontend.higher_order.scan import is_scan_operator, recurrence_of
from ringopt.frontend.loops.rolled import is_loop, leave_loop
from ringopt.ir.nodes import source_line
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import is_open
from ringopt.recognize.scans.emit import replace_loop, replace_operator
from ringopt.recognize.scans.find import judged, loops
from ringopt.recognize.scans.hoist import SplitStep, hoisted
from ringopt.recognize.scans.loop import Loop
from ringopt.recognize.scans.parallel_scan import ParallelScan, parallel_scan
from ringopt.recognize.scans.recurrence import FoundRecurrence, NotRolled
from ringopt.recognize.scans.segment_sums import FASTER_WRITTEN, SegmentSum, segment_sum
from ringopt.rewrite import Facts, Rewrite
from ringopt.scans.affine import prove_affine
from ringopt.scans.body import NoBody, to_text
from ringopt.scans.gradient_paths import detach_what_no_gradient_comes_to
from ringopt.scans.not_affine import attended_lengths, can_be_shared
from ringopt.scans.real_parts import has_complex, real_step
from ringopt.scans.trace import Kinds


@dataclass(frozen=True)
class Found:
    """A recurrence: the body of its scan on operands of such kinds, and what puts the scan there; or why there is none.
    `steps` and `node` are for the report. `any_step`: one that is not affine is a scan too, which every rank runs."""

    steps: int
    node: fx.Node
    text: str | Refusal
    kinds: Kinds = ()
    put: Callable[[fx.Graph], None] | None = None
    any_step: bool = False


@dataclass(frozen=True)
class FindScan(Rewrite["Loop | fx.Node", Found]):
    """Rewrites each recurrence as one `ringopt::scan` whose step is affine, or that ranks can share all the same."""

    name = "find_scan"
    reads = ("mesh", "values")
    writes = ("relied_on", "notes")
    optional = True
    lost = "recurrences stay unrolled: graphs grow with their steps, and each rank computes all of them"

    def subjects(self, facts: Facts) -> Iterable[Loop | fx.Node]:
        return [*loops(facts.graph), *facts.graph.nodes]

    def match(self, subject: Loop | fx.Node, facts: Facts) -> Found | None:
        if isinstance(subject, Loop):
            return of_loop(subject)
        if is_scan_operator(subject):
            return of_operator(subject)
        if not subject.users:
            return None
        shared = facts.context.mesh.size > 1  # one process leaves all sizes open
        found = segment_sum(subject, facts.constants, shared) or parallel_scan(subject, facts.constants)
        return of_tree(found, shared) if found is not None else None

    def check(self, found: Found, facts: Facts) -> Refusal | None:
        if isinstance(found.text, Refusal):
            return found.text
        proof, mesh = prove_affine(found.text, found.kinds), facts.context.mesh
        if not isinstance(proof, Refusal) or found.any_step:
            return None
        shared = mesh.size > 1 and mesh.name != ANY
        tokens = attended_lengths(facts.graph) if shared else set[int]()
        return None if shared and can_be_shared(found.text, found.kinds, found.steps, mesh.size, tokens) else proof

    def rewrite(self, found: Found, facts: Facts) -> None:
        assert found.put is not None
        found.put(facts.graph)
        detach_what_no_gradient_comes_to(facts.graph)
        steps = "any number of" if is_open(found.steps) else found.steps
        note(f"a recurrence of {steps} steps is one scan", found.node, facts)

    def refuse(self, found: Found, refusal: Refusal, facts: Facts) -> None:
        leave_loop(found.node, refusal.sentence)
        known = refusal.node if refusal.node is not None and source_line(refusal.node) else found.node
        note(f"a recurrence is no scan: {refusal.sentence}", known, facts)


def note(sentence: str, node: fx.Node | None, facts: Facts) -> None:
    """For the report: once, for layers that are alike."""
    line = source_line(node) if node is not None else ""
    text = f"{sentence} ({line})" if line else sentence
    if text not in facts.context.notes:
        facts.context.notes.append(text)


def of_loop(loop: Loop) -> Found | None:
    """What an unrolled loop is, as the graph is now."""
    again = loop.again()
    rolled = judged(again) if again is not None else None
    if again is None or rolled is None:
        return None
    if isinstance(rolled, NotRolled):
        return Found(again.steps, again.first[-1], Refusal(rolled.sentence, rolled.node))
    parts = hoisted(rolled.recurrence)
    return with_body(rolled.recurrence, parts, lambda graph, text: replace_loop(graph, rolled, parts, text))


def of_operator(node: fx.Node) -> Found:
    """What a call of torch's scan is."""
    try:
        recurrence = recurrence_of(node)
    except NotRolled as problem:
        return Found(0, node, Refusal(problem.sentence, problem.node))
    parts = hoisted(recurrence)
    found = with_body(recurrence, parts, lambda graph, text: replace_operator(graph, node, recurrence, parts, text))
    return replace(found, any_step=not is_loop(node))


def with_body(found: FoundRecurrence, parts: SplitStep, put: Callable[[fx.Graph, str], None]) -> Found:
    """With the text of what is left of a step."""
    try:
        if has_complex(parts.core.graph):
            parts = replace(parts, core=real_step(parts.core))
        text = to_text(parts.core, len(found.init), len(parts.xs), len(parts.consts))
    except NoBody as problem:
        return Found(found.steps, found.like, problem.refusal)
    return Found(found.steps, found.like, text, parts.kinds, lambda graph: put(graph, text))


def of_tree(found: SegmentSum | ParallelScan, shared: bool) -> Found:
    """What a sum with decays is, or one in rounds."""
    stays = not shared and isinstance(found, SegmentSum) and found.is_short
    return Found(found.steps, found.node, FASTER_WRITTEN if stays else found.text, found.kinds, found.rewrite)
