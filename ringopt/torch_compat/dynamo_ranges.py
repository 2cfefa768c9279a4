"""Loops over a range, for which Dynamo is given a function of all turns instead of unrolling them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
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

__all__ = ["LoopHead", "Turn", "in_the_place_of_loops", "is_of_first_turn"]

FEWEST_TURNS = 8  # fewer are traced one by one, but where their number is open


@dataclass(frozen=True)
class Turn:
    """`function(*carried, *rows, *rest)` gives a tuple of what is carried on and one of rows: of the local names
    `carried` and `rest`, and of the rows of `read` and `written`, each the name of a tensor and a dim of it. With
    `first_apart` the first turn is traced before the others. Where their number is open, it holds of `fewest` or more.
    """

    function: FunctionType
    carried: tuple[str, ...]
    read: tuple[tuple[str, int], ...]
    written: tuple[tuple[str, int], ...]
    rest: tuple[str, ...]
    first_apart: bool = False
    fewest: int = 2


@dataclass(frozen=True)
class LoopHead:
    """A `for` of the function `code` that goes over a range which stands at `place` (line, column). `live`: the local
    names that are read from there on before they are set; `names`: the globals of the function."""

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


def in_the_place_of_loops(
    turn_of: Callable[[LoopHead], Turn | None],
    scanned: Callable[..., Any],
    put: Callable[..., Any],
    noted: Callable[[LoopHead, fx.Node], None],
    left: Callable[[LoopHead, Exception], None],
) -> None:
    """From here on Dynamo traces `scanned(function, turns, apart, carried, tensors, dims, rest)`, which calls torch's
    scan and gives what is carried and the rows, and `put(turns, tensors, dims, rows)`, in the place of a loop of which
    `turn_of` gives a turn. `noted` is told of the node. Where Dynamo does not get through, `left` is called, and the
    frame is traced again."""
    kind: Any = BuiltinVariable
    call = kind.call_range

    @wraps(call)
    def ranged(self: Any, tx: Any, *args: Any) -> Any:
        turns = turns_of(args)
        head = head_at(tx) if turns is not None else None
        turn = turn_of(head) if head is not None else None
        if head is None or turn is None or not are_enough(turns, turn.fewest):
            return call(self, tx, *args)
        try:
            noted(head, traced_at_once(tx, turn, turns, scanned, put))
        except RestartAnalysis:
            raise
        except Exception as error:
            left(head, error)
            raise TraceOtherwise from error
        return call(self, tx, VariableTracker.build(tx, 0))  # no turn is left of it

    kind.call_range = ranged
    kind.call_function_handler_cache.clear()  # which holds the methods of before


def turns_of(args: Sequence[Any]) -> Any:
    """How many numbers a range from 0 has, as Dynamo knows it; None of another, of a few, and where data decide."""
    found = [arg.realize() for arg in args]
    zero = len(found) == 2 and found[0].is_python_constant() and found[0].as_python_constant() == 0
    if not (len(found) == 1 or zero):
        return None
    if isinstance(found[-1], SymNodeVariable):
        return None if free_unbacked_symbols(found[-1].sym_num) else found[-1]
    many = found[-1].is_python_constant() and found[-1].as_python_constant() >= FEWEST_TURNS
    return found[-1] if many else None


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


def traced_at_once(tx: Any, turn: Turn, turns: Any, scanned: Callable[..., Any], put: Callable[..., Any]) -> fx.Node:
    """Has Dynamo trace the function of all turns, and sets the names that the loop sets. Returns the node of it."""
    read, written = ([name for name, _ in part] for part in (turn.read, turn.written))
    found = {name: tx.symbolic_locals[name].realize() for name in (*turn.carried, *read, *written, *turn.rest)}
    check(tx, turn, found)

    def all_of(names: Iterable[str]) -> Any:
        return TupleVariable([found[name] for name in names])

    def traced(function: Callable[..., Any], *given: Any) -> Any:
        args = [each if isinstance(each, VariableTracker) else VariableTracker.build(tx, each) for each in given]
        return VariableTracker.build(tx, function).call_function(tx, args, {})

    dims, into = (tuple(dim for _, dim in part) for part in (turn.read, turn.written))
    operands = (all_of(turn.carried), all_of(read), dims, all_of(turn.rest))
    result = traced(scanned, turn.function, turns, turn.first_apart, *operands)
    node = next(node for node in reversed(tx.output.graph.nodes) if node.target is scan_op)
    last, rows = (part.unpack_var_sequence(tx) for part in result.unpack_var_sequence(tx))
    for name, dim, row in zip(written, into, rows, strict=True):
        whole, shape = value_in(found[name]), value_in(row).shape[1:]
        if shape != whole.select(dim, 0).shape:
            raise NotOneNode("a row that is written has another shape")
    traced(put, turns, all_of(written), into, TupleVariable(rows))
    tx.symbolic_locals.update(zip(turn.carried, last, strict=True))
    return node


def check(tx: Any, turn: Turn, found: dict[str, Any]) -> None:
    """Raises NotOneNode where a name is no tensor, or rows are written to memory that a turn may read."""
    if not all(isinstance(found[name], TensorVariable) for name, _ in (*turn.read, *turn.written)):
        raise NotOneNode("it reads or writes rows of what is no tensor")
    if not turn.first_apart and not all(isinstance(found[name], TensorVariable) for name in turn.carried):
        raise OtherAtFirst("what is carried into it is no tensor")
    written = {name: storage_of(value_in(found[name])) for name, _ in turn.written}
    others = list[Any]()
    kept = [list(each.values()) for each in tx.output.side_effects.store_attr_mutations.values()]
    VariableTracker.visit(others.append, [*(x for name, x in found.items() if name not in written), *kept])
    values = [value_in(x) for x in others if isinstance(x, TensorVariable)]
    for tracer in (tx.output.current_tracer, tx.output.root_tracer):
        values += [node.meta.get("example_value") for node in tracer.graph.find_nodes(op="placeholder")]
    read = {storage_of(value) for value in values if isinstance(value, torch.Tensor)}
    if read & set(written.values()) or len({*written.values()}) < len(written):
        raise NotOneNode("it writes to memory that it may read")


def storage_of(value: torch.Tensor) -> int:
    """What tells memory from other memory."""
    return int(value.untyped_storage()._cdata)


def value_in(variable: Any) -> torch.Tensor:
    """The fake tensor."""
    return variable.as_proxy().node.meta["example_value"]  # type: ignore[no-any-return]
