"""The body of a scan: one step, as a graph and as text.

    (carry..., x..., const...) -> (carry..., y...)

A body is a flat graph of ATen operators. Its text is the argument of `ringopt::scan`, so it is part of every cache key,
is compared over the ranks like any number, and travels in files. Reading one runs nothing: operators are looked up
among those of ATen by name, and only such are taken as compute a value from tensors and do nothing else. Two bodies
that compute the same nodes from the same operands have one text, whatever their nodes are called.

    {"carries": 1, "xs": 2, "consts": 0,
     "nodes": [["mul.Tensor", [{"%": 0}, {"%": 1}]], ["add.Tensor", [{"%": 3}, {"%": 2}]]], "out": [4, 4]}
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import outputs_of
from ringopt.ir.refusal import Refusal
from ringopt.torch_compat.operators import UNSAFE_VIEW
from ringopt.torch_compat.schema import OpOverload, OpOverloadPacket, schema_of

aten = torch.ops.aten

# Values that JSON has no form for: the name of the form, the type, and the module that holds it by its name.
NAMED_VALUES = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
GETITEM = "getitem"
FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"}
)  # take no tensor, and yet compute a value


class NoBody(Exception):
    """A graph cannot be the body of a scan, or a text is none."""

    def __init__(self, sentence: str, node: fx.Node | None = None):
        self.refusal = Refusal(sentence, node)
        super().__init__(sentence)


@dataclass(frozen=True, eq=False)
class Body:
    """`module(*carries, *xs, *consts)` is one step, given one row of each x: a tuple of the new carries and the ys.

    carries, xs, consts, ys   how many there are
    """

    module: fx.GraphModule
    carries: int
    xs: int
    consts: int
    ys: int

    @property
    def inputs(self) -> list[fx.Node]:
        return placeholders(self.module)

    @property
    def outputs(self) -> list[fx.Node]:
        return outputs_of(self.module.graph)

    @property
    def device(self) -> str:
        """The type of device that it makes values on, if it makes any."""
        made = [node.kwargs["device"].type for node in self.module.graph.nodes if node.kwargs.get("device")]
        return made[0] if made else "cpu"


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


# ---- to text ---------------------------------------------------------------------------------------------------------
def to_text(body: fx.GraphModule, carries: int, xs: int, consts: int) -> str:
    """The text of a graph with placeholders (carry..., x..., const...) and outputs (carry..., y...). Raises NoBody for
    what cannot be one: operators that write, draw or are not of ATen, tensors held in the graph, open sizes."""
    inputs, outputs = placeholders(body), outputs_of(body.graph)
    if len(inputs) != carries + xs + consts or not xs or len(outputs) < carries:
        raise NoBody(
            f"a body of {carries} carries, {xs} xs and {consts} consts has {len(inputs)} inputs and {len(outputs)} "
            "outputs; it takes an input for each, at least one x, and gives back every carry"
        )
    if odd := [out for out in outputs if not isinstance(out, fx.Node)]:
        raise NoBody(f"the body returns {odd[0]!r}, which is no tensor")
    number = {node: place for place, node in enumerate(inputs)}
    nodes = []
    for node in computed(outputs, set(inputs)):
        nodes.append(_text_of(node, number))
        number[node] = len(number)
    counts = {"carries": carries, "xs": xs, "consts": consts}
    return json.dumps({**counts, "nodes": nodes, "out": [number[out] for out in outputs]}, separators=(",", ":"))


def computed(outputs: Sequence[fx.Node], inputs: set[fx.Node]) -> Iterator[fx.Node]:
    """What the outputs are made of, each node behind its operands, in an order that follows from what is computed."""
    done, stack = set(inputs), [(out, False) for out in reversed(outputs)]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack += [(node, True), *((arg, False) for arg in reversed(node.all_input_nodes))]


def _text_of(node: fx.Node, number: dict[fx.Node, int]) -> list[Any]:
    if node.op != "call_function":
        raise NoBody(f"the body holds {node.target}, which is none of its inputs", node)

    def text(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"%": number[value]}
        if isinstance(value, (list, tuple)):
            return [text(each) for each in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.device):
            return {"device": value.type}
        for form, kind in NAMED_VALUES.items():
            if isinstance(value, kind):
                return {form: str(value).removeprefix("torch.")}
        raise NoBody(f"an argument of {node} is a {type(value).__name__}, which no text of a body holds", node)

    if node.target is operator.getitem:
        return [GETITEM, [text(arg) for arg in node.args]]
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        raise NoBody(f"the body calls {node.target}, which is no operator of ATen", node)
    if why := why_no_step(node.target):
        raise NoBody(f"the body calls {node.target}, which {why}", node)
    # (Rows of an operand have other strides than the value that was viewed, of which there may be no view.)
    target = aten.reshape.default if node.target in (aten.view.default, UNSAFE_VIEW) else node.target
    name = str(target).removeprefix("aten.")
    kwargs = {key: text(value) for key, value in sorted(node.kwargs.items())}
    return [name, [text(arg) for arg in node.args], *([kwargs] if kwargs else [])]


def why_no_step(op: OpOverload) -> str:
    """What an operator does beside computing a value from tensors; "" where it does nothing else."""
    schema = schema_of(op)
    if schema.is_mutable:
        return "writes into an operand"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "draws random numbers"
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    if not takes and schema.name.split("::")[1] not in FACTORIES:
        return "takes no tensor"
    return ""


# ---- from text -------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def from_text(text: str) -> Body:
    """The inverse of `to_text`. Raises NoBody for a text that is no body."""
    try:
        held = json.loads(text)
        counts = carries, xs, consts = tuple(int(held[name]) for name in ("carries", "xs", "consts"))
        nodes, out = held["nodes"], [int(place) for place in held["out"]]
        if min(counts) < 0 or xs < 1 or len(out) < carries:
            raise ValueError(f"{counts} inputs and {len(out)} outputs")
        graph = fx.Graph()
        values = [graph.placeholder(f"{kind}{i}") for kind, n in zip("cxk", counts, strict=True) for i in range(n)]
        for node in nodes:
            values.append(_read(graph, values, *node))
        graph.output(tuple(values[place] for place in out))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise NoBody(f"a text is no body of a scan ({error}): {text[:80]!r}") from error
    return Body(fx.GraphModule(torch.nn.Module(), graph), carries, xs, consts, len(out) - carries)


def _read(graph: fx.Graph, values: list[fx.Node], name: str, args: Any, kwargs: Any = None) -> fx.Node:
    def value(given: Any) -> Any:
        if isinstance(given, list):
            return [value(each) for each in given]
        if not isinstance(given, dict):
            return given
        ((form, what),) = given.items()
        if form == "%":
            if not 0 <= what < len(values):
                raise ValueError(f"value {what} is read before it is there")
            return values[what]
        if form == "device":
            return torch.device(what)
        found = getattr(torch, what)
        if not isinstance(found, NAMED_VALUES[form]):
            raise ValueError(f"{what} is no {form}")
        return found

    given, named = tuple(value(args)), {key: value(x) for key, x in (kwargs or {}).items()}
    if name == GETITEM:
        if not isinstance(given[0], fx.Node) or not isinstance(given[1], int):
            raise ValueError("getitem takes a value and a number")
        return graph.call_function(operator.getitem, given)
    return graph.call_function(_operator(name), given, named)


def _operator(name: str) -> OpOverload:
    packet_name, _, overload = name.partition(".")
    packet = getattr(aten, packet_name) if packet_name.isidentifier() else None
    op = getattr(packet, overload or "default") if isinstance(packet, OpOverloadPacket) else None
    if not isinstance(op, OpOverload):
        raise ValueError(f"{name} is no operator of ATen")
    if why := why_no_step(op):
        raise ValueError(f"{name} {why}")
    return op
