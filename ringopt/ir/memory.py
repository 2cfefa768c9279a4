"""Aliasing of outputs: which inputs and outputs of a graph share a storage; and the order of dims in memory.

    return st.add_(1)            is the buffer itself: all references see the same object
    return x.mul_(2)[:, 1:]      is a view of the input, in which the caller sees later writes
    return y, y.transpose(1, 2)  share one storage

Aliasing is read off the storages of the captured fake values, before any pass. Every view notes its base, so that a
pass that replaces a value can make the views of it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import outputs_of, value_of
from ringopt.ir.notes import MEMORY, VIEW_OF, Memory
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import same
from ringopt.torch_compat.tensors import storage_key

aten = torch.ops.aten

LOST = "{} is returned, which lies in the memory of another value that the caller has; as shards it would not"


def note_memory(graph: fx.Graph) -> None:
    """Notes MEMORY on the output node, and on each view VIEW_OF, the index of its base among its operands."""
    owners: dict[int, Memory] = {}
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        for storage in storages(node):
            owners.setdefault(storage, ("input", place))
    found: list[Memory | None] = []
    for place, node in enumerate(outputs_of(graph)):
        memory = storages(node)
        found.append(owners.setdefault(min(memory), ("output", place)) if memory else None)
    graph.output_node().meta[MEMORY] = found
    for node in graph.nodes:
        shared = [i for i, arg in enumerate(node.all_input_nodes) if storages(arg) & storages(node)]
        if shared and node.op == "call_function":
            node.meta[VIEW_OF] = shared[0]


def storages(node: Any) -> frozenset[int]:
    """The storages of a tensor node, or of all results of a node with several."""
    value = value_of(node)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    kept = (part for part in parts if isinstance(part, torch.Tensor) and part.layout is torch.strided)
    return frozenset(storage_key(part) for part in kept)


def is_one_view(x: torch.Tensor, source: Any = None, *sizes: Any, **named: Any) -> bool:
    """Whether x.set_(source, ...) leaves `x` as it is: both show the same elements of one storage."""
    if sizes or named or not isinstance(source, torch.Tensor) or storage_key(x) != storage_key(source):
        return False
    one, other = ((*y.shape, *y.stride(), y.storage_offset()) for y in (x, source))
    return x.dtype == source.dtype and len(one) == len(other) and all(map(same, one, other))


def viewed(node: fx.Node) -> fx.Node | None:
    """The operand that a node is a view of, or None."""
    place = node.meta.get(VIEW_OF)
    return node.all_input_nodes[place] if place is not None else None


def line(node: fx.Node) -> Iterator[fx.Node]:
    """A value, its base, the base of that, ..."""
    found: fx.Node | None = node
    while found is not None:
        yield found
        found = viewed(found)


def written_rows(graph: fx.Graph, held: Container[fx.Node]) -> Refusal | None:
    """A refusal where the graph writes in place to one of the sharded inputs `held`."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        if node.args[0] in held:
            reason = f"the program writes to {node.args[0].name}, of which every rank holds its rows"
            return Refusal(reason, node)
    return None


def shared_outputs(graph: fx.Graph) -> Iterator[tuple[Memory, list[fx.Node]]]:
    """Groups of outputs that share a storage with an input or with one another."""
    groups: dict[Memory, list[fx.Node]] = defaultdict(list)
    for node, memory in zip(outputs_of(graph), graph.output_node().meta[MEMORY], strict=True):
        if memory is not None and node not in groups[memory]:
            groups[memory].append(node)
    for memory, nodes in groups.items():
        if memory[0] == "input" or len(nodes) > 1:
            yield memory, nodes


def base_of(memory: Memory, nodes: list[fx.Node]) -> fx.Node | Refusal:
    """The input that all `nodes` are views of, or the nearest common base; a refusal where there is none."""
    lines = [list(line(node)) for node in nodes]
    common = [x for x in lines[0] if isinstance(value_of(x), torch.Tensor) and all(x in each for each in lines)]
    if not common or (memory[0] == "input" and common[-1].op != "placeholder"):
        return Refusal(LOST.format(nodes[0].name), nodes[0])
    return common[-1] if memory[0] == "input" else common[0]


# ---- the order of dims in memory ------------------------------------------------------------------------------------
def order_of(stride: Sequence[Any]) -> list[int]:
    """The dims from the one whose elements lie furthest apart to the one whose elements lie side by side."""
    return sorted(range(len(stride)), key=stride.__getitem__, reverse=True)


def laying_out(stride: Sequence[Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Operators, with what they are called with beside the tensor, that lay it out in the order of `stride`: views that
    merge dims can then be made as of the tensor that has this stride. A view into something larger has gaps besides,
    which are not made."""
    order = order_of(stride)
    back = [order.index(dim) for dim in range(len(order))]
    copied: list[tuple[Any, tuple[Any, ...]]] = [(aten.contiguous.default, ())]
    if order == sorted(order):
        return copied
    return [(aten.permute.default, (order,)), *copied, (aten.permute.default, (back,))]


def lies_in_order(value: torch.Tensor, stride: Sequence[Any]) -> bool:
    """Whether `laying_out` is not needed."""
    alike = all(same(found, wanted) for found, wanted in zip(value.stride(), stride, strict=True))
    return alike or value.permute(order_of(stride)).is_contiguous()
