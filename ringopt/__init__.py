"""One program on p devices with the sequence sharded: `torch.compile(model, backend="ring")`.

Names are loaded when they are first used: importing ringopt imports neither torch nor any of its own modules.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringopt import errors, nn
    from ringopt.archive import load
    from ringopt.arrive import from_rows
    from ringopt.backend import reports
    from ringopt.compare.programs import diff
    from ringopt.convert import convert
    from ringopt.distributed.traffic import record_traffic
    from ringopt.explain import explain
    from ringopt.functional import attention, shard, unshard
    from ringopt.graph.diff import GraphDiff
    from ringopt.options import Options
    from ringopt.plan import Plan, plan
    from ringopt.report import Report

__version__ = "0.1.0"

__all__ = [
    "GraphDiff",
    "Options",
    "Plan",
    "Report",
    "attention",
    "convert",
    "diff",
    "errors",
    "explain",
    "from_rows",
    "load",
    "nn",
    "plan",
    "record_traffic",
    "reports",
    "shard",
    "unshard",
]

_MODULES = ("errors", "nn")

# Where each other public name lives.
_HOME = {
    "GraphDiff": "ringopt.graph.diff",
    "Options": "ringopt.options",
    "Report": "ringopt.report",
    "attention": "ringopt.functional",
    "convert": "ringopt.convert",
    "diff": "ringopt.compare.programs",
    "explain": "ringopt.explain",
    "from_rows": "ringopt.arrive",
    "Plan": "ringopt.plan",
    "load": "ringopt.archive",
    "plan": "ringopt.plan",
    "record_traffic": "ringopt.distributed.traffic",
    "reports": "ringopt.backend",
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
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`ringopt.attention` is the function, although the folder attention/ has the same name.

    The import system sets a submodule as attribute of its package; for a public name that is a function it must not.
    `from ringopt.attention.rows import Rows` looks modules up by their full name and is not affected.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
