"""The values of an OrderedDict (`out.values()`) that a program holds across a graph break."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch._dynamo.source import NonSerializableSetGetItemSource
from torch._dynamo.utils import odict_values
from torch._dynamo.variables import builder

__all__ = ["hold_values_of_ordered_dicts"]


@cache
def hold_values_of_ordered_dicts() -> None:
    """From now on Dynamo takes the items of such a view as it does those of a set: by place in a list of them. It would
    subscript the view, which ends the program in a TypeError (torch 2.11 to 2.13)."""
    module: Any = builder

    def wrapped(self: Any, value: Any) -> Any:
        subscript, module.GetItemSource = module.GetItemSource, NonSerializableSetGetItemSource
        try:
            return self.wrap_listlike(value)
        finally:
            module.GetItemSource = subscript

    for trace_numpy in (False, True):
        module.VariableBuilder._type_dispatch_impl(trace_numpy)[odict_values] = wrapped  # a table that is made once
