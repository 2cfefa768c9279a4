"""torch's scan operator, which capture keeps as one node, as a recurrence: its step made flat and functional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback

from ringopt.frontend.explicit_autocast import Uncastable, explicit_casts
from ringopt.frontend.explicit_no_grad import ExplicitDetach
from ringopt.frontend.flatten import Book, Flatten
from ringopt.frontend.functionalize import Functional, Unwritable, views_by_value
from ringopt.frontend.loops.rolled import is_loop, leave_loop
from ringopt.frontend.plain_spelling import spell_plainly
from ringopt.ir.autograd_function import HigherOrder, OperandPlace, autocast_region
from ringopt.ir.nodes import is_tensor, shape_of, value_of
from ringopt.ir.refusal import GraphRefused
from ringopt.ir.symbolic_sizes import is_open
from ringopt.recognize.scans.recurrence import FoundRecurrence, NotRolled, reads_what_it_carries, tidy
from ringopt.recognize.scans.sources import Stacked
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.tracing import tracing

NUMBERS = (int, torch.SymInt)


def is_scan_operator(node: fx.Node) -> bool:
    """Whether a node calls torch's scan."""
    return isinstance(node.target, HigherOrder) and node.target.operator.name() == "scan"


def leave_loops(gm: fx.GraphModule) -> None:
    """To be called in a backend with the graph that it compiles: has Dynamo trace the frame again where it has calls of
    torch's scan that stand for loops, as where find_scan is switched off."""
    for node in filter(is_scan_operator, gm.graph.nodes):
        leave_loop(node, "no pass takes it")


def recurrence_of(node: fx.Node) -> FoundRecurrence:
    """What a call of torch's scan computes. Raises NotRolled."""
    call: HigherOrder = node.target
    (step, *operands), keywords = call.arguments  # sizes that are open to Dynamo are among the last of the operands
    if keywords or len(operands) != 3 or not isinstance(step, fx.GraphModule):
        raise NotRolled("torch's scan is called in a form that is not known here", node)
    init, xs = ([given(node, value) for value in part] for part in operands[:2])
    consts = [given(node, value) for value in operands[2] if not isinstance(value, NUMBERS)]
    if call.random:
        raise NotRolled("its step draws random numbers", node)
    if not xs:
        raise NotRolled("it has no steps to go through", node)
    numbers = {len(init) + len(xs) + place: x for place, x in enumerate(operands[2]) if isinstance(x, NUMBERS)}
    graph = flat(step, step_values(init, xs, consts), numbers, node)
    if reads_sizes(graph):
        for x in step_values(init, xs, consts):
            list(map(int, x.shape))  # fixed: other sizes compile other graphs
        graph = flat(step, step_values(init, xs, consts), numbers, node)
    found = FoundRecurrence(graph, init, [Stacked(x) for x in xs], consts, shape_of(xs[0])[0], node)
    if is_loop(node) and not reads_what_it_carries(found):
        raise NotRolled("it only adds up", node)
    return found


def step_values(init: Sequence[fx.Node], xs: Sequence[fx.Node], consts: Sequence[fx.Node]) -> list[torch.Tensor]:
    """Fake values of the tensors that a step is given: carries, a row of each x, consts."""
    rows = [value_of(x).new_empty(value_of(x).shape[1:]) for x in xs]
    return [*map(value_of, init), *rows, *map(value_of, consts)]


def reads_sizes(graph: fx.Graph) -> bool:
    """Whether a step computes with sizes that are open, or hands them to an operator."""
    found = (leaf for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs, node.meta.get("val"))))
    return any(map(is_open, found))


def given(node: fx.Node, value: Any) -> fx.Node:
    """The operand that stands at a place of the arguments."""
    if not isinstance(value, OperandPlace) or not is_tensor(node.args[0][value.number]):
        raise NotRolled("its step is given numbers that are no tensors", node)
    found: fx.Node = node.args[0][value.number]
    if value_of(found).dtype != value.dtype:
        raise NotRolled(f"its step is a graph for {value.dtype}, and autocast makes that another", node)
    return found


def with_gradient(value: torch.Tensor) -> torch.Tensor:
    """What stands for an operand of a step while regions without gradient are written out: a gradient comes to what is
    carried from later steps, whatever the first one is given."""
    learns = torch.is_grad_enabled() and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if learns else value


def flat(step: fx.GraphModule, values: list[torch.Tensor], numbers: Mapping[int, Any], node: fx.Node) -> fx.Graph:
    """The step as a flat functional graph of tensors. `numbers`: its other inputs, by place."""
    call: HigherOrder = node.target

    def run(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args = [numbers[place] if place in numbers else next(rest) for place in range(len(tensors) + len(numbers))]
        with nullcontext() if call.autocast is None else autocast_region(*call.autocast):
            return Flatten(step, Book()).run(*args)

    mode: Any = getattr(values[0], "fake_mode")  # noqa: B009
    try:
        with tracing(None), mode, torch.fx.traceback.preserve_node_meta():
            gm = make_fx(run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
        views_by_value(gm.graph)
        for placeholder in gm.graph.find_nodes(op="placeholder"):
            placeholder.meta["val"] = with_gradient(placeholder.meta["val"])
        ExplicitDetach(gm.graph).rewrite()
        explicit_casts(gm)
        Functional(gm.graph).rewrite()
    except (Uncastable, Unwritable, GraphRefused) as problem:
        raise NotRolled(problem.refusal.sentence, node) from problem
    for placeholder, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
        placeholder.meta["val"] = value
    spell_plainly(gm.graph)
    tidy(gm.graph)
    if gm.graph.find_nodes(op="get_attr"):
        raise NotRolled("its step holds tensors of its own", node)
    return gm.graph
