"""A recurrence as it was found: one step as a graph, what it begins with, and where what its steps read comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.dims.op_families import CASTS, COPIES
from ringopt.ir.nodes import is_random, op_name, outputs_of, value_of
from ringopt.recognize.scans.operands import kind
from ringopt.recognize.scans.sources import Source
from ringopt.torch_compat.operators import UNSAFE_VIEW

aten = torch.ops.aten


class NotRolled(Exception):
    """It is a recurrence, and yet no scan can be made of it."""

    def __init__(self, sentence: str, node: fx.Node | None = None):
        self.sentence, self.node = sentence, node
        super().__init__(sentence)


@dataclass(frozen=True)
class FoundRecurrence:
    """`step` has placeholders (carry..., x..., const...), with fake values, and outputs (carry..., y...).

    init    of each carry, before the first step
    xs      where those of all steps are
    consts  what all steps read alike
    steps   how many there are
    like    a node of it, for the line in the program
    """

    step: fx.Graph
    init: Sequence[fx.Node]
    xs: Sequence[Source]
    consts: Sequence[fx.Node]
    steps: int
    like: fx.Node

    @property
    def inputs(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """The placeholders of the step: carries, xs, consts."""
        found, carries, xs = self.step.find_nodes(op="placeholder"), len(self.init), len(self.xs)
        return found[:carries], found[carries : carries + xs], found[carries + xs :]

    @property
    def outputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Carries, ys."""
        found = outputs_of(self.step)
        return found[: len(self.init)], found[len(self.init) :]


def reading(graph: fx.Graph, roots: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Of each node of a graph, which of `roots` it is made of."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        found[node] = {node} if node in roots else set().union(*(found[arg] for arg in node.all_input_nodes))
    return found


def reads_what_it_carries(found: FoundRecurrence) -> bool:
    """Whether something that is carried is made of what was carried, and by more than sums."""
    carries, _, _ = found.inputs
    reads = reading(found.step, carries)
    return any(reads[new] for new in found.outputs[0]) and not only_sums(found)


def only_sums(recurrence: FoundRecurrence) -> bool:
    """Whether nothing is done but to add up one value of each step, and only the sum is read: a sum over experts, taps
    of a filter or scales, which depends on no order."""
    carries, _, _ = recurrence.inputs
    given_back, ys = recurrence.outputs
    if ys:
        return False
    reads = reading(recurrence.step, carries)
    for carry, new in zip(carries, given_back, strict=True):
        node = new
        while node is not carry:
            terms = [arg for arg in node.all_input_nodes if reads[arg]]
            signed = op_name(node) == "sub" and node.args[0] is not (terms[0] if terms else None)
            if op_name(node) not in ("add", "sub") or len(terms) != 1 or signed or reads[node] != {carry}:
                return False
            node = terms[0]
    return True


# In a step a value need not lie as it did in the program: what cannot be a view is then copied.
RESHAPES = {aten.view.default: aten.reshape.default, UNSAFE_VIEW: aten.reshape.default}
# Which do nothing to a value of the shape and dtype that they give.
NO_OPS = (*CASTS, *COPIES, "expand")


def tidy(graph: fx.Graph) -> None:
    """A step without what does nothing and what is computed twice."""
    known: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        node.target = RESHAPES.get(node.target, node.target)
        if op_name(node) in NO_OPS and kind(value_of(node)) == kind(value_of(node.args[0])):
            node.replace_all_uses_with(node.args[0])
        elif not is_random(node):
            same = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
