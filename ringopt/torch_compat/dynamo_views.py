"""The values of an OrderedDict (`out.values()`) that a program holds across a graph break."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import NonSerializableSetGetItemSource
from torch._dynamo.utils import odict_values
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable

__all__ = ["counts_values_of_ordered_dicts"]


@cache
def counts_values_of_ordered_dicts() -> None:
    """From now on Dynamo takes the items of such a view as it does those of a set: by place in a list of them. It would
    subscript the view, which ends the program in a TypeError (torch 2.11 to 2.13)."""
    kind: Any = VariableBuilder
    wrap = kind.wrap_listlike

    @wraps(wrap)
    def wrapped(self: Any, value: Any) -> Any:
        if type(value) is not odict_values:
            return wrap(self, value)
        self.install_guards(GuardBuilder.SEQUENCE_LENGTH)
        sources = [NonSerializableSetGetItemSource(self.get_source(), place) for place in range(len(value))]
        items = [LazyVariableTracker.create(*pair, tx=self.tx) for pair in zip(value, sources, strict=True)]
        return BaseListVariable.cls_for_instance(value)(items, source=self.source)

    kind.wrap_listlike = wrapped
