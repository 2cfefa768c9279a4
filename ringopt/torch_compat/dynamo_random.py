"""Numbers that a program draws with Python's `random` while Dynamo traces it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from torch._dynamo.source import RandomValueSource
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import UnspecializedPythonVariable

__all__ = ["know_what_no_draw_reaches"]

# Of `draw OP bound`, where no draw is below the bound: what it is, whatever is drawn.
BELOW_NONE = {"<": False, ">=": True}


@cache
def know_what_no_draw_reaches() -> None:
    """From now on `random.uniform(0, 1) < 0.0` is False when Dynamo traces it (layers that are dropped with a
    probability of zero), where it would end the graph. The number is drawn all the same."""
    for sign, always in BELOW_NONE.items():
        compare_op_handlers[sign] = known(compare_op_handlers[sign], always)


def known(original: Callable[..., Any], always: bool) -> Callable[..., Any]:
    """The comparison in Dynamo, which is `always` so of draws that are none below a bound."""

    def compare(tx: Any, args: Any, kwargs: Any) -> Any:
        drawn, bound = args
        if isinstance(drawn, UnspecializedPythonVariable) and isinstance(drawn.source, RandomValueSource):
            least = least_of(*tx.output.random_calls[drawn.source.random_call_index])
            number = bound.as_python_constant() if bound.is_python_constant() else None
            if least is not None and isinstance(number, (int, float)) and number <= least:
                return ConstantVariable.create(always)
        return original(tx, args, kwargs)

    return compare


def least_of(draw: Any, args: Any, kwargs: Any) -> float | None:
    """What no draw of such a call is below; None where it is not known."""
    known = draw == random.uniform and len(args) == 2 and not kwargs and args[0] <= args[1]
    return float(args[0]) if known else None
