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
}

# What cannot run in float64, and the relative error allowed in float32 where there is no float64 to measure it by.
SINGLE = {"xt/dynamic_pos": "feeds distances in float32 to its layers"}
SINGLE_TOLERANCE = 1e-5


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
    def is_negative(self) -> bool:
        return any(part in self.name for part in NEGATIVES)


def outcome(name: str, length: int, p: int) -> Outcome:
    """Every graph of the model on p ranks; where Dynamo takes the whole model as one, it has to be one."""
    graphs = graphs_of(name, length, torch.float32 if name in SINGLE else torch.float64)
    tolerances = [SINGLE_TOLERANCE if name in SINGLE else TOLERANCE] * len(graphs)
    if name not in SINGLE and any(rounds_to_float32(gm) for gm, _ in graphs):
        exact = [values(*graph) for graph in graphs]
        graphs = graphs_of(name, length, torch.float32)
        tolerances = [3 * own_error(a, values(*graph)) for a, graph in zip(exact, graphs, strict=True)]
    with sdpa_kernel(SDPBackend.MATH):
        verdicts = [validate_graph(p, *graph, tolerance) for graph, tolerance in zip(graphs, tolerances, strict=True)]
    wrong = [verdict.wrong for verdict in verdicts if verdict.wrong]
    report = Report.merged([verdict.report for verdict in verdicts], p)
    return Outcome(name, report, None if name in RANDOM else wrong[0] if wrong else "")


def graphs_of(name: str, length: int, dtype: torch.dtype) -> list[Graph]:
    module, keywords = build(name, length, dtype)
    return captured_graphs(module, (), keywords, fullgraph=TRUTH[name].whole)


def values(gm: fx.GraphModule, inputs: list[Any]) -> Values:
    """In torch's own products and softmax: its flash kernel for the CPU gives rows that a finite minimum hides from
    every key the wrong gradient (the log of their sum is lost beside the minimum)."""
    with sdpa_kernel(SDPBackend.MATH):
        return values_and_gradients(gm, inputs)


def rounds_to_float32(gm: fx.GraphModule) -> bool:
    """Whether a program in float64 computes in float32 in between (a softmax, a norm): it is compared in float32 then,
    with three times the error that eager has there."""
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
            sum(min(one.eligible, len(one.report.sites)) for one in found),
            sum(one.rewritten for one in found if one.is_negative),
        )

    def __str__(self) -> str:
        known, rewritten = self.known / self.eligible, self.rewritten / self.eligible
        return (
            f"{self.eligible} eligible sites: {known:.1%} known, {rewritten:.1%} rewritten, the others refused with a "
            f"reason; {self.false_rewrites} rewrites of what is no attention"
        )
