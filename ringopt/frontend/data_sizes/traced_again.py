"""Programs whose sizes data decide (mixtures of experts) traced as one graph, where Dynamo would break it.

    sizes = counts.tolist()      Dynamo ends its graph here, and what follows is graphs of their own, or none
    rows = where(mask)[0]
    assert lengths.max().item() <= n

For backends that ask for it Dynamo traces a function that breaks so once more, with such sizes as symbols, for which
it has settings. What is made of them is taken out of the graph again (stretches.py, assertions.py). What no graph comes
of is traced as before: a third time, with its breaks. So is what reads a single number for more than an assertion: what
follows would have sizes that nobody knows, where behind a break they are as known as any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
import torch.fx as fx

from ringopt.errors import first_line
from ringopt.frontend.data_sizes.assertions import reads_numbers
from ringopt.frontend.data_sizes.stretches import has_picks
from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import (
    NUMBER_BREAK,
    SIZES_BREAK,
    EndedAt,
    Settings,
    TraceOtherwise,
    break_reason,
    frame_being_compiled,
    goes_on_behind_breaks,
)

log = logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
MARK = "sizes_are_traced"

# By function, the lines (or errors) at which it breaks and has to, and the one that is tried.
_with_breaks = WeakKeyDictionary[CodeType, set[str]]()
_tried = WeakKeyDictionary[CodeType, str]()
_for_numbers = WeakSet[CodeType]()  # those of them that are tried for a number


def traces_sizes(when: Callable[[], bool]) -> Callable[[F], F]:
    """Marks a backend that takes such sizes out of its graphs, `when` they are to be."""

    def marked(backend: F) -> F:
        setattr(backend, MARK, when)
        return backend

    return marked


def takes_sizes(backends: Iterator[Any]) -> bool:
    """Whether one of them is marked, and is to take them."""
    return any(getattr(backend, MARK, bool)() for backend in backends)


def on_ranks() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def give_up(frame: CodeType) -> None:
    """From now on what was tried is a break."""
    _with_breaks.setdefault(frame, set()).add(_tried.pop(frame, ""))


def say_that_breaks_end(frame: CodeType, error: Exception) -> None:
    """Of a frame in which Dynamo fails to go on behind a break in what it calls."""
    message = "behind a graph break in what it calls, %s (line %d) is traced as graphs of its own: %s"
    log.info(message, frame.co_name, frame.co_firstlineno, first_line(error))


def ended_by_size(backends: Iterator[Any], frame: CodeType, error: Exception) -> bool:
    """Whether a frame of which no graph came (a break in a loop) ended at a size, and is to be tried."""
    if not takes_sizes(backends):
        return False
    words, cause = "", error
    while cause is not None:
        words, cause = words + str(cause), cause.__cause__ or cause.__context__  # type: ignore[assignment]
    what = str(error.reason.user_stack[-1:]) if isinstance(error, EndedAt) else words
    size = any(reason in words for reason in SIZES_BREAK)
    return (size or NUMBER_BREAK in words) and tries(frame, what, not size)


def tries(frame: CodeType, what: str, number: bool) -> bool:
    """Whether it was not tried in vain before; from now on it is what is tried."""
    if what in _with_breaks.get(frame, ()):
        return False
    _tried[frame] = what
    (_for_numbers.add if number else _for_numbers.discard)(frame)
    return True


_settings = Settings(ended_by_size, give_up, capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def teach_sizes() -> None:
    """Has Dynamo do so, for all marked backends."""
    _settings.install()
    goes_on_behind_breaks(takes_sizes, say_that_breaks_end)


def trace_with_sizes(gm: fx.GraphModule, ranks: int) -> None:
    """To be called first in a marked backend: has Dynamo trace the frame again where `gm`, for several ranks, ends at a
    size."""
    again, broken, frame = _settings.off(), break_reason(gm), frame_being_compiled()
    reason, where = str(getattr(broken, "reason", "")), str(getattr(broken, "user_stack", ())[-1:])
    ends = ranks > 1 and not again and reason.startswith((*SIZES_BREAK, NUMBER_BREAK))
    if ends and tries(frame, where, reason.startswith(NUMBER_BREAK)):
        _settings.on()
        raise TraceOtherwise
    in_vain = getattr(broken, "graph_break", False) and where == _tried.get(frame)  # it ends there all the same
    if again and (in_vain or (frame in _for_numbers and reads_numbers(gm))):
        give_up(frame)
        raise TraceOtherwise


def trace_with_breaks(gm: fx.GraphModule) -> None:
    """To be called in a backend that leaves `gm` as it is: has Dynamo trace the frame as it would without us."""
    frame = frame_being_compiled()
    if frame in _tried and has_picks(gm):
        give_up(frame)
        raise TraceOtherwise
