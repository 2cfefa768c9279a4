"""The call of `ringopt::scan` in a graph, by the names of its arguments.

    call = ScanCall.of(node)                       call.init, call.xs, call.consts, call.body.module
    finals, ys = ScanCall(init, xs, consts, text).emit(graph, like)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.ir.nodes import origin, requires_grad, shape_of, value_of
from ringopt.ir.placement import Sharded
from ringopt.scans.body import Body, from_text
from ringopt.scans.trace import Kinds, kinds_of


@dataclass(frozen=True)
class ScanCall:
    """`text` is that of the body; `init`, `xs` and `consts` are its operands, xs stacked along dim 0."""

    init: Sequence[fx.Node]
    xs: Sequence[fx.Node]
    consts: Sequence[fx.Node]
    text: str

    @classmethod
    def of(cls, node: fx.Node) -> ScanCall:
        """Of a node that calls `ringopt::scan`."""
        call = OpCall.of(node)
        return cls(call["init"], call["xs"], call["consts"], call["body"])

    @property
    def steps(self) -> Sharded:
        """How the operands that have a row a step are spread."""
        return Sharded(0, 1, shape_of(self.xs[0])[0], 1)

    @property
    def body(self) -> Body:
        return from_text(self.text)

    @property
    def kinds(self) -> Kinds:
        """Of the operands of a step; an open size is the one at hand."""
        return kinds_of(*([value_of(x) for x in part] for part in (self.init, self.xs, self.consts)))

    @property
    def has_small_states(self) -> bool:
        """Whether a state takes at most a quarter of the bytes that a step reads: then all of them are kept for the
        backward, which makes larger ones again."""
        carries, xs = len(self.init), len(self.xs)
        state, read = self.kinds[:carries], self.kinds[carries : carries + xs]
        return 4 * sum(kind.bytes for kind in state) <= sum(kind.bytes for kind in read)

    def emit(self, graph: fx.Graph, like: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """New nodes with their fake values, told to come from where `like` comes from: the last carries, and the ys
        stacked along dim 0."""
        given = {"init": list(self.init), "xs": list(self.xs), "consts": list(self.consts), "body": self.text}
        node = OpCall.to(torch.ops.ringopt.scan.default, **given).emit(graph, like)
        parts = []
        for place, value in enumerate(node.meta["val"]):
            part = graph.call_function(operator.getitem, (node, place))
            part.meta = {**origin(like), "val": value}
            parts.append(part)
        return parts[: self.body.carries], parts[self.body.carries :]


def keep_states(graph: fx.Graph) -> None:
    """Of scans that learn, and whose states are small."""
    learns = requires_grad(graph)
    for node in filter(is_scan, graph.nodes):
        call = ScanCall.of(node)
        if learns[node] and call.has_small_states:
            states = map(value_of, call.init)
            kept = [x.new_empty((call.steps.length, *x.shape)) for x in states]
            OpCall.of(node).replace(keeps=True).write(node)
            node.meta["val"] = [*value_of(node), *kept]


def is_scan(node: fx.Node) -> bool:
    """Whether a node is a scan on one device."""
    return node.target is torch.ops.ringopt.scan.default
