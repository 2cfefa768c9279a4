"""What becomes of an entry of the zoo on p ranks: which sites are found, what is refused, are the numbers those of
one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx
from rich.markup import escape
from rich.table import Table

import ringopt
from ringopt.report import Report
from tests.translation import TOLERANCE, captured, own_error, validate_graph, values_and_gradients
from tests.zoo import TRUTH, build

# Names of what is no softmax attention over tokens: nothing in them may be rewritten.
NEGATIVES = ("neg_", "xcit", "edgenext", "davit", "lambda_net", "fnet", "poolformer", "mamba")

# What draws random numbers at run time, in eval mode too: there is no one right number to compare with.
RANDOM = {
    "hf/vit_mae@eager": "the patches to keep are drawn at run time",
    "hf/vit_mae@sdpa": "the patches to keep are drawn at run time",
}

DIFFERENT = "numbers differ: "


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
    """Of the whole graph, all ranks compared with one process; a model in several graphs is only explained."""
    if not TRUTH[name].whole or name in RANDOM:
        module, keywords = build(name, length)
        torch._dynamo.reset()
        return Outcome(name, ringopt.explain(module, world_size=p, **keywords), None)
    module, keywords = build(name, length, torch.float64)
    gm, inputs = captured(module, **keywords)
    tolerance = TOLERANCE
    if rounds_to_float32(gm):
        exact = values_and_gradients(gm, inputs)
        module, keywords = build(name, length)
        gm, inputs = captured(module, **keywords)
        tolerance = 3 * own_error(exact, values_and_gradients(gm, inputs))
    verdict = validate_graph(p, gm, inputs, tolerance)
    return Outcome(name, verdict.report, verdict.wrong and DIFFERENT + verdict.wrong)


def rounds_to_float32(gm: fx.GraphModule) -> bool:
    """Whether a program in float64 computes in float32 in between (a softmax, a norm): it is compared in float32 then,
    with three times the error that eager has there."""
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.requires_grad for x in values)


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
