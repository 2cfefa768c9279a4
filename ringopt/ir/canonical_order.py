"""What a functional graph computes, independent of the order and the names of its nodes.

    for kind in {"full", "sliding"}: masks[kind] = ...     # a set: each process iterates over it in another order

makes graphs on two ranks that differ in the order of their inputs and nodes. The canonical order is that in which the
outputs need the values: depth first, arguments from left to right. Only what has an order of its own in the program
(random numbers, collectives, operators of other libraries) keeps it and comes first. So no name and no position
decides anything but among outputs, which Dynamo puts in the order it found them in: these follow a hash of what they
compute, and of who else reads what they are made of.

The text written in that order is a complete description. Equal texts are equal programs; that equal programs have equal
texts is not proved for outputs with equal hashes, and unequal texts are refused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from ringopt.ir.autograd_function import CustomGradient, HigherOrder
from ringopt.ir.nodes import is_random, is_write, named, outputs_of, source_line, value_of
from ringopt.ir.symbolic_sizes import OPEN, at_hand, formula
from ringopt.torch_compat.fake_tensors import FakeTensor
from ringopt.torch_compat.schema import OpOverload, schema_of


@dataclass(frozen=True)
class Program:
    """The canonical text, a line a node, and the line of source that each comes from."""

    lines: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


# ---- what keeps its order --------------------------------------------------------------------------------------------
PURE = ("aten", "prims", "ringopt")


def keeps_order(node: fx.Node) -> bool:
    """Whether the result or the effect of a node depends on more than its operands: a random generator, other ranks, an
    operator of another library."""
    if isinstance(node.target, CustomGradient):
        return any(map(keeps_order, node.target.backward.graph.nodes))
    if isinstance(node.target, HigherOrder):
        return node.target.random
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function" and bool(node.is_impure())
    if is_write(node):
        return False  # the final copy_ into inputs, each into another one
    names = [argument.name for argument in schema_of(node.target).arguments]
    if "dropout_p" in names and named(node, "dropout_p") == 0.0:
        return False  # attention, which draws for its dropout only
    return is_random(node) or "group" in names or node.target.namespace not in PURE or bool(node.is_impure())


# ---- the order -------------------------------------------------------------------------------------------------------
def canonical_order(graph: fx.Graph, in_place: bool = False) -> tuple[list[fx.Node], list[int]]:
    """All nodes but the output node in canonical order, and the permutation of the outputs; the identity with
    `in_place`."""
    colors = Colors(graph)
    found: dict[fx.Node, None] = {}
    visit(filter(keeps_order, graph.nodes), found)
    outputs = outputs_of(graph)
    places = list(range(len(outputs)))
    if not in_place:
        colors.distinguish([x for x in outputs if isinstance(x, fx.Node)])
        places.sort(key=lambda place: colors.key(outputs[place]))
    visit((x for place in places for x in nodes_in(outputs[place])), found)
    rest = [node for node in graph.nodes if node not in found and node.op != "output"]
    last = [node for node in rest if is_write(node)]
    colors.distinguish(rest)
    visit((x for node in sorted(last, key=colors.key) for x in node.all_input_nodes), found)
    ends = [node for node in rest if node not in found and not is_write(node)]
    visit(sorted(ends, key=lambda node: (any(user not in last for user in node.users), colors.key(node))), found)
    visit(sorted(last, key=colors.key), found)
    return list(found), places


def visit(roots: Iterable[fx.Node], found: dict[fx.Node, None]) -> None:
    """Adds each root to `found` after all that it depends on: depth first, without recursion."""
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                found.setdefault(node)
            elif node not in found:
                stack.append((node, True))
                stack += [(arg, False) for arg in reversed(nodes_in((node.args, node.kwargs))) if arg not in found]


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes of an argument, in order; one that stands twice comes twice."""
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


class Colors:
    """Hashes of nodes that do not depend on names or order (colour refinement, as in graph isomorphism): at first of
    what a node computes."""

    def __init__(self, graph: fx.Graph):
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.labels = {}
        turn = 0
        for node in self.nodes:
            turn += (kept := keeps_order(node))
            self.labels[node] = f"{turn if kept else ''} {node_text(node, lambda arg: '%', at_hand)} {recomputed(node)}"
        self.returned = set(nodes_in(graph.output_node().args))
        self.of = dict(self.labels)
        self.follow_operands()

    def key(self, value: Any) -> tuple[str, str]:
        """The sort key of a node or a constant. The operator goes before the hash, so that two programs that differ in
        one place still order their outputs alike, and the first line that differs is that place."""
        if not isinstance(value, fx.Node):
            return f"{type(value).__name__} {text(value, str, at_hand)}", ""
        return f"node {self.labels[value]}", self.of[value]

    def distinguish(self, nodes: Sequence[fx.Node]) -> None:
        """Refines until the hashes of `nodes` differ, or no round changes that: nodes that compute the same
        from the same values differ by their users, and by the other operands of these."""
        wanted, known = len(set(nodes)), 0
        while len({self.of[node] for node in nodes}) < wanted and known < (count := len(set(self.of.values()))):
            known = count
            self.follow_users()
            self.follow_operands()

    def follow_operands(self) -> None:
        for node in self.nodes:
            self.of[node] = _digest(self.of[node], *(self.of[arg] for arg in nodes_in((node.args, node.kwargs))))

    def follow_users(self) -> None:
        for node in reversed(self.nodes):
            readers = [
                f"{self.of[user]} {place}"
                for user in node.users
                if user.op != "output"
                for place, arg in enumerate(nodes_in((user.args, user.kwargs)))
                if arg is node
            ]
            self.of[node] = _digest(self.of[node], str(node in self.returned), *sorted(readers))


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


# ---- the text --------------------------------------------------------------------------------------------------------
def program_of(graph: fx.Graph, order: Sequence[fx.Node]) -> Program:
    """The canonical text of a graph whose nodes have canonical names. An input has its line where it is first read."""
    symbols = Symbols()
    regions: dict[Any, int] = {}

    def line(node: fx.Node) -> str:
        region = regions.setdefault(node.meta["ac_graph_id"], len(regions)) if recomputed(node) else ""
        again = f" computed again in region {region} {recomputed(node)}" if recomputed(node) else ""
        return f"%{node.name} = {node_text(node, lambda arg: f'%{arg.name}', symbols)}{again}"

    lines = [line(node) for node in order]
    returned = f"return {text(graph.output_node().args[0], lambda arg: f'%{arg.name}', symbols)}"
    return Program((*lines, returned), (*map(source_line, order), ""))


class Symbols:
    """Names symbolic sizes by the order in which they occur: Dynamo names them after the input it saw first."""

    def __init__(self) -> None:
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}

    def __call__(self, size: Any) -> Any:
        expression = formula(size)
        for symbol in sorted(getattr(expression, "free_symbols", ()), key=str):
            self.names.setdefault(symbol, sympy.Symbol(f"n{len(self.names)}", integer=True, positive=True))
        return expression.xreplace(self.names)


def node_text(node: fx.Node, name: Callable[[fx.Node], str], size: Callable[[Any], Any]) -> str:
    """The text of one node: kind or operator and arguments, with operands named by `name` and sizes by `size`."""
    value = value_of(node)
    if node.op == "placeholder":
        what = f"input {node.meta.get('source') or node.meta.get('input') or node.name}"
        kind = f" {value.dtype} {text(list(value.shape), name, size)}" if isinstance(value, Tensor) else ""
        return what + kind + (" with a gradient" if kind and value.requires_grad else "")
    if node.op == "get_attr":
        return f"constant {content(getattr(node.graph.owning_module, str(node.target), None))}"
    given = [text(arg, name, size) for arg in args_for_all_ranks(node)]
    given += [f"{key}={text(arg, name, size)}" for key, arg in node.kwargs.items()]
    return f"{_target_text(node)}({', '.join(given)})"


def args_for_all_ranks(node: fx.Node) -> Sequence[Any]:
    """Without the name of a group of torch.distributed, of which each rank has its own beside those of the sequence."""
    if getattr(node.target, "namespace", "") != "_c10d_functional":
        return list(node.args)
    names = [arg.name for arg in schema_of(node.target).arguments]
    return [arg for name, arg in zip(names, node.args, strict=False) if name != "group_name"]


def _target_text(node: fx.Node) -> str:
    if isinstance(node.target, CustomGradient):
        graph = node.target.backward.graph
        return f"custom_gradient[{_digest(program_of(graph, [x for x in graph.nodes if x.op != 'output']).text)}]"
    if isinstance(node.target, HigherOrder):
        args, kwargs = node.target.arguments
        return f"{node.target.__name__}[{_digest(text([args, kwargs, node.target.autocast], str, at_hand))}]"
    return str(node.target) if isinstance(node.target, OpOverload) else getattr(
        node.target, "__name__", str(node.target)
    )  # fmt: skip


def content(value: Any) -> str:
    """Dtype, shape and a hash of the values of a constant of the program; of fake tensors dtype and shape only."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = f"{value.dtype} {list(value.shape)}"
    if isinstance(value, FakeTensor) or value.device.type == "meta" or value.layout != torch.strided:
        return kind
    held = value.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).cpu().numpy()
    return f"{kind} {hashlib.blake2b(held.tobytes(), digest_size=16).hexdigest()}"


def text(value: Any, name: Callable[[fx.Node], str], size: Callable[[Any], Any]) -> str:
    """The text of an argument. Each rank has a device of its own, so only the type of a device counts."""
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, OPEN):
        return str(size(value))
    if isinstance(value, (list, tuple)):
        inside = ", ".join(text(each, name, size) for each in value)
        return f"[{inside}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key!r}: {text(each, name, size)}" for key, each in value.items())
        return f"{{{inside}}}"
    if isinstance(value, slice):
        return f"slice{text([value.start, value.stop, value.step], name, size)}"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, fx.GraphModule):
        return body(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def recomputed(node: fx.Node) -> str:
    """The checkpoint policy by which a node is recomputed in the backward; "" outside of checkpoints."""
    return node.meta["recompute"].name if node.meta.get("recompute") is not None else ""


def body(gm: fx.GraphModule) -> str:
    """A graph that an operator runs, its nodes by number."""
    number = {node: f"%{place}" for place, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        inner = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        what = text(inner, str, at_hand) if isinstance(inner, fx.GraphModule) else ""
        known = what or ("input" if node.op == "placeholder" else node_text(node, number.__getitem__, at_hand))
        lines.append(f"{node.op} {known}")
    return _digest(*lines)
