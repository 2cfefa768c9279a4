"""Lists of rows that are one tensor for Dynamo, until `torch.stack` or `torch.cat` joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat.dynamo import TraceOtherwise

__all__ = ["RowsOfAList", "is_open_list", "joined_at_once", "put_behind"]

JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate)


class RowsOfAList(list[Any]):
    """What Dynamo takes for the items of a list: `before` them, then one for each row of `rows`, which no items stand
    for. Where it asks for an item, `left` is called, and the frame is traced again. `watched`: tensors of which an item
    may be a view; the rows are those of before a write to them."""

    def __init__(self, before: list[Any], rows: Any, watched: Iterable[torch.Tensor], left: Callable[[], None]):
        super().__init__()
        self.before, self.rows, self.left = before, rows, left
        self.versions = [(tensor, tensor._version) for tensor in watched]

    def asked(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """For an item."""
        self.left()
        raise TraceOtherwise

    def is_as_it_was(self) -> bool:
        """Whether nothing was written since."""
        return all(tensor._version == version for tensor, version in self.versions)


ASKED_BY = (
    "__add__", "__contains__", "__delitem__", "__eq__", "__ge__", "__getitem__", "__gt__", "__iadd__", "__imul__",
    "__iter__", "__le__", "__len__", "__lt__", "__mul__", "__ne__", "__reversed__", "__rmul__", "__setitem__", "append",
    "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort",
)  # fmt: skip
for _name in ASKED_BY:
    setattr(RowsOfAList, _name, RowsOfAList.asked)


def is_open_list(variable: VariableTracker) -> bool:
    """Whether it is a list that the program has made, so that nobody holds it whom Dynamo does not know."""
    return type(variable) is ListVariable and isinstance(variable.mutation_type, ValueMutationNew)


def put_behind(tx: Any, variable: Any, rows: Any, watched: Iterable[torch.Tensor], left: Callable[[], None]) -> None:
    """Appends rows, those of dim 0 of a tensor, to a list."""
    tx.output.side_effects.mutation(variable)
    variable.items = RowsOfAList([*variable.items], rows, watched, left)


def joined_at_once(joined: Callable[..., Any]) -> None:
    """From here on Dynamo traces `joined(stacked, before, rows, dim)` where a program joins such a list along a dim."""
    kind: Any = TorchInGraphFunctionVariable
    call = kind.call_function

    @wraps(call)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = rows_joined(args, kwargs) if self.value in JOINS else None
        if found is None:
            return call(self, tx, args, kwargs)
        rows, dim = found
        if not rows.is_as_it_was():
            rows.asked()
        stacked, along = (VariableTracker.build(tx, each) for each in (self.value is torch.stack, dim))
        given = [stacked, TupleVariable(rows.before), rows.rows, along]
        return VariableTracker.build(tx, joined).call_function(tx, given, {})

    kind.call_function = called


def rows_joined(args: Any, kwargs: Any) -> tuple[RowsOfAList, int] | None:
    """Of a call with such a list and a known dim alone."""
    asked = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    if "tensors" not in asked or len(args) > 2 or not asked.keys() <= {"tensors", "dim"}:
        return None
    items, dim = getattr(asked["tensors"].realize(), "items", None), asked.get("dim", ConstantVariable.create(0))
    if not isinstance(items, RowsOfAList) or not dim.is_python_constant() or type(dim.as_python_constant()) is not int:
        return None
    return items, dim.as_python_constant()
