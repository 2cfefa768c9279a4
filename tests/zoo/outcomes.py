"""What becomes of an entry of the zoo on p ranks: which sites are found, what is refused, are the numbers those of
one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from rich.markup import escape
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringopt.report import Report
from tests.harness.translation import TOLERANCE, captured_graphs, own_error, validate_graph, values_and_gradients
from tests.zoo import TRUTH, build

Graph = tuple[fx.GraphModule, list[Any]]

# Names of what is no softmax attention over tokens: nothing in them may be rewritten.
NEGATIVES = ("neg_", "edgenext", "davit", "lambda_net", "fnet", "poolformer", "mamba")

# Of the work that is done token by token, the share that each rank does for its own tokens alone: at least this.
SHARE = 0.95

# What draws random numbers at run time, in eval mode too: there is no one right number to compare with.
RANDOM = {
    "hf/vit_mae@eager": "the patches to keep are drawn at run time",
    "hf/vit_mae@sdpa": "the patches to keep are drawn at run time",
    "hf/informer@eager": "the keys that tell which queries matter are drawn at run time",
    "hf/reformer@eager": "the directions that keys are hashed by are drawn at run time",
}


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
        return sum(site.refusal is None for site in self.report.sites if site.form != "scan")

    @property
    def refusals(self) -> list[str]:
        return [site.refusal for site in self.report.sites if site.refusal is not None]

    @property
    def known(self) -> int:
        """Sites that are rewritten, or refused with a reason: their own, or that of the whole graph they are in."""
        return self.eligible if self.report.refusal else min(self.eligible, len(self.report.sites))

    @property
    def scans(self) -> int:
        return sum(site.form == "scan" for site in self.report.sites)

    @property
    def is_spread(self) -> bool:
        return self.report.sharded_fraction >= SHARE

    @property
    def is_negative(self) -> bool:
        return any(part in self.name for part in NEGATIVES)


def outcome(name: str, length: int, p: int, also_float32: bool = False) -> Outcome:
    """Every graph of the model on p ranks, with every float32 in it made float64, and as it is if `also_float32`; where
    Dynamo takes the whole model as one graph, it has to be one."""
    module, keywords = build(name, length)
    graphs = captured_graphs(module, (), keywords, fullgraph=TRUTH[name].whole)
    # torch's flash kernel for the CPU gives rows that a finite minimum hides from all keys the wrong gradient: the log
    # of their sum is lost beside the minimum.
    with sdpa_kernel(SDPBackend.MATH):
        verdicts = [validate_graph(p, *in_float64(*graph), TOLERANCE) for graph in graphs]
        if also_float32:
            verdicts = [validate_graph(p, *graph, float32_tolerance(*graph)) for graph in graphs] + verdicts
    wrong = [verdict.wrong for verdict in verdicts if verdict.wrong]
    report = Report.merged([verdict.report for verdict in verdicts[: len(graphs)]], p)
    return Outcome(name, report, None if name in RANDOM else wrong[0] if wrong else "")


def float32_tolerance(gm: fx.GraphModule, inputs: list[Any]) -> float:
    """Four times the error that eager has in float32: of few numbers, in which much cancels, that error is a sample."""
    exact = values_and_gradients(*in_float64(gm, inputs))
    return 4 * own_error(exact, values_and_gradients(gm, inputs))


def in_float64(gm: fx.GraphModule, inputs: list[Any]) -> Graph:
    """The program with every float32 in it made float64, a softmax or norm that asks for float32 included."""
    wide = copy.deepcopy(gm)
    for part in wide.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            node.args, node.kwargs = (fx.node.map_aggregate(given, widened) for given in (node.args, node.kwargs))
            if node.op == "call_method" and node.target == "float":
                node.target = "double"
            if node.op == "call_function" and not node.all_input_nodes and is_float32(node.meta.get("example_value")):
                node.update_kwarg("dtype", torch.float64)
        if isinstance(part, fx.GraphModule):
            part.recompile()
    return wide, [x.detach().double().requires_grad_(x.requires_grad) if is_float32(x) else x for x in inputs]


def widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


# ---- a sweep in one table ------------------------------------------------------------------------------------------


def table(outcomes: Iterable[Outcome], errors: dict[str, str]) -> Table:
    shown = Table(title="zoo", title_justify="left")
    for title in ("entry", "eligible", "rewritten", "refused", "left alone", "scans", "on shards", "numbers"):
        shown.add_column(title, overflow="fold", justify="left" if title in ("entry", "numbers") else "right")
    for found in outcomes:
        numbers = {None: "not compared", "": "exact"}.get(found.wrong, found.wrong)
        counts = (found.eligible, found.rewritten, len(found.refusals), len(found.report.left_alone), found.scans)
        share = f"{found.report.sharded_fraction:.1%}" if found.rewritten else ""
        shown.add_row(found.name, *map(str, counts), share, escape(numbers))
        for reason in sorted(set(found.refusals) | {found.report.refusal or ""} - {""}):
            shown.add_row("", "", "", "", "", "", "", f"[yellow]{escape(reason)}[/yellow]")
    for name, error in errors.items():
        shown.add_row(name, "", "", "", "", "", "", f"[red]{escape(error)}[/red]")
    return shown


@dataclass(frozen=True)
class Totals:
    """Sites over all entries; more than the truth has in one entry do not make up for less in another. Of the entries:
    how many have the numbers of one process, how many have sites that are rewritten, and SHARE of their work spread."""

    eligible: int
    rewritten: int
    known: int
    false_rewrites: int
    exact: int
    sharded: int
    spread: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Totals:
        found = list(outcomes)
        return cls(
            sum(one.eligible for one in found),
            sum(min(one.eligible, one.rewritten) for one in found),
            sum(one.known for one in found),
            sum(one.rewritten for one in found if one.is_negative),
            sum(one.wrong == "" for one in found),
            sum(one.rewritten > 0 for one in found),
            sum(one.rewritten > 0 and one.is_spread for one in found),
        )

    def __str__(self) -> str:
        known, whole = f"{self.known / max(self.eligible, 1):.1%}", f"{self.rewritten} of {self.eligible}"
        return (
            f"{whole} eligible sites rewritten, {known} that or refused with a reason; {self.false_rewrites} rewrites "
            f"of what is no attention; {self.exact} entries exact; in {self.spread} of {self.sharded} with sites "
            f"rewritten at least {SHARE:.0%} of the work on shards"
        )
