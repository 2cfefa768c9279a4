"""What becomes of an entry of the zoo on p ranks: which sites are found, what is refused, are the numbers those of
one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from rich.markup import escape
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringopt.report import Report
from tests.translation import TOLERANCE, Values, captured_graphs, own_error, validate_graph, values_and_gradients
from tests.zoo import TRUTH, build

Graph = tuple[fx.GraphModule, list[Any]]

# Names of what is no softmax attention over tokens: nothing in them may be rewritten.
NEGATIVES = ("neg_", "xcit", "edgenext", "davit", "lambda_net", "fnet", "poolformer", "mamba")

# What draws random numbers at run time, in eval mode too: there is no one right number to compare with.
RANDOM = {
    "hf/vit_mae@eager": "the patches to keep are drawn at run time",
    "hf/vit_mae@sdpa": "the patches to keep are drawn at run time",
    "hf/reformer@eager": "the directions that keys are hashed by are drawn at run time",
}

# What cannot run in float64, and the error allowed in float32 where no float64 is there to measure it by: gradients that
# are zero in exact arithmetic are some 1e-4 of what `relative_error` divides by.
SINGLE = {
    "xt/dynamic_pos": "feeds distances in float32 to its layers",
    "hf/autoformer@eager": "feeds time features in float32 to its layers",
}
SINGLE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """`wrong` is "" where all ranks have the numbers of one process, None where they were not compared."""

    name: str
    report: Report
    wrong: str | None

    @property
    def eligible(self) -> int:
        return TRUTH[self.name].eligible

    @property
    def rewritten(self) -> int:
        return sum(site.refusal is None for site in self.report.sites)

    @property
    def refusals(self) -> list[str]:
        return [site.refusal for site in self.report.sites if site.refusal is not None]

    @property
    def known(self) -> int:
        """Sites that are rewritten, or refused with a reason: their own, or that of the whole graph they are in."""
        return self.eligible if self.report.refusal else min(self.eligible, len(self.report.sites))

    @property
    def is_negative(self) -> bool:
        return any(part in self.name for part in NEGATIVES)


def outcome(name: str, length: int, p: int) -> Outcome:
    """Every graph of the model on p ranks; where Dynamo takes the whole model as one, it has to be one."""
    compared = with_tolerances(name, length)
    with sdpa_kernel(SDPBackend.MATH):
        verdicts = [validate_graph(p, *graph, tolerance) for graph, tolerance in compared]
    wrong = [verdict.wrong for verdict in verdicts if verdict.wrong]
    report = Report.merged([verdict.report for verdict in verdicts], p)
    return Outcome(name, report, None if name in RANDOM else wrong[0] if wrong else "")


def with_tolerances(name: str, length: int) -> list[tuple[Graph, float]]:
    """The graphs of a model in float64; or, where it computes in float32 all the same, in float32 with three times the
    error that eager has there."""
    if name in SINGLE:
        return [(graph, SINGLE_TOLERANCE) for graph in graphs_of(name, length, torch.float32)]
    graphs = graphs_of(name, length, torch.float64)
    if not any(rounds_to_float32(gm) for gm, _ in graphs):
        return [(graph, TOLERANCE) for graph in graphs]
    if not TRUTH[name].whole:  # where it breaks may depend on its numbers: two precisions need not pair up
        return [(graph, SINGLE_TOLERANCE) for graph in graphs]
    rounded = graphs_of(name, length, torch.float32)
    errors = [own_error(values(*a), values(*b)) for a, b in zip(graphs, rounded, strict=True)]
    return [(graph, 3 * error) for graph, error in zip(rounded, errors, strict=True)]


def graphs_of(name: str, length: int, dtype: torch.dtype) -> list[Graph]:
    module, keywords = build(name, length, dtype)
    return captured_graphs(module, (), keywords, fullgraph=TRUTH[name].whole)


def values(gm: fx.GraphModule, inputs: list[Any]) -> Values:
    """In torch's own products and softmax: its flash kernel for the CPU gives rows that a finite minimum hides from
    every key the wrong gradient (the log of their sum is lost beside the minimum)."""
    with sdpa_kernel(SDPBackend.MATH):
        return values_and_gradients(gm, inputs)


def rounds_to_float32(gm: fx.GraphModule) -> bool:
    """Whether a program in float64 computes in float32 in between (a softmax, a norm)."""
    found = [node.meta.get("example_value") for node in gm.graph.nodes]
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.requires_grad for x in found)


# ---- a sweep in one table ------------------------------------------------------------------------------------------


def table(outcomes: Iterable[Outcome], errors: dict[str, str]) -> Table:
    shown = Table(title="zoo", title_justify="left")
    for title in ("entry", "eligible", "rewritten", "refused", "left alone", "numbers"):
        shown.add_column(title, overflow="fold", justify="left" if title in ("entry", "numbers") else "right")
    for found in outcomes:
        numbers = {None: "not compared", "": "exact"}.get(found.wrong, found.wrong)
        counts = (found.eligible, found.rewritten, len(found.refusals), len(found.report.left_alone))
        shown.add_row(found.name, *map(str, counts), escape(numbers))
        for reason in sorted(set(found.refusals) | {found.report.refusal or ""} - {""}):
            shown.add_row("", "", "", "", "", f"[yellow]{escape(reason)}[/yellow]")
    for name, error in errors.items():
        shown.add_row(name, "", "", "", "", f"[red]{escape(error)}[/red]")
    return shown


@dataclass(frozen=True)
class Totals:
    """Sites over all entries; more than the truth has in one entry do not make up for less in another."""

    eligible: int
    rewritten: int
    known: int
    false_rewrites: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Totals:
        found = list(outcomes)
        return cls(
            sum(one.eligible for one in found),
            sum(min(one.eligible, one.rewritten) for one in found),
            sum(one.known for one in found),
            sum(one.rewritten for one in found if one.is_negative),
        )

    def __str__(self) -> str:
        known, rewritten = self.known / self.eligible, self.rewritten / self.eligible
        return (
            f"{self.eligible} eligible sites: {known:.1%} known, {rewritten:.1%} rewritten, the others refused with a "
            f"reason; {self.false_rewrites} rewrites of what is no attention"
        )
