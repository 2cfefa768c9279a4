"""Loops that are recurrences as one node: for backend="ring", Dynamo is given torch's scan in their place.

    for i in range(n // 64):                               (state,), (ys,) = scan(turn, (state,), (k, v, dim 1 first))
        state, out[:, i] = f(state, k[:, i], v[:, i])  ->  out[:, :] = ys.movedim(0, 1)

    for x_t in x.unbind(1):                            ->  for i in range(x.shape[1]):  (over_rows.py)

Dynamo unrolls a loop: the graph grows with the number of turns, each number of them has a graph of its own, and many
thousand tokens are traced in no time that anybody waits. What a turn does is read off the source of the loop (turn.py).
Where find_scan makes no scan of it that ranks share, Dynamo traces the loop as it was written, and so it does for all
other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.fx as fx

from ringopt.frontend.loops.rows import NotATurn
from ringopt.frontend.loops.source import Place, loop_at
from ringopt.frontend.loops.turn import turn_of
from ringopt.ir.notes import LOOP
from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import SCAN, TraceOtherwise, backends_compiling
from ringopt.torch_compat.dynamo_lists import joined_at_once
from ringopt.torch_compat.dynamo_memory import Remembered, processes
from ringopt.torch_compat.dynamo_ranges import AtOnce, LoopHead, Turn, in_the_place_of_loops, is_of_first_turn
from ringopt.torch_compat.dynamo_rows import in_the_place_of_loops_over_rows

log = logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
MARK = "loops_are_scans"

_unrolled = Remembered(WeakKeyDictionary[CodeType, set[Place]])
_first_apart = Remembered(WeakKeyDictionary[CodeType, set[Place]])
_code_of = WeakValueDictionary[tuple[str, Place], CodeType]()  # of loops that were traced as one node


def rolls_loops(backend: F) -> F:
    """Marks a backend that reads torch's scan, and calls `leave_loop` of one that it makes nothing of."""
    setattr(backend, MARK, True)
    return backend


def teach_loops() -> None:
    """Has Dynamo do so, for all marked backends."""
    at_once = AtOnce(known_turn, rows_of, scanned, put, noted, left)
    in_the_place_of_loops(at_once)
    in_the_place_of_loops_over_rows(at_once)
    joined_at_once(joined)


# ---- what Dynamo traces ----------------------------------------------------------------------------------------------
def rows_of(x: torch.Tensor, dim: int, wide: bool, turns: int, start: int, size: int) -> torch.Tensor:
    """Those that the turns read or write, by turns in dim 0. `wide`: each takes `size` side by side."""
    dim = dim % x.dim()
    whole = start == 0 and x.shape[dim] == turns * size
    part = x if whole else x.narrow(dim, start, turns * size)
    return (part.unflatten(dim, (-1, size)) if wide else part).movedim(dim, 0)


def scanned(
    turn: FunctionType, apart: bool, carried: Any, rows: Any, rest: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What is carried behind all turns, and the rows that they write. `apart`: the first turn is traced by itself."""

    def step(carry: Any, row: Any) -> Any:
        new, ys = turn(*carry, *row, *rest)
        return tuple([laid_out(x) for x in new]), tuple([y.clone() for y in ys])

    if not apart:
        return SCAN(step, tuple([laid_out(x) for x in carried]), rows)
    begun, written = step(carried, tuple([x[0] for x in rows]))
    last, ys = SCAN(step, begun, tuple([x[1:] for x in rows]))
    return last, tuple([torch.cat([y[None], later]) for y, later in zip(written, ys)])  # noqa: B905 (Dynamo)


def put(into: Any, rows: Any) -> None:
    """The rows, written."""
    for x, y in zip(into, rows):  # noqa: B905 (Dynamo)
        x.copy_(y)


def joined(stacked: bool, before: Any, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """`torch.stack` or `torch.cat` of a list: of what was in it before, and of rows."""
    at = dim if stacked or dim >= 0 else dim - 1  # counted from the end, of one dim more
    whole = rows.movedim(0, at)
    whole = whole if stacked else whole.flatten(at, at + 1)
    if len(before) == 0:
        return whole.contiguous()
    return torch.cat([torch.stack(before, dim) if stacked else torch.cat(before, dim), whole], dim)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """torch's scan asks for the same strides in all turns, and no value twice."""
    return x.clone(memory_format=torch.contiguous_format)


# ---- which loops -----------------------------------------------------------------------------------------------------
def known_turn(head: LoopHead) -> Turn | None:
    """The turn of a loop that is to be traced as one node, for the backend that Dynamo traces for."""
    marked = any(getattr(backend, MARK, False) for backend in backends_compiling())
    if not marked or head.place in _unrolled().get(head.code, ()):
        return None
    loop = loop_at(head.code, head.place)
    if loop is None:
        return None
    try:
        turn = turn_of(loop, head.code, head.live, head.names)
    except NotATurn as problem:
        left(head, problem)
        return None
    # A graph for any number of chunks has two or more for each rank; of fewer, each number has one.
    return replace(turn, first_apart=head.place in _first_apart().get(head.code, ()), fewest=2 * processes())


def noted(head: LoopHead, node: fx.Node) -> None:
    """At the node that stands for a loop."""
    loop = (head.code.co_filename, head.place)
    _code_of[loop] = head.code
    node.meta["custom"] = {**node.meta.get("custom", {}), LOOP: loop}


def left(head: LoopHead, why: Exception | str) -> None:
    """From now on a loop is traced turn by turn, or its first turn by itself."""
    first_apart = _first_apart().setdefault(head.code, set())
    if isinstance(why, Exception) and is_of_first_turn(why) and head.place not in first_apart:
        first_apart.add(head.place)
        return
    log.info("the loop in line %d of %s is traced turn by turn: %s", head.place[0], head.code.co_filename, why)
    _unrolled().setdefault(head.code, set()).add(head.place)


def is_loop(node: fx.Node) -> bool:
    """Whether it stands for a loop of the program."""
    return LOOP in node.meta.get("custom", {})


def leave_loop(node: fx.Node, why: str) -> None:
    """To be called in a marked backend of which no ranks share the scan that a node is: has Dynamo trace the frame
    again if it stands for a loop."""
    file, place = node.meta.get("custom", {}).get(LOOP, ("", (0, 0)))
    code = _code_of.get((file, place))
    if code is not None:
        left(LoopHead(code, place), why)
        raise TraceOtherwise


def trace_loops_as_written(gm: fx.GraphModule, why: str) -> None:
    """To be called in a backend that leaves `gm` as it is: the same, of all loops."""
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            leave_loop(node, why)
