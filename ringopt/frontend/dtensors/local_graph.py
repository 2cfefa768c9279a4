"""Dynamo's graph with the local tensor of each DTensor in its place.

A DTensor of another mesh than that of the sequence (tensor parallelism) is whole to the program and a part on each
rank. What is done with it is written out for the part (local_functions.py), each call with those that feed only it:

    q = to_local(redistribute(linear(from_local(x), w)))      ->      q = tensor_parallel(x, w_local)

where the function on the right has the form in which Dynamo writes a custom autograd.Function. Then tokens are tokens:
the sequence is shared as in any other program, and each rank sends to its own row and column of the two meshes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ringopt.errors import RingMismatchError
from ringopt.frontend.dtensors.local_functions import example_of, local_function, spread_as
from ringopt.ir.nodes import outputs_of, readable_name
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.tensor.lazy import Lazy, whole
from ringopt.torch_compat.distributed import AsyncCollectiveTensor, waited
from ringopt.torch_compat.dynamo import AUTOGRAD_FUNCTION, SUBGRAPH, real_object
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.schema import HigherOrderOperator

PLAIN = (Replicate, Shard, Partial)  # all that a value is, is its local tensor and these


@dataclass(frozen=True)
class DTensorBoundary:
    """Around a graph of local tensors, where the program has DTensors. By place: its inputs that are `meshes`, as they
    were when it was compiled, and the fake DTensors like which its `outputs` leave."""

    meshes: Mapping[int, DeviceMesh] = field(default_factory=dict)
    outputs: Mapping[int, DTensor] = field(default_factory=dict)
    nothing: bool = True  # is a DTensor

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with inputs and outputs as the program has them."""
        return run if self.nothing else lambda *inputs: self.leaving(run(*self.entering(inputs)))

    def entering(self, inputs: Sequence[Any]) -> list[Any]:
        """A DTensor's local tensor, once its message is there, which hands its gradient on; 0 for a mesh."""
        return list(inputs) if self.nothing else [self._local(place, x) for place, x in enumerate(inputs)]

    def leaving(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Rows of a lazy tensor are gathered: a DTensor holds no such."""
        outputs = [whole(x) if k in self.outputs and isinstance(x, Lazy) else x for k, x in enumerate(outputs)]
        return tuple(spread_as(self.outputs[k], x) if k in self.outputs else x for k, x in enumerate(outputs))

    def _local(self, place: int, x: Any) -> Any:
        x = x.to_local() if isinstance(x, DTensor) else x
        if isinstance(x, AsyncCollectiveTensor):
            return waited(x)
        if place not in self.meshes:
            return x
        if isinstance(x, DeviceMesh) and x != self.meshes[place]:
            raise RingMismatchError(
                f"the program was compiled for DTensors on {self.meshes[place]}, and is called with {x}; "
                "call torch.compiler.reset() after changing meshes"
            )
        return 0


def has_dtensors(gm: fx.GraphModule) -> bool:
    """Whether a value in Dynamo's graph is a DTensor, or what a DTensor has become as soon as its message is there."""
    return any(is_spread(node) or isinstance(example_of(node), AsyncCollectiveTensor) for node in gm.graph.nodes)


def meshes_of_dtensors(gm: fx.GraphModule) -> dict[DeviceMesh, fx.Node]:
    """Each mesh over which values in Dynamo's graph are spread, with the first of them."""
    found: dict[DeviceMesh, fx.Node] = {}
    for node in gm.graph.nodes:
        for value in tree_leaves(example_of(node)):
            if isinstance(value, DTensor):
                found.setdefault(value.device_mesh, node)
    return found


def with_local_tensors(gm: fx.GraphModule) -> tuple[fx.GraphModule, DTensorBoundary]:
    """A copy of `gm`, with inputs and outputs at the same places, and what is to be around it. Raises GraphRefused,
    with what is not known and its line."""
    casts = [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "_enter_autocast"]
    if casts:
        why = "autocast is entered within what is compiled, beside DTensors; enter it around the call of the model"
        raise GraphRefused(Refusal(why, casts[0]))
    touched = [node for node in gm.graph.nodes if touches(node)]
    for node in touched:
        refuse(node)
    inner = {node for node in touched if feeds_one(node)}
    made = fx.GraphModule(gm, gm.graph)
    places, made.graph = gm.graph.find_nodes(op="placeholder"), fx.Graph()
    constants: dict[fx.Node, Any] = {node: mesh for node in gm.graph.nodes if (mesh := mesh_of(node)) is not None}
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in inner or (node in constants and node.op != "placeholder"):
            continue
        if touches(node) and node.op != "output":
            copies[node] = called(made, tree_of(node, inner), constants, copies)
        else:
            copies[node] = made.graph.node_copy(node, copies.__getitem__)
    made.recompile()
    meshes = {k: constants[x] for k, x in enumerate(places) if x in constants}
    returned = {k: example_of(x) for k, x in enumerate(outputs_of(gm.graph)) if isinstance(x, fx.Node) and is_spread(x)}
    return made, DTensorBoundary(meshes, returned, False)


def is_spread(node: fx.Node) -> bool:
    """Whether a value is a DTensor, or holds some."""
    return any(isinstance(x, DTensor) for x in tree_leaves(example_of(node)))


def mesh_of(node: fx.Node) -> DeviceMesh | None:
    """The mesh that a node stands for: an input, or what is asked of a DTensor."""
    value = real_object(example_of(node))
    return value if isinstance(value, DeviceMesh) else None


def touches(node: fx.Node) -> bool:
    """Whether it reads or makes a DTensor; a placeholder is one."""
    return node.op != "placeholder" and (is_spread(node) or any(map(is_spread, node.all_input_nodes)))


def refuse(node: fx.Node) -> None:
    """Raises GraphRefused for what is no function of local tensors."""
    name, others = readable_name(node.name), [x for x in (node, *node.all_input_nodes) if not is_plain(x)]
    if node.op not in ("call_function", "call_method", "output") or isinstance(node.target, HigherOrderOperator):
        raise GraphRefused(Refusal(f"{name} is given a DTensor, and runs a graph or a module of its own", node))
    if others:
        placements = getattr(example_of(others[0]), "placements", "several")
        why = f"{readable_name(others[0].name)} is a DTensor whose local tensor does not say all of it ({placements})"
        if not feeds_one(others[0]):
            raise GraphRefused(Refusal(why, others[0]))


def is_plain(node: fx.Node) -> bool:
    """Whether a value is one tensor, which follows from local tensors and placements."""
    value = example_of(node)
    if isinstance(value, DTensor):
        return all(type(placement) in PLAIN for placement in value.placements)
    return not is_spread(node)


def feeds_one(node: fx.Node) -> bool:
    """Whether a DTensor, or several, are read by one call alone, as a part of which they are made."""
    readers = [user.op for user in node.users]
    return touches(node) and is_spread(node) and readers in (["call_function"], ["call_method"])


def tree_of(last: fx.Node, inner: set[fx.Node]) -> list[fx.Node]:
    """`last` and the calls whose results go into it alone, in order."""
    found, waiting = {last}, [last]
    while waiting:
        more = [x for x in waiting.pop().all_input_nodes if x in inner]
        found.update(more)
        waiting += more
    return [node for node in last.graph.nodes if node in found]


def called(
    made: fx.GraphModule, nodes: Sequence[fx.Node], constants: dict[fx.Node, Any], copies: dict[fx.Node, fx.Node]
) -> fx.Node:
    """`nodes` as a custom autograd.Function of local tensors, at the end of the graph of `made`."""
    read = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in nodes)
    operands = [x for x in read if isinstance(example_of(x), Tensor)]
    numbers = {x: int(size) for x in read if isinstance(size := example_of(x), (int, torch.SymInt))}
    function, last, graph = local_function(nodes, operands, constants | numbers), nodes[-1], made.graph
    given = [copies[x] for x in operands]

    def held(name: str, module: fx.GraphModule) -> fx.Node:
        made.add_module(f"{last.name}_{name}", module)
        return graph.get_attr(f"{last.name}_{name}")

    forward = held("forward", function.forward)
    if function.backward is None:
        call = graph.call_function(SUBGRAPH, (forward, last.name, *given))
    else:
        how: dict[str, Any] = {"non_differentiable_idx": [], "saved_for_backward_idx": []}
        graphs = (forward, held("backward", function.backward))
        call = graph.call_function(AUTOGRAD_FUNCTION, (*graphs, *given), how)
    call.meta = {**last.meta, "example_value": (function.result,)}
    found = graph.call_function(operator.getitem, (call, 0))
    found.meta = {**last.meta, "example_value": function.result}
    return found
