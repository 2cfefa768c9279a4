"""Calls of the operators of ringopt in a graph, by the names of their arguments: who reads, writes or rewrites one goes
through these, and nobody else counts positions.

    call = OpCall.of(node)               call["length"], call["layout"]
    call.of_half(operators.gather_start.default, number=0).insert(graph)

    call = AttentionCall.of(node)        call.mask_term.score, call.pattern, ...
    call.replace(pattern="causal", mask="").write(node)

`OpCall` is of any operator. The others are its arguments with their types, where a class says more than the schema:
their fields are the arguments of one operator, in the order of its schema (ringopt/ops/); the backward of an operator
has them too, among others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.fx as fx

from ringopt.expr.mask import Mask
from ringopt.ir.nodes import emit, origin, shape_of, value_of
from ringopt.torch_compat.schema import schema_of

C = TypeVar("C", bound="Call")
Size = Any  # int, torch.SymInt, or a node that gives one


@dataclass(frozen=True)
class OpCall:
    """Of the operator `target`. `arguments` are all of its schema, defaults included, in its order."""

    target: Any
    arguments: Mapping[str, Any]

    @classmethod
    def to(cls, target: Any, **arguments: Any) -> OpCall:
        """Raises TypeError for arguments that the operator has not, and where one is missing that has no default."""
        schema = schema_of(target).arguments
        names = [argument.name for argument in schema]
        lacking = [each.name for each in schema if each.name not in arguments and not each.has_default_value()]
        if lacking or not arguments.keys() <= set(names):
            beyond = sorted(arguments.keys() - set(names))
            raise TypeError(f"{target} takes {', '.join(names)}; without {lacking}, and with {beyond} that it has not")
        return cls(target, {each.name: arguments.get(each.name, each.default_value) for each in schema})

    @classmethod
    def of(cls, node: fx.Node) -> OpCall:
        """The call that `node` makes."""
        names = [argument.name for argument in schema_of(node.target).arguments]
        return cls.to(node.target, **dict(zip(names, node.args, strict=False)), **node.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def replace(self, **changes: Any) -> OpCall:
        """With other values of some arguments."""
        return self.to(self.target, **{**self.arguments, **changes})

    def of_half(self, target: Any, **more: Any) -> OpCall:
        """Of an operator that has arguments of this one, as its start and its finish have, and `more`."""
        names = {argument.name for argument in schema_of(target).arguments}
        return self.to(target, **{**{name: x for name, x in self.arguments.items() if name in names}, **more})

    @property
    def args(self) -> tuple[Any, ...]:
        """By position, for a new node. Defaults at the end are no arguments."""
        values = [(self.arguments[each.name], each) for each in schema_of(self.target).arguments]
        while values and values[-1][1].has_default_value() and values[-1][0] == values[-1][1].default_value:
            values.pop()
        return tuple(value for value, _argument in values)

    def write(self, node: fx.Node) -> None:
        """Has `node` called so."""
        node.target, node.args, node.kwargs = self.target, self.args, {}

    def insert(self, graph: fx.Graph, name: str | None = None) -> fx.Node:
        """A new node, of which nothing is known yet."""
        return cast(fx.Node, graph.create_node("call_function", self.target, self.args, {}, name))

    def emit(self, graph: fx.Graph, like: fx.Node) -> fx.Node:
        """A new node with its fake value, told to come from where `like` comes from."""
        return emit(graph, self.target, self.args, like)


@dataclass(frozen=True)
class Call:
    """What all of them have. `pattern` is the structure of who sees whom; weights are dropped with `dropout_p`, as
    `seed` says; `sinks` are logits that lead to no value."""

    q: fx.Node
    k: fx.Node
    v: fx.Node

    @classmethod
    def of(cls: type[C], node: fx.Node) -> C:
        """Those of `node`, also where it is a backward. KeyError for an operator that has not all of them."""
        given = OpCall.of(node)
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})

    def to(self, target: Any) -> OpCall:
        """The call of `target` with these arguments."""
        return OpCall.to(target, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def replace(self: C, **changes: Any) -> C:
        return dataclasses.replace(self, **changes)

    def write(self, node: fx.Node) -> None:
        """Has `node`, a call of the same operator, called so."""
        self.to(node.target).write(node)

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        return self.q, self.k, self.v

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of q, k and v."""
        return value_of(self.q), value_of(self.k), value_of(self.v)

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries and of keys."""
        return shape_of(self.q)[1], shape_of(self.k)[1]

    @property
    def rows(self) -> tuple[Size, Size]:
        """Of queries and of keys, as they are in the graph."""
        return shape_of(self.q)[2], shape_of(self.k)[2]


@dataclass(frozen=True)
class AttentionCall(Call):
    """`ringopt::attention`. `attn_mask` is a mask that was not read, or of a dilated pattern which keys are no padding;
    `mask` the text of one that was, over `sources`."""

    attn_mask: fx.Node | None = None
    sources: Sequence[fx.Node] = field(default_factory=list)
    sinks: fx.Node | None = None
    seed: fx.Node | None = None
    pattern: str = "full"
    mask: str = ""
    dropout_p: float = 0.0
    scale: float = field(kw_only=True)

    @property
    def mask_term(self) -> Mask:
        return Mask.parse(self.mask)

    def emit(self, graph: fx.Graph, like: fx.Node) -> fx.Node:
        """A new node, told to come from where `like` comes from. It is not run for its value: what it computes on one
        device depends on the length."""
        new = self.to(torch.ops.ringopt.attention.default).insert(graph, "attention")
        q, _k, v = self.values
        new.meta = {**origin(like), "val": q.new_empty((*q.shape[:3], v.shape[3]))}
        return new


@dataclass(frozen=True)
class Sdpa:
    """The arguments of scaled_dot_product_attention, however they were given."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(cls, node: fx.Node) -> Sdpa:
        names = [argument.name for argument in schema_of(node.target).arguments]
        return cls(**dict(zip(names, node.args)), **node.kwargs)  # noqa: B905


@dataclass(frozen=True)
class FlexOpCall(Call):
    """`ringopt::flex`, flex_attention while it is being read: `scores` is what it makes of `product`, q @ k.mT."""

    product: fx.Node
    scores: fx.Node

    @property
    def sizes(self) -> dict[str, Size]:
        """Of the axes of the scores."""
        return dict(zip("bhqk", shape_of(self.product), strict=True))


@dataclass(frozen=True)
class RingCall(Call):
    """`ringopt::ring_attention` and its backward; what each says: ops/ring.py, Config."""

    sources: Sequence[fx.Node]
    sinks: fx.Node | None
    seed: fx.Node | None
    q_length: Size
    kv_length: Size
    pattern: str
    mask: str
    learned: Sequence[int]
    dropout_p: float
    scale: float
    q_layout: str
    kv_layout: str
    strategy: str
    kernel: str
    group: str
    version: str
    early: str = ""
    ticket: fx.Node | None = None
    expand: str = ""
    site: str = ""
    facts: fx.Node | None = None

    @property
    def mask_term(self) -> Mask:
        return Mask.parse(self.mask)

    @property
    def lengths(self) -> tuple[Size, ...]:
        """Of the whole sequences."""
        return self.q_length, self.kv_length


@dataclass(frozen=True)
class DilatedCall(Call):
    """`ringopt::dilated_attention` and its backward; what each says: ops/dilated.py, Config. `seen` has the keys that
    are no padding."""

    seen: fx.Node | None
    sinks: fx.Node | None
    seed: fx.Node | None
    length: Size
    pattern: str
    dropout_p: float
    scale: float
    layout: str
    strategy: str
    kernel: str
    group: str
    version: str
    early: str = ""
    ticket: fx.Node | None = None
    site: str = ""

    @property
    def lengths(self) -> tuple[Size, ...]:
        """Of the whole sequence."""
        return (self.length,)


def call_over_ranks(node: fx.Node) -> RingCall | DilatedCall:
    """Of an attention over the ranks, or of its backward."""
    dilated = any(argument.name == "length" for argument in schema_of(node.target).arguments)
    return DilatedCall.of(node) if dilated else RingCall.of(node)
