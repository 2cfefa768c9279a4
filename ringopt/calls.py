"""Calls of the attention operators in a graph, by the names of their arguments: who reads or rewrites one goes through
these, and nobody else counts positions.

    call = AttentionCall.of(node)        call.mask_term.score, call.pattern, ...
    call.replace(pattern="causal", mask="").write(node)

The fields of each are the arguments of its operator, in the order of its schema (ringopt/ops/); the backward of an
operator, and what starts its exchange early, have them too, among others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.fx as fx

from ringopt.expr.mask import Mask
from ringopt.ir.nodes import origin, shape_of, value_of
from ringopt.torch_compat.schema import schema_of

C = TypeVar("C", bound="Call")
Size = Any  # int, torch.SymInt, or a node that gives one


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
        schema = schema_of(node.target).arguments
        given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
        defaults = {argument.name: argument.default_value for argument in schema}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: given[name] if name in given else defaults[name] for name in names})

    @property
    def args(self) -> tuple[Any, ...]:
        """By position, for a new node. Defaults at the end are no arguments."""
        fields = dataclasses.fields(self)
        values = [(getattr(self, field.name), field.default) for field in fields]
        while values and values[-1][0] == values[-1][1]:
            values.pop()
        return tuple(value for value, _default in values)

    def replace(self: C, **changes: Any) -> C:
        return dataclasses.replace(self, **changes)

    def write(self, node: fx.Node) -> None:
        """Has `node`, a call of the same operator, called so."""
        node.args, node.kwargs = self.args, {}

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
        new = graph.create_node("call_function", torch.ops.ringopt.attention.default, self.args, {}, "attention")
        q, _k, v = self.values
        new.meta = {**origin(like), "val": q.new_empty((*q.shape[:3], v.shape[3]))}
        return new


@dataclass(frozen=True)
class FlexCall(Call):
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

    @property
    def mask_term(self) -> Mask:
        return Mask.parse(self.mask)


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
