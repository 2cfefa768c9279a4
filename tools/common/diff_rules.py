"""Rules on which `ringopt diff --fail-on` ends with 1.

    bytes    bytes+10%    bytes+4096      more than before; by more than a share of it, or a number
    flops, nodes, refused                 likewise; `refused`: attentions that are not sharded
    error    error>1e-5                   a value or a gradient that is off by more than its dtype allows, or by so
                                          much of its largest element (with --inputs)
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringopt.compare.graph_diff import GraphDiff

RULE = re.compile(r"(bytes|flops|nodes|refused)(?:\+(\d+(?:\.\d+)?)(%?))?|error(?:>(\d+(?:\.\d+)?(?:e[+-]?\d+)?))?")


@dataclass(frozen=True)
class Rule:
    """One of --fail-on, as it was written; `more`: what is allowed beyond the number before, a `share` of it or not;
    `most`: the error that is allowed, None: what its dtype allows."""

    text: str
    metric: str
    more: float = 0.0
    share: bool = False
    most: float | None = None

    def broken(self, diff: GraphDiff) -> str:
        """Why the check fails, or "". What is not known is no success."""
        if self.metric == "error":
            return self.off(diff)
        before, after = (number_of(diff, self.metric, side) for side in (0, 1))
        if before is None or after is None:
            return f"{self.text}: not known on both sides"
        allowed = before * (1 + self.more / 100) if self.share else before + self.more
        return f"{self.text}: {before:,} -> {after:,}" if after > allowed else ""

    def off(self, diff: GraphDiff) -> str:
        """The first node whose value is off by more than is allowed, or else whose gradient is."""
        if not diff.compared:
            return f"{self.text}: no values were compared (--inputs)"
        values = ((change.node, "", change.error) for change in diff.changes)
        gradients = ((change.node, "the gradient of ", change.gradient) for change in diff.changes[::-1])
        for node, what, error in (*values, *gradients):
            if error is not None and not error.relative <= (error.allowed if self.most is None else self.most):
                return f"{self.text}: {what}%{node.name} is off by {error}"
        return ""


def fail_rule(text: str) -> Rule:
    """An argument of --fail-on (argparse's `type`)."""
    found = RULE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no rule, such as bytes+10%, flops, nodes+5, refused, error>1e-5")
    metric, more, share, least = found.groups()
    if metric is None:
        return Rule(text, "error", most=None if least is None else float(least))
    return Rule(text, metric, float(more or 0), bool(share))


def number_of(diff: GraphDiff, metric: str, side: int) -> int | None:
    """Of one program; None where it is not known."""
    totals = (diff.before, diff.after)[side]
    if metric == "refused":
        views = [(change.before, change.after)[side] for change in diff.sites]
        return sum(view is not None and view.site is not None and bool(view.site.reason) for view in views)
    return {"bytes": totals.bytes_sent, "flops": totals.flops, "nodes": totals.nodes}[metric]
