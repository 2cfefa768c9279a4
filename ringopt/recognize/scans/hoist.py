"""What of a step does not read what is carried is computed for all steps at once, and is no part of the scan.

    S = S * exp(g_t) + k_t^T v_t          a = exp(g) and w = k^T v for all t;    S = S * a_t + w_t

The axis of the steps is then an ordinary batch dim. What only makes values larger (an outer product of a token's key
and value) stays in the step, where it is needed one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.dims.op_families import MATRIX_PRODUCTS, PERMUTATIONS, RESHAPES, SLICES
from ringopt.ir.nodes import op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.recognize.scans.batch import NoRule, OverSteps, is_pointwise
from ringopt.recognize.scans.recurrence import FoundRecurrence
from ringopt.scans.trace import Kinds, OperandKind

VIEWS = (*RESHAPES, *PERMUTATIONS, *SLICES, "select", "expand", "unsqueeze")


@dataclass(frozen=True)
class SplitStep:
    """A step in two.

    core        what is left of it: placeholders (carry..., x..., const...), outputs (carry..., y...)
    before      nodes of the step that are computed first, in order: once if they read no x, else for all steps
    xs, consts  the nodes of the step that the inputs of the core are
    ys          and those that it gives; other ys are computed before
    """

    core: fx.GraphModule
    before: list[fx.Node]
    xs: list[fx.Node]
    consts: list[fx.Node]
    ys: list[fx.Node]

    @property
    def kinds(self) -> Kinds:
        """Of the operands of a step of the core."""
        return tuple(OperandKind.of(value_of(node)) for node in self.core.graph.find_nodes(op="placeholder"))


def hoisted(recurrence: FoundRecurrence) -> SplitStep:
    """Splits the step of a recurrence."""
    _, _, consts = recurrence.inputs
    new, ys = recurrence.outputs
    inner = in_the_step(recurrence)
    fixed = set(consts)
    for node in recurrence.step.nodes:
        if node.op == "call_function" and node not in inner and all(arg in fixed for arg in node.all_input_nodes):
            fixed.add(node)
    read_ys = list(dict.fromkeys(y for y in ys if y in inner))
    body = needed_for(recurrence, [*new, *read_ys], inner)
    given = dict.fromkeys(arg for node in body for arg in node.all_input_nodes if arg not in inner)
    given.update(dict.fromkeys(node for node in new if node not in inner))
    xs, kept = [node for node in given if node not in fixed], [node for node in given if node in fixed]
    before = [node for node in recurrence.step.nodes if node.op == "call_function" and node not in inner]
    core = core_of(recurrence, body, xs, kept, read_ys)
    wanted = {*xs, *kept, *(y for y in ys if y not in inner)}
    return SplitStep(core, alive(before, wanted), xs, kept, read_ys)


def alive(nodes: Sequence[fx.Node], wanted: set[fx.Node]) -> list[fx.Node]:
    """Those that the wanted ones are made of, in order."""
    needed, found = set(wanted), []
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
            found.append(node)
    return found[::-1]


def in_the_step(recurrence: FoundRecurrence) -> set[fx.Node]:
    """Nodes that stay in the step: what reads a carry, what has no rule for all steps at once, and what is larger than
    what it is made of and cheap to make."""
    carries, xs, consts = recurrence.inputs
    inner = set(carries)
    trial = OverSteps(fx.Graph(), recurrence.steps)
    for node in (*xs, *consts):
        place = trial.graph.placeholder(node.name)
        value = value_of(node)
        place.meta["val"] = value.new_empty((recurrence.steps, *value.shape)) if node in xs else value
        trial.made[node] = place
    trial.stacked.update(xs)
    for node in recurrence.step.nodes:
        if node.op != "call_function":
            continue
        if any(arg in inner for arg in node.all_input_nodes):
            inner.add(node)
            continue
        try:
            trial.add(node)
        except NoRule:
            inner.add(node)
    sink(recurrence, inner, trial.stacked)
    return inner


def sink(recurrence: FoundRecurrence, inner: set[fx.Node], stacked: set[fx.Node]) -> None:
    """Adds cheap nodes that the step alone reads, where keeping them for all steps takes more than what they are made
    of."""
    output = recurrence.step.output_node()
    for node in reversed(recurrence.step.nodes):
        if node.op != "call_function" or node in inner or node not in stacked or not is_cheap(node):
            continue
        readers = set(node.users) - {output}
        if output in node.users or not readers or not all(user in inner for user in readers):
            continue
        made_of = sum(elements(arg) for arg in node.all_input_nodes if arg in stacked)
        if elements(node) > made_of:
            inner.add(node)


def is_cheap(node: fx.Node) -> bool:
    """A view, an op on elements, or an outer product."""
    if op_name(node) in MATRIX_PRODUCTS:
        return shape_of(node.args[0])[-1] == 1
    return op_name(node) in VIEWS or is_pointwise(node)


def elements(node: fx.Node) -> int:
    """How many a value has."""
    value = value_of(node)
    return at_hand(value.numel()) if isinstance(value, torch.Tensor) else sum(at_hand(x.numel()) for x in value)


def needed_for(recurrence: FoundRecurrence, outputs: Sequence[fx.Node], inner: set[fx.Node]) -> list[fx.Node]:
    """Nodes of the core, in order."""
    calls = [node for node in recurrence.step.nodes if node.op == "call_function" and node in inner]
    return alive(calls, set(outputs))


Nodes = Sequence[fx.Node]


def core_of(recurrence: FoundRecurrence, body: Nodes, xs: Nodes, consts: Nodes, ys: Nodes) -> fx.GraphModule:
    """The graph of a step without what is computed before."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for kind, nodes in (("carry", recurrence.inputs[0]), ("x", xs), ("const", consts)):
        for i, node in enumerate(nodes):
            made[node] = graph.placeholder(f"{kind}{i}")
            made[node].meta["val"] = value_of(node)
    for node in body:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in (*recurrence.outputs[0], *ys)))
    return fx.GraphModule(torch.nn.Module(), graph)
