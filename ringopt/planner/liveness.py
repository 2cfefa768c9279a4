"""How much memory a step holds at once, read off the forward and backward graphs that AOTAutograd makes of a graph.

Nothing runs: values are fake. A buffer lives from the node that makes it to its last reader. Pointwise results that
only pointwise nodes and reductions read are taken to be fused away, as Inductor does; what an attention holds inside
its operator is not seen here (cost/simulate.py has it).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from operator import ge
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import op_name
from ringopt.ops.traits import attends, held_bytes
from ringopt.overlap.collective_order import Split
from ringopt.torch_compat.aot_autograd import aot_module_simplified
from ringopt.torch_compat.fake_tensors import FakeTensor
from ringopt.torch_compat.inductor import select_decomp_table
from ringopt.torch_compat.schema import OpOverload
from ringopt.torch_compat.tensors import storage_key
from ringopt.torch_compat.tracing import TracingContext, tracing

Shape = tuple[int, tuple[int, int]]  # of weights of pairs: how many elements, and the sizes that count rows, in order


@dataclass(frozen=True)
class Held:
    """Bytes at one moment: of values that grow with the sequence, of others, and of those that grow with its square."""

    growing: int
    fixed: int
    squared: int = 0

    def at(self, scale: float) -> int:
        return round(self.growing * scale + self.squared * scale**2) + self.fixed


@dataclass(frozen=True)
class Live:
    """What a graph and its backward hold, what is saved between them included. `parameters`: bytes of what comes in and
    has a gradient, beside which all else is counted; `moments`: those at which most is held, at one length or another;
    `at_attention`, `at_attention_backward`: the same, at the attentions only, without what these make."""

    parameters: int
    moments: tuple[Held, ...]
    at_attention: tuple[Held, ...]
    at_attention_backward: tuple[Held, ...]

    @property
    def step(self) -> int:
        """The most that grows with the sequence."""
        return max(held.growing + held.squared for held in self.moments)


def most(moments: Sequence[Held], scale: float) -> int:
    """The most bytes held at once, with sequences `scale` times as long."""
    return max((held.at(scale) for held in moments), default=0)


def live_of(
    flat: fx.GraphModule, parts: Sequence[fx.GraphModule], rows: int, ranks: int = 1, pairs: Collection[Shape] = ()
) -> Live:
    """Of a graph of fake values, with sizes that are numbers, and its `partitioned` graphs. What has no more elements
    than a rank has `rows` does not grow with the sequence, nor do parameters, what is made of them alone, and their
    gradients. What has the shape of weights of `pairs` of rows grows with its square."""
    forward, backward = (*parts, None)[:2]
    assert forward is not None
    given = [node.meta["val"] for node in flat.graph.find_nodes(op="placeholder")]
    learned = sum(_storage_bytes(x) for x in given if isinstance(x, torch.Tensor) and x.requires_grad)
    fixed = small(forward.graph, rows) | of_weights(forward.graph, given)
    first, first_at = moments(forward.graph, {}, fixed, square(forward.graph, pairs), ranks)
    if backward is None:
        return Live(learned, highest(first), highest(first_at), ())
    kept = own(forward.graph)
    names = {node.name: node for node in forward.graph.nodes}
    saved = [node for node in backward.graph.find_nodes(op="placeholder") if kept.get(node.name)]
    held = {storage: size for node in saved for storage, size in by_storage(node).items()}
    still = {storage for node in saved if fixed & set(by_storage(names[node.name])) for storage in by_storage(node)}
    still |= of_parameters(backward.graph) | small(backward.graph, rows)
    last, last_at = moments(backward.graph, held, still, square(backward.graph, pairs), ranks)
    return Live(learned, highest([*first, *last]), highest(first_at), highest(last_at))


def highest(found: Sequence[Held]) -> tuple[Held, ...]:
    """Those of which none is less than another in all."""
    kept: list[Held] = []
    for held in sorted(set(found), key=astuple, reverse=True):
        if not any(all(map(ge, astuple(other), astuple(held))) for other in kept):
            kept.append(held)
    return tuple(kept)


def square(graph: fx.Graph, pairs: Collection[Shape]) -> set[int]:
    """Storages of weights of pairs."""
    tensors = [x for node in graph.nodes for x in _tensors_of(node)] if pairs else []
    alike = [x for x in tensors if any(x.numel() == count and _in_order(x.shape, *rows) for count, rows in pairs)]
    return {storage_key(x) for x in alike if _storage_bytes(x) == x.numel() * x.element_size()}


def _in_order(shape: Sequence[int], first: int, second: int) -> bool:
    return first in shape and second in shape[shape.index(first) + 1 :]


def small(graph: fx.Graph, rows: int) -> set[int]:
    """Storages of at most `rows` numbers of 8 bytes."""
    return {storage for node in graph.nodes for storage, size in by_storage(node).items() if size <= 8 * rows}


def of_weights(forward: fx.Graph, given: Sequence[Any]) -> set[int]:
    """Storages of what is made of parameters alone, such as their copies in another dtype."""
    inputs = forward.find_nodes(op="placeholder")
    known = {node for node, x in zip(inputs, given, strict=False) if isinstance(x, torch.Tensor) and x.requires_grad}
    for node in forward.nodes:
        if node.op == "call_function" and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
    return {storage for node in known for storage in by_storage(node)}


def of_parameters(backward: fx.Graph) -> set[int]:
    """Storages of gradients that leave the graph, and of the parts that are reduced to them."""
    found = {storage for outputs in own(backward).values() for storage in outputs}
    for node in backward.nodes:
        if op_name(node) == "reduce_bucket" or (op_name(node) == "reduce_from_group" and leaves(node)):
            found.update(storage for x in (node, *node.all_input_nodes) for storage in by_storage(x))
    return found


def leaves(node: fx.Node) -> bool:
    """The graph, as it is, as a view or in another dtype: what is summed for another product does not."""
    own = by_storage(node).keys()
    views = (user for user in node.users if _is_pointwise(user) or not own.isdisjoint(by_storage(user)))
    return any(user.op == "output" for user in node.users) or any(map(leaves, views))


def partitioned(flat: fx.GraphModule) -> list[fx.GraphModule]:
    """The forward and, where something has a gradient, the backward, split as Inductor has them split."""
    graphs: list[fx.GraphModule] = []

    def split(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        parts = Split()(joint, inputs, compiler="inductor", **how)
        graphs.extend(parts)
        return parts

    def compiled(gm: Any, example_inputs: Sequence[Any]) -> Any:
        if not graphs:
            graphs.append(gm)
        return lambda *_: None

    inputs = [node.meta["val"] for node in flat.graph.find_nodes(op="placeholder")]
    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with tracing(TracingContext(mode)):
        aot_module_simplified(
            flat, inputs, compiled, compiled, split, decompositions=select_decomp_table(), inference_compiler=compiled
        )
    return graphs


def moments(
    graph: fx.Graph, saved: dict[int, int], fixed: Collection[int], squared: Collection[int], ranks: int
) -> tuple[list[Held], list[Held]]:
    """What is live at each node, and at attentions. `saved`: by storage, live when the graph begins and freed when it
    was last read; other inputs are not counted. `fixed`: storages that do not grow; `squared`: those that grow with the
    square."""
    nodes = list(graph.nodes)
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        last.update((storage, place) for x in (node, *node.all_input_nodes) for storage in by_storage(x))
    outer = {storage for node in graph.find_nodes(op="placeholder") for storage in by_storage(node)}
    alive = dict(saved)
    found, attentions = list[Held](), list[Held]()

    def now(without: Collection[int] = (), extra: int = 0) -> Held:
        held = {storage: size for storage, size in alive.items() if storage not in without}
        still = sum(size for storage, size in held.items() if storage in fixed)
        faster = sum(size for storage, size in held.items() if storage in squared and storage not in fixed)
        return Held(sum(held.values()) - still - faster + extra, still, faster)

    for place, node in enumerate(nodes):
        if _is_pointwise(node) and not fused(node):  # written over a result of its size that nobody reads any more
            own, size = next(iter(by_storage(node).items()))
            over = (s for x in node.all_input_nodes for s in by_storage(x) if last[s] == place and alive.get(s) == size)
            alive.pop(next(over, own), None)
        if node.op == "call_function" and not fused(node):
            alive.update((storage, size) for storage, size in by_storage(node).items() if storage not in outer)
        found.append(now((), held_bytes(node, ranks)))
        if attends(node):
            attentions.append(now(by_storage(node)))
        for value in (node, *node.all_input_nodes):
            for storage in by_storage(value):
                if last[storage] == place:
                    alive.pop(storage, None)
    return found, attentions


def fused(node: fx.Node) -> bool:
    """A pointwise result that nobody needs in memory."""
    return _is_pointwise(node) and all(_is_pointwise(user) or _is_reduction(user) for user in node.users)


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_reduction(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags


def own(graph: fx.Graph) -> dict[str, dict[int, int]]:
    """Bytes by storage of each output that the graph made itself, by name."""
    outer = {storage for node in graph.find_nodes(op="placeholder") for storage in by_storage(node)}
    nodes = (node for node in graph.output_node().all_input_nodes if node.op != "placeholder")
    return {node.name: {s: size for s, size in by_storage(node).items() if s not in outer} for node in nodes}


def by_storage(node: fx.Node) -> dict[int, int]:
    """Bytes by storage."""
    return {storage_key(x): _storage_bytes(x) for x in _tensors_of(node)}


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, torch.Tensor)]


def _storage_bytes(value: Any) -> int:
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0
