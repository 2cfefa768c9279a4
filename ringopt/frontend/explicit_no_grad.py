"""Regions without gradient become explicit: what enters them passes through detach, and the switches go.

    with no_grad: f(x)   ->   f(detach(x))

Memory has to be followed on the way, for a write brings a gradient to all views of what it writes to:

    o = zeros(3); o[:2] = x; with no_grad: f(o)   ->   f(detach(o))

A write that autograd does not see changes the numbers, and the gradient is that of the value as it was made. To an
input that no gradient has been asked of yet (a weight that is clamped at the begin of a step) it is noted as UNSEEN,
and `Functional` makes a value of it that has the new numbers and the old gradient. Others are refused: operators may
have kept the numbers that it writes over.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.fx as fx

from ringopt.dims.undone_views import UNCHANGED
from ringopt.frontend.functionalize import Unwritable, storage
from ringopt.ir.nodes import carries_gradient, is_undropped, is_write, op_name, value_of, written_args
from ringopt.ir.notes import LET_GO, UNSEEN, VIEW_OF

aten = torch.ops.aten

CUTS = ("detach", "view_dtype")  # views without a gradient


class ExplicitDetach:
    """Rewrites one graph."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.enabled = graph, torch.is_grad_enabled()
        self.learns = self.enabled or any(op_name(node) == "_set_grad_enabled" and node.args[0] for node in graph.nodes)
        self.given: dict[fx.Node, bool] = {}  # which values carry a gradient, as they were made
        self.cut: set[fx.Node] = set()  # values that autograd does not know to be views of what they are
        self.taught: set[int] = set()  # memory that a value with a gradient was written to
        self.known: set[int] = set()  # memory of which some value carries a gradient
        self.read: set[int | None] = set()  # memory that a value with a gradient was computed from
        self.sharing = Counter[int | None]()  # how many values so far lie in a memory
        self.inputs = set(map(storage, graph.find_nodes(op="placeholder")))
        self.detached: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> None:
        """Raises Unwritable."""
        for node in list(self.graph.nodes):
            if op_name(node) == "_set_grad_enabled":
                self.enabled = node.args[0]
                self.graph.erase_node(node)
                continue
            if op_name(node) == "broadcast_tensors":
                self.part(node)
                continue
            if is_write(node):
                self.check(node)
            self.enter(node)
            if not self.sees(node):
                self.detach_operands(node)

    def part(self, node: fx.Node) -> None:
        """broadcast_tensors into its operands, where these have the shape, and views of the others."""
        for user in list(node.users):
            operand = node.args[0][user.args[1]]
            if value_of(operand).shape == value_of(user).shape:
                user.replace_all_uses_with(operand)
                self.graph.erase_node(user)
            else:
                user.target, user.args = aten.expand.default, (operand, list(value_of(user).shape))
        self.graph.erase_node(node)

    def sees(self, node: fx.Node) -> bool:
        """Whether a gradient goes through the node."""
        return self.enabled or node.op != "call_function" or is_operand(node)

    def carries(self, node: fx.Node) -> bool:
        """Whether it carries a gradient now, after the writes so far. True when in doubt."""
        return node not in self.cut and (self.given[node] or storage(node) in self.taught)

    def enter(self, node: fx.Node) -> None:
        """Notes of a value whether it carries a gradient, and whether autograd knows what it is a view of."""
        given = any(map(self.carries, node.all_input_nodes))
        self.given[node] = self.learns and self.sees(node) and carries_gradient(node, given)
        targets = written_args(node) if is_write(node) else node.all_input_nodes
        memory = storage(node)
        if self.given[node]:
            self.read |= {storage(arg) for arg in node.all_input_nodes if self.carries(arg)} - {memory}
        if is_write(node) and self.given[node]:
            self.taught.update(filter(None, map(storage, targets)))
        if self.given[node] and memory is not None:
            self.known.add(memory)
        shared = [arg for arg in targets if memory is not None and storage(arg) == memory]
        if op_name(node) == "detach" and self.is_let_go(node.args[0]):
            node.meta[LET_GO] = True
        elif shared and (op_name(node) in CUTS or self.cut.intersection(shared)):
            self.cut.add(node)
        self.sharing[memory] += 1

    def is_let_go(self, x: fx.Node) -> bool:
        """Whether nothing else reads `x`, nor its memory, which the graph made: `table[ids].detach()`."""
        memory, views = storage(x), 0
        while x.op == "call_function" and len(x.users) == 1:
            views += 1
            viewed = [arg for arg in x.all_input_nodes if storage(arg) == memory]
            if not viewed:
                return views == self.sharing[memory]
            x = viewed[0]
        return False

    def check(self, node: fx.Node) -> None:
        """Notes a write that autograd does not see, to memory whose gradient it knows. Raises Unwritable where that may
        have been read; and for a write that brings a gradient which autograd sees in the alias alone."""
        learned = any(map(self.carries, node.all_input_nodes))
        for target in written_args(node):
            known = storage(target) in self.known | self.taught
            fresh = storage(target) in self.inputs - self.read - self.taught
            if known and not self.enabled and not fresh:
                raise Unwritable(f"{node.target} writes under no_grad to a value with a gradient", node)
            if target in self.cut and self.enabled and (learned or (known and not fresh)):
                raise Unwritable(f"{node.target} writes through detach to a value with a gradient", node)
            if known and (target in self.cut or not self.enabled):
                node.meta[UNSEEN] = True
                node.replace_all_uses_with(target)  # which has a gradient, though the call gave it back without one

    def detach_operands(self, node: fx.Node) -> None:
        for arg in filter(self.carries, list(node.all_input_nodes)):
            if arg not in self.detached:
                with self.graph.inserting_after(arg):
                    self.detached[arg] = self.graph.call_function(aten.detach.default, (arg,))
                self.detached[arg].meta = {**arg.meta, VIEW_OF: 0}
            node.replace_input_with(arg, self.detached[arg])


def is_operand(node: fx.Node) -> bool:
    """Whether an operator returns its operand itself, which is no view of it."""
    if is_undropped(node):
        return True
    if op_name(node) not in UNCHANGED or not isinstance(node.args[0], fx.Node):
        return False
    memory, operand = storage(node), node.args[0]
    return memory is not None and memory == storage(operand) and value_of(node).shape == value_of(operand).shape
