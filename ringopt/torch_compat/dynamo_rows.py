"""Loops over the rows of tensors (`for x_t in x.unbind(1)`, `zip` of such, `enumerate`), as those over a range."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat.dynamo_bytecode import following, live_at
from ringopt.torch_compat.dynamo_ranges import FEWEST_TURNS, AtOnce, LoopHead, Turn, traced_in

__all__ = ["TAKE_APART", "in_the_place_of_loops_over_rows"]

TAKE_APART = ("unbind", "split")  # methods of a tensor that give its rows
# Instructions that are no part of what a loop goes over.
NOT_WITHIN = ("STORE", "POP", "JUMP", "RETURN", "RAISE", "FOR_ITER", "SEND", "YIELD")
TAKEN = "_ringopt_taken"  # of a translator: the head of the loop over rows that it has traced last


def in_the_place_of_loops_over_rows(at_once: AtOnce) -> None:
    """From here on Dynamo traces such loops so: a tensor that is taken apart for one gives nothing."""
    methods: Any = TensorVariable
    functions: Any = TorchInGraphFunctionVariable
    method, function = methods.call_method, functions.call_function

    @wraps(method)
    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        taken = name in TAKE_APART and is_taken(tx, at_once)
        return TupleVariable([]) if taken else method(self, tx, name, args, kwargs)

    @wraps(function)
    def applied(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        taken = self.value is torch.unbind and is_taken(tx, at_once)
        return TupleVariable([]) if taken else function(self, tx, args, kwargs)

    methods.call_method, functions.call_function = called, applied


def is_taken(tx: Any, at_once: AtOnce) -> bool:
    """Whether the tensor that Dynamo takes apart now is for a loop that is traced at once."""
    here, head = tx.current_instruction, head_behind(tx)
    place = getattr(here, "positions", None)
    if head is None or place is None:
        return False
    live = live_at(tx.instructions, head)
    loop = LoopHead(tx.f_code, (place.lineno, place.col_offset), live, tx.f_globals)
    turn = at_once.turn_of(loop)
    if turn is None or turn.number is None:
        return getattr(tx, TAKEN, None) is head  # of which this is another tensor
    taken = at_once.traces(tx, loop, turn, lambda: range_over_rows(tx, turn))
    setattr(tx, TAKEN, head if taken else None)
    return taken


def range_over_rows(tx: Any, turn: Turn) -> Sequence[Any] | None:
    """First, stop and step; None of a few rows, and of tensors that have not as many each."""
    names = [tx.symbolic_locals[name] for name in turn.counted]
    many = traced_in(tx, turn.number, *names)  # type: ignore[arg-type]
    if many.is_python_constant() and many.as_python_constant() < FEWEST_TURNS:
        return None
    return 0, many, 1


def head_behind(tx: Any) -> Any:
    """Where the loop begins of which Dynamo makes now what it goes over."""
    at = following(tx, tx.current_instruction)
    while at.opname != "GET_ITER":
        if at.opname.startswith(NOT_WITHIN):
            return None
        at = following(tx, at)
    head = following(tx, at)
    return head if head.opname == "FOR_ITER" else None
