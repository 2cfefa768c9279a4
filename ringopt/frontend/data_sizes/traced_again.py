"""Programs whose sizes data decide (mixtures of experts) traced as one graph, where Dynamo would break it.

    sizes = counts.tolist()      Dynamo ends its graph here, and what follows is graphs of their own, or none
    rows = where(mask)[0]
    assert lengths.max().item() <= n
    if mask.any(): ...
    if (ids < 0).any(): raise ValueError("ids")

For backends that ask for it Dynamo traces a function that breaks so once more, with such sizes as symbols, for which
it has settings, and with branches as if they were taken. What is made of them is taken out of the graph again
(stretches.py, assertions.py, predication.py). Branches that are no such thing are left, and the rest is tried without
them. What no graph comes of is traced as before: with its breaks. So is what reads a single number for more than an
assertion: what follows would have sizes that nobody knows, where behind a break they are as known as any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.fx as fx

from ringopt.errors import first_line
from ringopt.frontend.data_sizes.assertions import reads_numbers
from ringopt.frontend.data_sizes.branches import NotPredicable, Predicated
from ringopt.frontend.data_sizes.checkpoints import write_out
from ringopt.frontend.data_sizes.predication import looked_for, predicated
from ringopt.frontend.data_sizes.stretches import has_picks
from ringopt.ir.notes import WHY_LEFT
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
from ringopt.torch_compat.dynamo_branches import (
    JUMP_BREAK,
    branches_and_loops,
    places_taken,
    raises,
    takes_branches,
)
from ringopt.torch_compat.dynamo_calls import with_known_sizes
from ringopt.torch_compat.dynamo_memory import Remembered, processes

log = logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
MARK = "sizes_are_traced"
MOST_TURNS = 1024  # of loops over what data decide, in one graph: each takes some 0.1 s to trace and compile

# By function, the lines (or errors) at which it breaks and has to, and the one that is tried.
_with_breaks = Remembered(WeakKeyDictionary[CodeType, set[str]])
_tried = Remembered(WeakKeyDictionary[CodeType, str])
_for_numbers = Remembered(WeakSet[CodeType])  # those of them that are tried for a number
_for_branches = Remembered(WeakSet[CodeType])  # and for a branch
_why_left = Remembered(WeakKeyDictionary[CodeType, str])  # of frames, branches or loops in which are left
_not_taken = Remembered(WeakKeyDictionary[CodeType, set[int]])  # branches and loops that are traced as ever, by code


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
    return processes() > 1


def give_up(frame: CodeType) -> None:
    """From now on what was tried is a break."""
    _with_breaks().setdefault(frame, set()).add(_tried().pop(frame, ""))


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
    found = next((reason for reason in (*SIZES_BREAK, *JUMP_BREAK, NUMBER_BREAK) if reason in words), None)
    return found is not None and tries(frame, what, found)


def tries(frame: CodeType, what: str, reason: str) -> bool:
    """Whether it was not tried in vain before; from now on it is what is tried."""
    if what in _with_breaks().get(frame, ()):
        return False
    _tried()[frame] = what
    for kind, reasons in ((_for_numbers(), (NUMBER_BREAK,)), (_for_branches(), JUMP_BREAK)):
        (kind.add if reason in reasons else kind.discard)(frame)
    return True


def fails(frame: CodeType) -> bool:
    """Of a trace that no graph comes of; whether it is tried once more, without the branches that it took."""
    if not leaves(places_taken()) or frame in _for_branches():
        give_up(frame)
        return False
    return True


def leaves(places: Iterable[tuple[CodeType, int]]) -> bool:
    """From now on these branches and loops are traced as ever; whether there are any."""
    found = list(places)
    for code, place in found:
        _not_taken().setdefault(code, set()).add(place)
    return bool(found)


def leaves_long_loops(frame: CodeType) -> None:
    """Of a frame whose loops are too many turns to be traced."""
    _why_left()[frame] = f"loops over what data decide have more than {MOST_TURNS} turns"


def takes(code: CodeType, place: int) -> bool:
    """Whether a branch or a loop is traced as if it were taken."""
    return _settings.are_on and place not in _not_taken().get(code, ())


_settings = Settings(ended_by_size, fails, capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


def teach_sizes() -> None:
    """Has Dynamo do so, for all marked backends."""
    _settings.install()
    takes_branches(takes, looked_for, MOST_TURNS, leaves_long_loops)
    with_known_sizes(torch.div, lambda: _settings.are_on)  # Longformer's number of chunks
    goes_on_behind_breaks(takes_sizes, say_that_breaks_end)


def trace_with_sizes(gm: fx.GraphModule, ranks: int) -> list[Predicated]:
    """To be called first in a marked backend: has Dynamo trace the frame again where `gm`, for several ranks, ends at a
    size. Returns the branches that it has, of which `gm` is changed."""
    again, broken, frame = _settings.off(), break_reason(gm), frame_being_compiled()
    branches, loops, raised = branches_and_loops()
    gm.meta[WHY_LEFT] = _why_left().get(frame)
    reason, where = str(getattr(broken, "reason", "")), str(getattr(broken, "user_stack", ())[-1:])
    kind = next((kind for kind in (*SIZES_BREAK, *JUMP_BREAK, NUMBER_BREAK) if reason.startswith(kind)), None)
    if ranks > 1 and not again and kind is not None and tries(frame, where, kind):
        _settings.on()
        raise TraceOtherwise
    in_vain = getattr(broken, "graph_break", False) and where == _tried().get(frame)  # it ends there all the same
    now = write_out(gm) if again else None
    try:
        if any(node.target is raises for node in gm.graph.nodes):
            raise NotPredicable("raises an error by a number that is read for more than that", raised)
        found = predicated(gm, branches, loops, now) if now is not None and not in_vain else []
    except NotPredicable as problem:
        _why_left()[frame] = f"a branch {problem}"
        log.info("%s (line %d) keeps a graph break: %s", frame.co_name, frame.co_firstlineno, _why_left()[frame])
        if frame not in _for_branches() and leaves(problem.places):
            _settings.on()
        else:
            give_up(frame)
        raise TraceOtherwise from problem
    if again and (in_vain or (frame in _for_numbers() and reads_numbers(gm))):
        give_up(frame)
        raise TraceOtherwise
    return found


def trace_with_breaks(gm: fx.GraphModule) -> None:
    """To be called in a backend that leaves `gm` as it is: has Dynamo trace the frame as it would without us."""
    frame = frame_being_compiled()
    if frame in _tried() and has_picks(gm):
        give_up(frame)
        raise TraceOtherwise
