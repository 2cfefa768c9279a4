"""How many rows of a sequence this rank has: a number, or a node that asks when the program runs.

Where that is asked of whole units, these are counted: rows that are split into chunks have a number that the chunk
divides.

    n = rows_here(64 * c, "zigzag:64")      ->      n = 64 * rows_here(c, "zigzag")
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.context_parallel.geometry.layouts import parsed
from ringopt.ir.nodes import is_tensor
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.symbolic_sizes import formula, same
from ringopt.ops import operators
from ringopt.sharding.ranks import Ranks, two_rows_each


class RowCounts:
    """Of the sequences in `graph`, which is made over `ranks`. `batched`: it has batched products."""

    def __init__(self, graph: fx.Graph, ranks: Ranks, batched: bool):
        self.graph, self.ranks, self.batched = graph, ranks, batched
        self.asked = dict[object, fx.Node]()

    def __call__(self, length: int, layout: str = "") -> int | fx.Node:
        """Of a sequence of `length`: asked when the program runs where the length is open. `layout`: if not its own."""
        layout = layout or self.ranks.layout(length)
        if not self.ranks.asks and not self.ranks.serves(length, layout, self.batched):
            return self.ranks.rows_here(length, layout)
        key = (formula(length), layout)
        if key not in self.asked:
            cut = parsed(layout)
            if cut.rows > 1 and not cut.more and same(cut.rows * cut.parts(length), length):
                units = self.ask(length // cut.rows, cut.kind.name)
                counted = self.graph.call_function(operator.mul, (units, cut.rows))
                self.asked[key] = without_placement(counted)
            else:
                self.asked[key] = self.ask(length, layout)
        return self.asked[key]

    def ask(self, length: int, layout: str) -> fx.Node:
        """A node that gives it when the program runs."""
        key = (formula(length), layout)
        if key not in self.asked:
            if not self.ranks.asks and not length >= self.ranks.least(length):
                raise AssertionError(f"{length} rows are too few for {self.ranks.size} ranks in layout {layout}")
            some = next(each for each in self.graph.nodes if is_tensor(each))  # Inductor looks for a device
            asked: dict[str, Any] = {"inputs": [some], "names": "", "program": "", "when": "never"}
            asked["least"] = 2 if not self.ranks.asks and two_rows_each(length, layout, self.ranks.size) else 1
            call = OpCall.to(operators.rows_here.default, length=length, layout=layout, group=self.ranks.group, **asked)
            self.asked[key] = without_placement(call.insert(self.graph, "rows_here"))
        return self.asked[key]


def without_placement(number: fx.Node) -> fx.Node:
    """It is no tensor of the program."""
    number.meta[PLACEMENT] = number.meta[WHOLE] = None
    return number
