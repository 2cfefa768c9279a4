"""An attention pattern whose queries and keys are spread over ranks, as options and operators name it."""

from __future__ import annotations

from dataclasses import dataclass

from ringopt.context_parallel.geometry.layouts import Layout, layout_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Pattern


@dataclass(frozen=True)
class ShardedPattern:
    """Who sees whom (see `pattern_of`), of how many rows, and which rank holds which of them (see `layout_of`)."""

    pattern: str
    q_length: int
    kv_length: int
    ranks: int
    q_layout: str
    kv_layout: str

    @classmethod
    def of_self_attention(cls, pattern: str, length: int, ranks: int, layout: str) -> ShardedPattern:
        return cls(pattern, length, length, ranks, layout, layout)

    def parsed(self) -> tuple[Pattern, Layout, Layout]:
        """The pattern, and the layouts of queries and keys. Raises OptionError for a name that is none, PlanError for a
        length below 1."""
        return (
            pattern_of(self.pattern, self.q_length, self.kv_length),
            layout_of(self.q_layout, self.q_length, self.ranks),
            layout_of(self.kv_layout, self.kv_length, self.ranks),
        )
