"""What Dynamo traces in the place of what a program calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo import convert_frame
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable, CellVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ringopt.torch_compat.dynamo import TraceOtherwise, forget
from ringopt.torch_compat.dynamo_memory import Remembered

__all__ = ["in_the_place_of_apply", "in_the_place_of_calls", "not_traced", "with_known_sizes"]

APPLIED: dict[type, Callable[..., Any]] = {}


def in_the_place_of_apply(function: type, form: Callable[..., Any]) -> None:
    """From here on Dynamo traces `form` where a program calls `apply` of an autograd.Function. It also answers whether
    the Function has an attribute, and with which number or truth, where it would end the graph."""
    if not APPLIED:
        kind: Any = AutogradFunctionVariable
        call, has, read = kind.call_method, kind.call_obj_hasattr, kind.const_getattr

        @wraps(call)
        def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            form = APPLIED.get(self.fn_cls) if name == "apply" else None
            if form is None:
                return call(self, tx, name, args, kwargs)
            return VariableTracker.build(tx, form).call_function(tx, args, kwargs)

        @wraps(has)
        def asked(self: Any, tx: Any, name: str) -> Any:
            known = self.fn_cls in APPLIED
            return VariableTracker.build(tx, hasattr(self.fn_cls, name)) if known else has(self, tx, name)

        @wraps(read)
        def found(self: Any, tx: Any, name: str) -> Any:
            value = getattr(self.fn_cls, name, None) if self.fn_cls in APPLIED else None
            return value if isinstance(value, (bool, int)) else read(self, tx, name)

        kind.call_method, kind.call_obj_hasattr, kind.const_getattr = called, asked, found
    APPLIED[function] = form


FormOf = Callable[[CodeType, Mapping[str, Any]], Callable[..., Any] | None]
BEGUN, NOT_TAUGHT = set[CodeType](), Remembered(WeakSet[CodeType])


def in_the_place_of_calls(first: Callable[..., Any], second: Callable[..., Any], form_of: FormOf, then: FormOf) -> None:
    """From here on, where a program calls `first` and then `second`, Dynamo traces what `form_of` and `then` give of
    the code of the caller and its local names that are functions or None; the functions where that is None. A caller in
    which a graph would end at or between the two is traced again, without any. Without effect where this torch has no
    such function."""
    trace = getattr(convert_frame, "trace_frame", None)
    if trace is None:
        return
    kind: Any = UserFunctionVariable
    call = kind.call_function

    @wraps(call)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        known = {first: form_of, second: then}.get(self.fn) if isinstance(self.fn, FunctionType) else None
        form = known(tx.f_code, plain_locals(tx)) if known and tx.f_code not in NOT_TAUGHT() else None
        if form is None:
            return call(self, tx, args, kwargs)
        BEGUN.add(tx.f_code)
        found = VariableTracker.build(tx, form).call_function(tx, args, kwargs)
        if self.fn is second:
            BEGUN.discard(tx.f_code)
        return found

    @wraps(trace)
    def traced(*args: Any, **kwargs: Any) -> Any:
        BEGUN.clear()
        made = trace(*args, **kwargs)
        if BEGUN:
            NOT_TAUGHT().update(BEGUN)
            forget(args)
            raise TraceOtherwise
        return made

    kind.call_function, convert_frame.trace_frame = called, traced


def with_known_sizes(function: Callable[..., Any], when: Callable[[], bool]) -> None:
    """From here on, where a program calls `function` with numbers alone, `when` it is to be so, the graph is for these
    sizes alone: Dynamo knows what comes of it. A tensor of an open size has a number that Dynamo does not know."""
    kind: Any = TorchInGraphFunctionVariable
    call = kind.call_function

    @wraps(call)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is function and when() and all(map(is_number, args)):
            args = [VariableTracker.build(tx, plain_number(arg)) for arg in args]
        return call(self, tx, args, kwargs)

    kind.call_function = called


def is_number(argument: Any) -> bool:
    """Whether Dynamo knows a number, or that it is made of sizes."""
    found = argument.realize()
    size = isinstance(found, SymNodeVariable) and not free_unbacked_symbols(found.sym_num)
    return size or (found.is_python_constant() and isinstance(found.as_python_constant(), (int, float)))


def plain_number(argument: Any) -> int | float:
    """Its number, to which the graph is bound from here on."""
    found = argument.realize()
    return found.evaluate_expr() if isinstance(found, SymNodeVariable) else found.as_python_constant()


def plain_locals(tx: Any) -> dict[str, Any]:
    """The local names of the function that Dynamo traces which it knows to be functions or None; others as they are for
    Dynamo."""
    found, written = {}, tx.output.side_effects
    for name, held in tx.symbolic_locals.items():
        if isinstance(held, CellVariable) and written.has_pending_mutation_of_attr(held, "cell_contents"):
            held = written.load_cell(held)  # which a function within the function reads
        known = held.unwrap() if isinstance(held, LazyVariableTracker) else held
        if isinstance(known, LazyVariableTracker):
            found[name] = known.peek_value()
        else:
            plain = isinstance(known, (UserFunctionVariable, ConstantVariable)) and known.is_python_constant()
            found[name] = known.as_python_constant() if plain else known
    return found


def not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another function that does the same, at which Dynamo breaks the graph."""

    def untraced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    broken: Callable[..., Any] = torch.compiler.disable(untraced)
    return broken
