"""The values of an OrderedDict (`out.values()`) that a program holds across a graph break."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

from torch._dynamo.source import NonSerializableSetGetItemSource
from torch._dynamo.utils import odict_values
from torch._dynamo.variables import builder

__all__ = ["counts_values_of_ordered_dicts"]


@cache
def counts_values_of_ordered_dicts() -> None:
    """From now on Dynamo takes the items of such a view as it does those of a set: by place in a list of them. It would
    subscript the view, which ends the program in a TypeError (torch 2.11 to 2.13)."""
    kind: Any = builder.VariableBuilder

    def wrapped(self: Any, value: Any) -> Any:
        with patch.object(builder, "GetItemSource", NonSerializableSetGetItemSource):
            return self.wrap_listlike(value)

    for trace_numpy in (False, True):
        kind._type_dispatch_impl(trace_numpy)[odict_values] = wrapped  # a table that is made once
