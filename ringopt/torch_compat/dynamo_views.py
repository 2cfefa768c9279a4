"""The values of an OrderedDict (`out.values()`) that a program holds across a graph break."""

from __future__ import annotations

from functools import cache, wraps
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
    wrap = kind.wrap_listlike

    @wraps(wrap)
    def wrapped(self: Any, value: Any) -> Any:
        if type(value) is not odict_values:
            return wrap(self, value)
        with patch.object(builder, "GetItemSource", NonSerializableSetGetItemSource):
            return wrap(self, value)

    kind.wrap_listlike = wrapped
