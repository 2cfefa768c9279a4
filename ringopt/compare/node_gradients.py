"""How far the gradients of matched nodes are apart, of two programs that are run on the same inputs.

    the gradient of %h      of random cotangents of what both return

The programs run forward and backward one after the other: the gradients of the first are held, those of the second
compared as they come. A node is compared where its readers are each other's counterparts, looking through nodes that
have none. Elsewhere its gradient is only a part of the other: of one cosine for two readers, and of one for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch import Tensor
from torch.export import ExportedProgram

from ringopt.compare.align import LISTED
from ringopt.compare.graph_diff import GraphDiff, NodeView
from ringopt.compare.hooked_graph import LEAST, Hooked, cotangent, run_backward
from ringopt.compare.node_values import NodeError, allowed_of, error_of
from ringopt.compare.program_inputs import Inputs
from ringopt.errors import ProgramError, first_line
from ringopt.ir.nodes import op_name
from ringopt.torch_compat.pytree import tree_leaves

Runnable: TypeAlias = ExportedProgram | fx.GraphModule
Seen: TypeAlias = Callable[[fx.Node, Any], None]
Learned: TypeAlias = Callable[[fx.Node, Tensor], None]


def gradient_errors_of(
    sides: tuple[Inputs, Inputs], values: tuple[Mapping[str, Any], Mapping[str, Any]], pairs: Mapping[str, str]
) -> dict[str, NodeError]:
    """By the name of the node after, as the backward comes to them; `pairs` has the node before for each. Raises
    ProgramError where there is no gradient to compare, with the reason."""
    wanted, right, found, tensors = set(pairs.values()), dict[str, Tensor](), dict[str, NodeError](), set[str]()

    def first(node: fx.Node, gradient: Tensor) -> None:
        if node.name in wanted:
            right[node.name] = gradient.detach()

    def second(node: fx.Node, gradient: Tensor) -> None:
        name = node.name if node.name in pairs else first_result_of(node)
        if pairs.get(name) in right and name not in found:
            error = gradient_error(gradient.detach(), right[pairs[name]], least)
            if error is not None:
                found[name] = error

    def seen(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.add(node.name)

    returned = learn("before", sides[0], values[0], first)
    least = LEAST * max((float(x.abs().max()) for x in right.values() if x.numel()), default=0.0)
    if learn("after", sides[1], values[1], second, seen) != returned:
        raise ProgramError("the programs do not return gradients of the same outputs")
    for name in pairs.keys() & tensors - found.keys():  # it is zero, or is missing
        missing = right.get(pairs[name])
        if missing is not None and bool(missing.any()):
            found[name] = NodeError(float(missing.abs().max()), inf, allowed_of(missing.dtype))
    return found


def gradient_error(found: Tensor, right: Tensor, least: float) -> NodeError | None:
    """Relative to the largest element of `right`, at least `least`."""
    error = error_of(found, right)
    if error is None or not 0 < error.largest < inf or not least:
        return error
    return NodeError(error.largest, min(error.relative, error.largest / least), error.allowed)


def learn(
    which: str, side: Inputs, values: Mapping[str, Any], learned: Learned, seen: Seen = lambda _node, _value: None
) -> list[tuple[int, torch.Size]]:
    """Runs a program forward and backward; which outputs have a gradient, and their sizes."""
    try:
        with torch.enable_grad():
            steps = Hooked(side.gm, seen, learned)
            leaves = {node.name: value for node, value in zip(side.nodes, side.in_order(values), strict=True)}
            wanted = [x.requires_grad_() for name, x in leaves.items() if name in side.learnable and has_gradient(x)]
            # A program may write to what it is given, which no leaf allows.
            given = [x.clone() if steps.writes and isinstance(x, Tensor) else x for x in leaves.values()]
            outputs = enumerate(tree_leaves(steps.forward(given)))
            known = [(number, x) for number, x in outputs if isinstance(x, Tensor) and x.requires_grad]
            if isinstance(side.program, fx.GraphModule):
                wanted += [x for x in side.gm.parameters() if x.requires_grad]
            if known and wanted:
                run_backward([x for _, x in known], wanted, [cotangent(x.shape, x) for _, x in known])
    except Exception as error:  # whatever its operators raise
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ProgramError(f"the program {which} gives no gradients: {why}") from error
    return [(number, x.shape) for number, x in known]


def has_gradient(value: Any) -> bool:
    """Whether a value may have a gradient: a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def first_result_of(node: fx.Node) -> str:
    """Of the first result of an operator with several, that operator: it stands for its value."""
    source = node.args[0] if op_name(node) == "getitem" and node.args[1] == 0 else node
    return str(source.name if isinstance(source, fx.Node) else node.name)


# ---- which nodes have a gradient of their own ------------------------------------------------------------------------
def with_same_readers(diff: GraphDiff, pairs: Mapping[str, str]) -> dict[str, str]:
    """Those of `pairs` whose readers are each other's counterparts."""
    both = {c.before.name: c.after.name for c in diff.changes if c.before is not None and c.after is not None}
    before = Readers((change.before for change in diff.changes), both)
    after = Readers((change.after for change in diff.changes), {name: name for name in both.values()})
    return {name: origin for name, origin in pairs.items() if before.of(origin) == after.of(name)}


class Readers:
    """Of the nodes of one side: which of those with a counterpart read a value, named by `called`."""

    def __init__(self, views: Iterable[NodeView | None], called: Mapping[str, str]):
        self.called, self.direct = called, defaultdict[str, list[tuple[NodeView, int]]](list)
        for view in (view for view in views if view is not None):
            for position, name in enumerate(view.inputs):
                self.direct[name].append((view, position))

    def of(self, name: str) -> set[str]:
        """Looking through nodes without a counterpart."""
        found, seen, open_ = set[str](), {name}, [name]
        while open_:
            for reader in self.readers(open_.pop()):
                if reader in self.called:
                    found.add(self.called[reader])
                elif reader not in seen:
                    seen.add(reader)
                    open_.append(reader)
        return found

    def readers(self, name: str) -> Iterator[str]:
        """Of a list of values, who takes this one."""
        for view, position in self.direct[name]:
            if view.op != LISTED:
                yield view.name
                continue
            for taker, _ in self.direct[view.name]:
                if taker.op == "getitem" and int(taker.arguments.split(", ")[1]) == position:
                    yield taker.name
