"""Loops over a range, for which Dynamo is given a function of all turns instead of unrolling them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._higher_order_ops.scan import scan_op
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ringopt.torch_compat.dynamo import TraceOtherwise
from ringopt.torch_compat.dynamo_bytecode import following, live_at
from ringopt.torch_compat.dynamo_lists import is_open_list, put_behind

__all__ = ["AtOnce", "LoopHead", "RowsInTurns", "Turn", "in_the_place_of_loops", "is_of_first_turn"]

FEWEST_TURNS = 8  # fewer are traced one by one, but where their number is open


@dataclass(frozen=True)
class RowsInTurns:
    """The rows of the local name `tensor` along a dim, one of each turn, or with `wide` some that lie side by side."""

    tensor: str
    dim: int
    wide: bool = False


@dataclass(frozen=True)
class Turn:
    """`function(*carried, *rows, *rest)` gives a tuple of what is carried on and one of rows: of the local names
    `carried` and `rest`, of the rows that are `read`, and of those that are `written` or appended to `lists`.
    `lie(first, last, step, *rest)`, of the numbers of turns, gives where rows begin and how many there are in a turn,
    of those that are read and then of those that are written; None where turns are not alike. With `first_apart` the
    first turn is traced before the others. Where their number is open, it holds of `fewest` or more. Of a loop over
    rows `number(*counted)` says how many there are, -1 where its tensors differ."""

    function: FunctionType
    lie: FunctionType
    carried: tuple[str, ...]
    read: tuple[RowsInTurns, ...]
    written: tuple[RowsInTurns, ...]
    lists: tuple[str, ...]
    rest: tuple[str, ...]
    first_apart: bool = False
    fewest: int = 2
    number: FunctionType | None = None
    counted: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoopHead:
    """A `for` of the function `code` that goes over a range which stands at `place` (line, column), or over the rows of
    a tensor that is taken apart there. `live`: the local names that are read from there on before they are set;
    `names`: the globals of the function."""

    code: CodeType
    place: tuple[int, int]
    live: set[str] = field(default_factory=set)
    names: dict[str, Any] = field(default_factory=dict, repr=False)


class NotOneNode(Exception):
    """What Dynamo knows of a loop's tensors says that it is something else."""


def is_of_first_turn(error: Exception) -> bool:
    """Whether what is carried into a loop is of another shape or dtype than what a turn carries on, or no tensor."""
    return isinstance(error, OtherAtFirst) or "Expected init and carry to have same metadata" in str(error)


class OtherAtFirst(NotOneNode):
    """What is carried into a loop is no tensor."""


@dataclass(frozen=True)
class AtOnce:
    """What Dynamo traces in the place of a loop of which `turn_of` gives a turn: `scanned(function, apart, carried,
    rows, rest)`, which calls torch's scan and gives what is carried and the rows; before it `rows_of(tensor, dim, wide,
    turns, start, size)`, the rows that are read and written, by turns in dim 0, and behind it `put(into, rows)`.
    `noted` is told of the node. Where Dynamo does not get through, `left` is called, and the frame is traced again."""

    turn_of: Callable[[LoopHead], Turn | None]
    rows_of: Callable[..., Any]
    scanned: Callable[..., Any]
    put: Callable[..., Any]
    noted: Callable[[LoopHead, fx.Node], None]
    left: Callable[[LoopHead, Exception], None]

    def traces(self, tx: Any, head: LoopHead, turn: Turn, range_of: Callable[[], Sequence[Any] | None]) -> bool:
        """Whether it is traced so, with a range of first, stop and step; where not, it is to be traced as ever."""
        try:
            given = range_of()
            if given is None:
                return False
            count = Count(*traced_in(tx, counted, *given).unpack_var_sequence(tx))
            if not are_enough(count.turns, turn.fewest):
                return False
            why = NotOneNode("a list of its rows is read for more than torch.stack or torch.cat")
            leave = partial(self.left, head, why)
            node = traced_at_once(tx, turn, count, (self.rows_of, self.scanned, self.put), leave)
        except RestartAnalysis:
            raise
        except Exception as error:
            self.left(head, error)
            raise TraceOtherwise from error
        if node is not None:
            self.noted(head, node)
        return node is not None


def in_the_place_of_loops(at_once: AtOnce) -> None:
    """From here on Dynamo traces loops over a range so."""
    kind: Any = BuiltinVariable
    call = kind.call_range

    @wraps(call)
    def ranged(self: Any, tx: Any, *args: Any) -> Any:
        given = range_of(tx, args)
        head = head_at(tx) if given else None
        turn = at_once.turn_of(head) if head is not None else None
        if head is not None and turn is not None and at_once.traces(tx, head, turn, lambda: given):
            return call(self, tx, VariableTracker.build(tx, 0))  # no turn is left of it
        return call(self, tx, *args)

    kind.call_range = ranged
    kind.call_function_handler_cache.clear()  # which holds the methods of before


@dataclass(frozen=True)
class Count:
    """The numbers of the turns, as Dynamo knows them."""

    turns: Any
    first: Any
    last: Any
    step: Any


def counted(first: int, stop: int, step: int) -> tuple[int, int, int, int]:
    """For Dynamo to trace."""
    turns = stop - first if step == 1 else (stop - first + step - 1) // step
    return turns, first, first + step * (turns - 1), step


def range_of(tx: Any, args: Sequence[Any]) -> tuple[Any, Any, Any] | None:
    """First, stop and step, as Dynamo knows them; None of a few numbers, and where data decide."""
    found = [arg.realize() for arg in args]
    if not all(is_whole(arg) for arg in found):
        return None
    zero, one = VariableTracker.build(tx, 0), VariableTracker.build(tx, 1)
    begun = [*found] if len(found) > 1 else [zero, *found]
    first, stop, step = [*begun, one][:3]
    if not step.is_python_constant() or step.as_python_constant() < 1:
        return None
    if all(arg.is_python_constant() for arg in found):
        begin, end, by = (arg.as_python_constant() for arg in (first, stop, step))
        if len(range(begin, end, by)) < FEWEST_TURNS:
            return None
    return first, stop, step


def is_whole(variable: Any) -> bool:
    """Whether it is a whole number that no data decide."""
    if isinstance(variable, SymNodeVariable):
        return not free_unbacked_symbols(variable.sym_num)
    return bool(variable.is_python_constant()) and type(variable.as_python_constant()) is int


def are_enough(turns: Any, fewest: int) -> bool:
    """Of an open number a guard."""
    return not isinstance(turns, SymNodeVariable) or bool(turns.sym_num >= fewest)


def head_at(tx: Any) -> LoopHead | None:
    """The loop whose range Dynamo makes now, if nothing reads its last number."""
    here = tx.current_instruction
    place, over = getattr(here, "positions", None), following(tx, here)
    head = following(tx, over)
    if over.opname != "GET_ITER" or head.opname != "FOR_ITER" or place is None:
        return None
    if following(tx, head).argval in live_at(tx.instructions, head.target):
        return None
    return LoopHead(tx.f_code, (place.lineno, place.col_offset), live_at(tx.instructions, head), tx.f_globals)


def traced_in(tx: Any, function: Callable[..., Any], *given: Any) -> Any:
    """Has Dynamo trace a call. What is no variable of its is a constant."""
    args = [each if isinstance(each, VariableTracker) else VariableTracker.build(tx, each) for each in given]
    return VariableTracker.build(tx, function).call_function(tx, args, {})


def traced_at_once(
    tx: Any, turn: Turn, count: Count, functions: tuple[Callable[..., Any], ...], leave: Callable[[], None]
) -> fx.Node | None:
    """Has Dynamo trace the function of all turns, and sets the names that the loop sets. Returns the node of it; None
    where of so many turns not all are alike, as where the last one has fewer rows."""
    rows_of, scanned, put = functions
    tensors = [rows.tensor for rows in (*turn.read, *turn.written)]
    found = {name: tx.symbolic_locals[name].realize() for name in (*turn.carried, *tensors, *turn.lists, *turn.rest)}
    watched = check(tx, turn, found)
    rest = [found[name] for name in turn.rest]
    lie = traced_in(tx, turn.lie, count.first, count.last, count.step, *rest)
    if lie.is_python_constant() and lie.as_python_constant() is None:
        return None
    taken = [
        traced_in(tx, rows_of, found[rows.tensor], rows.dim, rows.wide, count.turns, *cut.unpack_var_sequence(tx))
        for rows, cut in zip((*turn.read, *turn.written), lie.unpack_var_sequence(tx), strict=True)
    ]
    read, into = taken[: len(turn.read)], taken[len(turn.read) :]
    carried = TupleVariable([found[name] for name in turn.carried])
    result = traced_in(tx, scanned, turn.function, turn.first_apart, carried, TupleVariable(read), TupleVariable(rest))
    node = next(node for node in reversed(tx.output.graph.nodes) if node.target is scan_op)
    last, rows = (part.unpack_var_sequence(tx) for part in result.unpack_var_sequence(tx))
    for whole, row in zip(into, rows, strict=False):
        if value_in(whole).shape != value_in(row).shape:
            raise NotOneNode("a row that is written has another shape")
    traced_in(tx, put, TupleVariable(into), TupleVariable(rows[: len(into)]))
    for name, row in zip(turn.lists, rows[len(into) :], strict=True):
        put_behind(tx, found[name], row, [*watched, *map(value_in, last)], leave)
    tx.symbolic_locals.update(zip(turn.carried, last, strict=True))
    return node


def check(tx: Any, turn: Turn, found: dict[str, Any]) -> list[torch.Tensor]:
    """Raises NotOneNode where a name is no tensor, or rows go to memory or a list that a turn may read. Returns the
    tensors that it may read."""
    if not all(isinstance(found[rows.tensor], TensorVariable) for rows in (*turn.read, *turn.written)):
        raise NotOneNode("it reads or writes rows of what is no tensor")
    if not turn.first_apart and not all(isinstance(found[name], TensorVariable) for name in turn.carried):
        raise OtherAtFirst("what is carried into it is no tensor")
    if not all(is_open_list(found[name]) for name in turn.lists):
        raise NotOneNode("it appends to what is no list, or one that others may hold")
    written = {rows.tensor: storage_of(value_in(found[rows.tensor])) for rows in turn.written}
    others = list[Any]()
    kept = [list(each.values()) for each in tx.output.side_effects.store_attr_mutations.values()]
    apart = {*written, *turn.lists}
    VariableTracker.visit(others.append, [*(x for name, x in found.items() if name not in apart), *kept])
    if any(each is found[name] for each in others for name in turn.lists):
        raise NotOneNode("it appends to a list that it may read")
    values = [value_in(x) for x in others if isinstance(x, TensorVariable)]
    for tracer in (tx.output.current_tracer, tx.output.root_tracer):
        values += [node.meta.get("example_value") for node in tracer.graph.find_nodes(op="placeholder")]
    values = [value for value in values if isinstance(value, torch.Tensor)]
    if {*map(storage_of, values)} & set(written.values()) or len({*written.values()}) < len(written):
        raise NotOneNode("it writes to memory that it may read")
    return values


def storage_of(value: torch.Tensor) -> int:
    """What tells memory from other memory."""
    return int(value.untyped_storage()._cdata)


def value_in(variable: Any) -> torch.Tensor:
    """The fake tensor."""
    return variable.as_proxy().node.meta["example_value"]  # type: ignore[no-any-return]
