"""One program on p devices with the sequence sharded: `torch.compile(model, backend="ring")`.

Names are loaded when they are first used: importing ringopt imports neither torch nor any of its own modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringopt import errors, nn
    from ringopt.backend import reports
    from ringopt.compare.diff import diff
    from ringopt.compare.graph_diff import GraphDiff
    from ringopt.distributed.sampler import SameBatchSampler
    from ringopt.distributed.traffic import record_traffic
    from ringopt.drivers.convert import convert
    from ringopt.drivers.explain import explain
    from ringopt.frontend.pt2.archive import load
    from ringopt.functional import attention, shard, unshard
    from ringopt.options import Options, defaults
    from ringopt.planner.plan import Plan, plan
    from ringopt.report import Report
    from ringopt.rules.declare import AttentionRule, Gathered, Pointwise, ScanRule, Tokenwise, rule
    from ringopt.scanning import AffineState, scan, scan_kernel
    from ringopt.tensor.from_rows import from_rows
    from ringopt.version import __version__

__all__ = [
    "AffineState",
    "AttentionRule",
    "Gathered",
    "GraphDiff",
    "Options",
    "Plan",
    "Pointwise",
    "Report",
    "SameBatchSampler",
    "ScanRule",
    "Tokenwise",
    "__version__",
    "attention",
    "convert",
    "defaults",
    "diff",
    "errors",
    "explain",
    "from_rows",
    "load",
    "nn",
    "plan",
    "record_traffic",
    "reports",
    "rule",
    "scan",
    "scan_kernel",
    "shard",
    "unshard",
]

_MODULES = ("errors", "nn")

# Where each other public name lives.
_HOME = {
    "__version__": "ringopt.version",
    "AffineState": "ringopt.scanning",
    "AttentionRule": "ringopt.rules.declare",
    "Gathered": "ringopt.rules.declare",
    "GraphDiff": "ringopt.compare.graph_diff",
    "Options": "ringopt.options",
    "Pointwise": "ringopt.rules.declare",
    "Report": "ringopt.reporting.report_page",  # with the page of `to_html`
    "SameBatchSampler": "ringopt.distributed.sampler",
    "ScanRule": "ringopt.rules.declare",
    "Tokenwise": "ringopt.rules.declare",
    "attention": "ringopt.functional",
    "convert": "ringopt.drivers.convert",
    "defaults": "ringopt.options",
    "diff": "ringopt.compare.diff",
    "explain": "ringopt.drivers.explain",
    "from_rows": "ringopt.tensor.from_rows",
    "Plan": "ringopt.planner.plan",
    "load": "ringopt.frontend.pt2.archive",
    "plan": "ringopt.planner.plan",
    "record_traffic": "ringopt.distributed.traffic",
    "reports": "ringopt.backend",
    "rule": "ringopt.rules.declare",
    "scan": "ringopt.scanning",
    "scan_kernel": "ringopt.scanning",
    "shard": "ringopt.functional",
    "unshard": "ringopt.functional",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ringopt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ringopt' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
