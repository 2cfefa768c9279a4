"""Higher-order operators that are one node of a graph.

It is where all that one does follows from its operands and the graphs among its arguments: it gives new tensors and
changes nothing. Hooks, effects and kernels that write have no graphs there, or give back what they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from ringopt.frontend import flex
from ringopt.ir.autograd_function import HigherOrder, OperandPlace
from ringopt.ir.nodes import is_random, is_write, op_name, value_of, written_args
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import at_hand, is_open, plain
from ringopt.torch_compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.pytree import tree_leaves, tree_map
from ringopt.torch_compat.schema import HigherOrderOperator, OpOverload
from ringopt.torch_compat.symbolic_shapes import ShapeEnv, computed
from ringopt.torch_compat.tensors import storage_key

NUMBERS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.SymInt)


def reason_against(node: fx.Node, value: Callable[[Any], Any]) -> str | None:
    """Why a call in Dynamo's graph cannot be one node, and what to do about it; `value` gives the fake value of a node,
    or the graph it is."""
    given = [value(leaf) for leaf in tree_leaves((node.args, node.kwargs))]
    if not any(isinstance(leaf, fx.GraphModule) for leaf in given):
        return f"it is given no graph to run, so what it does with its operands is not known; {ELSEWHERE}"
    others = kinds(leaf for leaf in given if not isinstance(leaf, (Tensor, fx.GraphModule, *NUMBERS)))
    if others:
        return f"it is given {others}, and not only tensors, numbers and graphs; hand it the tensors themselves"
    made = tree_leaves(value(node))
    others = kinds(leaf for leaf in made if not isinstance(leaf, Tensor))
    if others or not made:
        return f"it returns {others or 'nothing'}, and not only tensors; return tensors from its functions"
    return None


def refuse_views(node: fx.Node, value: Callable[[Any], Any]) -> None:
    """Raises GraphRefused where a call in Dynamo's graph returns the memory of what it is given: a node gives new."""
    memory = {storage_key(leaf) for leaf in map(value, node.all_input_nodes) if isinstance(leaf, Tensor)}
    made = tree_leaves(value(node))
    shared = [str(place) for place, leaf in enumerate(made) if storage_key(leaf) in memory]
    if shared:
        why = (
            f"what it returns (number {', '.join(shared)} of {len(made)}) lies in the memory of what it is given; "
            f"return a clone(), or {ELSEWHERE}"
        )
        raise GraphRefused(not_sharded(node.target.name(), why, node))


ELSEWHERE = "call it outside of what is compiled (torch.compiler.disable)"


def kinds(values: Iterable[Any]) -> str:
    """The types of values, each once."""
    return ", ".join(sorted({type(value).__name__ for value in values}))


def held_call(operator: HigherOrderOperator, args: Any, kwargs: Any, node: fx.Node) -> tuple[HigherOrder, list[Tensor]]:
    """The call that `node` of Dynamo's graph makes, and its tensors. Sizes that are open become numbers, but where they
    stay open (`stays_open`): graphs inside are of these sizes. Dtypes are those of Dynamo: here nothing is cast yet as
    autocast has it."""
    tensors: list[Tensor] = []
    leaves = iter(tree_leaves((tuple(node.args), dict(node.kwargs))))

    def place(value: Any) -> Any:
        example = flex.example(next(leaves))
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return OperandPlace(len(tensors) - 1, example.dtype)

    arguments = tree_map(place, (tuple(args), dict(kwargs)))
    call = HigherOrder(operator, arguments)
    return (call if stays_open(operator, tensors) else call.with_sizes(int)), tensors


def with_facts_of_graphs(call: HigherOrder, tensors: Sequence[Tensor], node: fx.Node) -> HigherOrder:
    """`call` with what is known of its graphs, as torch traces them. Raises GraphRefused."""
    # (In a mode of torch's own: for these operators it looks up what to do by the type of the mode.)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    sizes = sizes_at_hand if stays_open(call.operator, tensors) else fixed_sizes
    with unset_fake_temporarily(), mode, torch.no_grad():
        places = [place for place in tree_leaves(call.arguments) if isinstance(place, OperandPlace)]
        given = [
            torch.empty_strided(*sizes(x), dtype=place.dtype, device=x.device)
            for x, place in zip(tensors, places, strict=True)
        ]
        try:
            at_these = call.with_sizes(at_hand)
            traced = make_fx(at_these, tracing_mode="real", _allow_non_fake_inputs=True)(given)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _refused(call, f"{error.func} gives what is known only when it runs", node) from error
        except RuntimeError as error:
            raise _refused(call, f"torch does not trace it as it stands here: {error}", node) from error
    random = False
    for graph in graphs_of(traced):
        inputs = list(map(value_of, graph.find_nodes(op="placeholder")))
        for inner in graph.nodes:
            why = _reason_inside(inner, inputs)
            if why is not None:
                raise _refused(call, why, node)
            random = random or is_random(inner)
    return replace(call, random=random, strides=[x.stride() for x in tensors])


def stays_open(operator: HigherOrderOperator, tensors: Iterable[Tensor]) -> bool:
    """Whether sizes of its tensors that are open stay so. The graph of torch's scan is of one step, whatever their
    number: find_scan takes it out of the operator, and what it leaves there is fixed when it is lowered."""
    return operator.name() == "scan" and any(is_open(size) for x in tensors for size in x.shape)


def fixed_sizes(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides; open ones are fixed."""
    return list(map(int, x.shape)), list(map(int, x.stride()))


def traced_sizes(x: Tensor, known: Mapping[sympy.Symbol, Any]) -> tuple[list[Any], list[Any]]:
    """Sizes and strides, open ones computed from sizes of the inputs: a tracer knows no others."""

    def traced(size: Any) -> Any:
        covered = is_open(size) and size.node.expr.free_symbols <= known.keys()
        return computed(size.node.expr, dict(known)) if covered else plain(size)

    return list(map(traced, x.shape)), list(map(traced, x.stride()))


def sizes_at_hand(x: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides; open ones stay open."""
    return list(map(at_hand, x.shape)), list(map(at_hand, x.stride()))


def _reason_inside(node: fx.Node, inputs: Sequence[Any]) -> str | None:
    """Why not, of a node in a graph of a call; `inputs` are the values that the graph is given."""
    if isinstance(node.target, HigherOrderOperator) and not any(arg.op == "get_attr" for arg in node.all_input_nodes):
        return f"{node.target.name()} in it runs no graph of the program"
    if not isinstance(node.target, OpOverload):
        return None
    if node.target.namespace not in ("aten", "prims"):
        return f"{node.target} is no ATen operator"
    if op_name(node) == "as_strided":
        return "as_strided in it reads memory that may lie otherwise here"
    if not is_write(node):
        return None
    written = list(map(value_of, written_args(node)))
    if not all(isinstance(x, Tensor) for x in written) or any(x is None for x in inputs):
        return f"{node.target} writes, and to what is not known"
    memory = {storage_key(x) for x in inputs if isinstance(x, Tensor)}
    return f"{node.target} writes to what it is given" if any(storage_key(x) in memory for x in written) else None


def graphs_of(traced: fx.GraphModule) -> Iterator[fx.Graph]:
    """The graph, and those inside of it."""
    yield from (module.graph for module in traced.modules() if isinstance(module, fx.GraphModule))


def _refused(call: HigherOrder, why: str, node: fx.Node) -> GraphRefused:
    return GraphRefused(not_sharded(call.__name__, why, node))


def not_sharded(name: str, why: str, node: fx.Node) -> Refusal:
    """Of a higher-order operator."""
    return Refusal(f"the higher-order operator {name} is not sharded yet: {why}", node)
