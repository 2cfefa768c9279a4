"""Which node of the program each node of the sharded graph is, for `verify="nodes"`.

Passes hand on the value that a node stands for: rewrites keep `node.meta["val"]` of what they take the place of, and
the sharder notes it as WHOLE on every form that it makes of a node (its rows, the whole again, a copy). So the graph is
copied while its values are still those of the program, and a node is looked up by the value that it says it has.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.ir.io_order import Order
from ringopt.ir.nodes import op_name, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.symbolic_sizes import is_open
from ringopt.ops import operators
from ringopt.output.printable import logger
from ringopt.pipeline import Context, Pass
from ringopt.runtime.verify_nodes import Counterparts, Form

log = logger(__name__)


@dataclass
class Snapshot:
    """The graph as it was written, or, where it draws random numbers, as it was found: by position, which torch's own
    stream is not."""

    wanted: bool
    graph: fx.GraphModule | None = None

    def passed(self, step: Pass, gm: fx.GraphModule, context: Context) -> None:
        """The callback of a pipeline."""
        drawn = step.name == "draw_by_position" and bool(context.drawn)
        if self.wanted and (step.name == "normalize" or drawn) and not has_open_sizes(gm.graph):
            self.graph = copy_of(gm, {}, context.order)

    def counterparts(self, gm: fx.GraphModule, context: Context) -> Counterparts | None:
        """Of `gm`, behind all passes; None where nothing was asked for, or nothing is spread."""
        if self.wanted and self.graph is None:
            log.warning("verify: a graph of open sizes is compared as a whole, not node by node; set dynamic=False")
        if self.graph is None or context.mesh.size == 1:
            return None
        by_value = {id(value_of(node)): node.name for node in self.graph.graph.nodes if is_value(value_of(node))}
        originals = {
            node: by_value[id(node.meta[WHOLE])]
            for node in gm.graph.nodes
            if PLACEMENT in node.meta and id(node.meta.get(WHOLE)) in by_value and node.op != "output"
        }
        roots = defaultdict[str, list[fx.Node]](list)
        for node, name in originals.items():
            if not any(originals.get(source) == name for source in sources(node)):
                roots[name].append(node)
        copied: dict[fx.Node, fx.Node] = {}
        sharded = copy_of(gm, copied)
        forms = {copied[x].name: self.form(x, name, roots[name] == [x], context) for x, name in originals.items()}
        return Counterparts(self.graph, sharded, forms)

    def form(self, node: fx.Node, name: str, alone: bool, context: Context) -> Form:
        placement = node.meta[PLACEMENT]
        return Form(name, placement, context.layouts.of(placement.length) if placement is not None else "", alone)


def has_open_sizes(graph: fx.Graph) -> bool:
    """Whether one graph serves several lengths."""
    values = [value_of(node) for node in graph.find_nodes(op="placeholder")]
    return any(is_open(size) for x in values for size in (getattr(x, "shape", ()) if is_value(x) else (x,)))


def is_value(value: Any) -> bool:
    """Whether it is one tensor."""
    return isinstance(value, torch.Tensor)


def sources(node: fx.Node) -> list[fx.Node]:
    """What a node reads; of a parameter that is copied in a bucket, that."""
    found: list[fx.Node] = node.all_input_nodes
    if op_name(node) == "getitem" and found and found[0].target is operators.copy_all_to_group.default:
        return [OpCall.of(found[0])["parameters"][node.args[1]]]
    return found


def copy_of(gm: fx.GraphModule, copied: dict[fx.Node, fx.Node], order: Order | None = None) -> fx.GraphModule:
    """The graph as it is now, in the order of its caller: passes and compilers go on with the other. Its nodes have the
    same values; `copied` is told which they are."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, copied))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    if order is not None:
        order.back.apply(graph)
    return fx.GraphModule(gm, graph)
