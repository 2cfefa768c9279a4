"""`verify="nodes"`: the sharded graph run op by op beside the graph that the passes were given, value for value.

    %h = linear(%x, %w)   in the program     f32[1, 64, 8]
    %h                    on this rank       f32[1, 16, 8]  S(1): held against its rows of the value above
    the gradient of %h                       likewise, of random cotangents of the outputs

Which node has which value is no guess: passes hand on what a node is the value of (`node.meta`), from the captured
graph to the sharded one. What stands between (a rank's part of a sum, a message) has no counterpart and is not
compared, but the first value that is made of it is. The first difference is that of a node whose operands agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.compare.hooked_graph import LEAST, Hooked, cotangent, run_backward
from ringopt.compare.node_values import SteppedGraph
from ringopt.distributed.mesh import Mesh
from ringopt.ir.nodes import module_path, op_name, source_line
from ringopt.ir.placement import Sharded, Spread
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.runtime.verify import ROUNDINGS, GivenLeaves, relative_distance
from ringopt.tensor.lazy import cut

GRADIENT_OF = "the gradient of %"


@dataclass(frozen=True)
class Form:
    """What a node of the sharded graph is: the value of the node `original`, placed so. `alone`: no other node computes
    the same value, so its gradient is that of the value; else it is a part of it."""

    original: str
    placement: Sharded | None
    layout: str
    alone: bool


@dataclass(frozen=True)
class Counterparts:
    """A graph as the passes were given it (`whole`), and what they made of it; `forms` by the names of its nodes."""

    whole: fx.GraphModule
    sharded: fx.GraphModule
    forms: Mapping[str, Form]


@dataclass(frozen=True)
class FirstOff:
    """The first node that differs, and by how much of its largest element, on which rank."""

    node: fx.Node
    form: Form
    gradient: bool
    error: float
    rank: int
    allowed: float

    def __str__(self) -> str:
        what = f"the gradient of %{self.node.name}" if self.gradient else f"%{self.node.name}"
        made_by = self.node.args[0] if op_name(self.node) == "getitem" else self.node
        op = op_name(made_by) if isinstance(made_by, fx.Node) else ""
        places = [at for at in (module_path(self.node), source_line(self.node)) if at]
        placed = f"placed {self.form.placement}" if self.form.placement is not None else "on every rank"
        much = "in size or by NaN" if self.error == inf else f"by {self.error:.1e} of its largest element"
        where = f" ({', '.join(places)})" if places else ""
        return f"{what} = {op}{where}, {placed}, {much} on rank {self.rank} (allowed: {self.allowed:.0e})"


@dataclass
class Values:
    """Of one run: values and gradients of nodes, by name."""

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """What the largest element of a gradient counts as at least."""
        return LEAST * max((float(x.abs().max()) for x in self.gradients.values() if x.numel()), default=0.0)


class Steps(Hooked):
    """A graph run with the inputs of a check."""

    def through(self, inputs: GivenLeaves, rows: Mapping[int, Spread]) -> None:
        """Forward, and backward from random cotangents; `rows` has outputs that are this rank's rows."""
        outputs = self.forward(inputs.given)
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        wanted = [x for x in inputs.leaves if isinstance(x, Tensor) and x.requires_grad]
        given = [(i, x) for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if not wanted or not given or not torch.is_grad_enabled():
            return
        like = [cut(rows[i], cotangent(rows[i].size, x)) if i in rows else cotangent(x.shape, x) for i, x in given]
        run_backward([x for _, x in given], wanted, like)


@dataclass(frozen=True)
class NodeCheck:
    """`rows`: outputs that are left on their ranks; `averaged`: inputs whose gradients are left to a wrapper; `taken`:
    inputs of which a rank takes its rows."""

    pairs: Counterparts
    mesh: Mesh
    rows: Mapping[int, Spread] = field(default_factory=dict)
    averaged: Collection[int] = ()
    taken: Collection[int] = ()

    def first_off(
        self, whole: Callable[[float], GivenLeaves], own: Callable[[], GivenLeaves], bound: float, eps: float
    ) -> tuple[FirstOff | None, int]:
        """The first node that is off, the same on all ranks, and how many were compared. `whole` and `own` make inputs
        of the two graphs, the first with numbers rounded anew to so much of each; `bound` is what dtypes allow."""
        expected = self.expected(whole(0.0))
        apart = self.over_ranks(self.compared(self.pairs.sharded, own(), expected))
        allowed = dict.fromkeys(apart, bound)
        if any(not error <= bound for error, _rank in apart.values()):
            rounded = self.rounded(whole(eps), expected)
            allowed = {name: max(bound, ROUNDINGS * rounded.get(self.original_of(name), 0.0)) for name in apart}
        nodes = {node.name: node for node in self.pairs.sharded.graph.nodes}
        for label, (error, rank) in apart.items():
            if not error <= allowed[label]:
                name, gradient = label.removeprefix(GRADIENT_OF), label.startswith(GRADIENT_OF)
                return FirstOff(nodes[name], self.pairs.forms[name], gradient, error, rank, allowed[label]), len(apart)
        return None, len(apart)

    def original_of(self, label: str) -> str:
        prefix = GRADIENT_OF if label.startswith(GRADIENT_OF) else ""
        return prefix + self.pairs.forms[label.removeprefix(GRADIENT_OF)].original

    def expected(self, inputs: GivenLeaves) -> Values:
        """Of the whole graph: the nodes that have a counterpart."""
        kept, found = {form.original for form in self.pairs.forms.values()}, Values()
        copied = SteppedGraph(self.pairs.whole).writes

        def seen(node: fx.Node, value: Any) -> None:
            if node.name in kept and isinstance(value, Tensor):
                found.values[node.name] = value.clone() if copied else value

        def learned(node: fx.Node, gradient: Tensor) -> None:
            if node.name in kept:
                found.gradients[node.name] = gradient.detach()

        Steps(self.pairs.whole, seen, learned).through(inputs, {})
        return found

    def compared(self, gm: fx.GraphModule, inputs: GivenLeaves, expected: Values) -> dict[str, float]:
        """How far each node of the sharded graph is off: values as they come, then gradients as they come."""
        forms, placeholders = self.pairs.forms, gm.graph.find_nodes(op="placeholder")
        left_out = {placeholders[i].name for i in self.averaged}
        values, least = dict[str, float](), expected.least
        # In the order of the backward. One that never comes is of a value whose gradient is zero, or is missing.
        last_first = [node.name for node in gm.graph.nodes][::-1]
        alone = [name for name in last_first if name in forms and forms[name].alone and name not in left_out]
        gradients = {name: inf for name in alone if forms[name].original in expected.gradients}

        def seen(node: fx.Node, value: Any) -> None:
            form = forms.get(node.name)
            if form is not None and form.original in expected.values:
                values[node.name] = self.apart(value, expected.values[form.original], form, 0.0)

        def learned(node: fx.Node, gradient: Tensor) -> None:
            came.add(node.name)
            if node.name in gradients:
                form = forms[node.name]
                gradients[node.name] = self.apart(gradient.detach(), expected.gradients[form.original], form, least)

        came = set[str]()
        Steps(gm, seen, learned).through(inputs, self.rows)
        for name in gradients.keys() - came:
            gradients[name] = inf if bool(expected.gradients[forms[name].original].any()) else 0.0
        return values | {f"{GRADIENT_OF}{name}": error for name, error in gradients.items()}

    def apart(self, value: Any, whole: Tensor, form: Form, least: float) -> float:
        """Of this rank's value and its part of the whole one."""
        if form.placement is not None:
            whole = self.part(whole, form.placement, form.layout)
        return relative_distance(value, whole.detach(), least)

    def part(self, whole: Tensor, at: Sharded, layout: str) -> Tensor:
        """This rank's rows of a value."""
        fixed = Sharded(at.dim, at_hand(at.outer), at_hand(at.length), at_hand(at.inner))
        with torch.no_grad():
            return cut(Spread(fixed, layout, self.mesh.name, tuple(whole.shape), whole.stride(), ""), whole.detach())

    def rounded(self, inputs: GivenLeaves, expected: Values) -> dict[str, float]:
        """How far rounding the inputs anew moves each node of the whole graph."""
        found, least = dict[str, float](), expected.least

        def seen(node: fx.Node, value: Any) -> None:
            if isinstance(value, Tensor) and node.name in expected.values:
                found[node.name] = relative_distance(value, expected.values[node.name], 0.0)

        def learned(node: fx.Node, gradient: Tensor) -> None:
            if node.name in expected.gradients:
                right = expected.gradients[node.name]
                found[f"{GRADIENT_OF}{node.name}"] = relative_distance(gradient.detach(), right, least)

        Steps(self.pairs.whole, seen, learned).through(inputs, {})
        return found

    def over_ranks(self, errors: Mapping[str, float]) -> dict[str, tuple[float, int]]:
        """The largest error of each node, and the rank that has it, in the order of the first rank."""
        mine = torch.tensor([*errors.values(), 0.0], dtype=torch.float64, device=self.mesh.device)
        largest = torch.stack(self.mesh.all_gather(mine, "verify nodes")).max(0)
        found = zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
        return dict(zip(errors, found, strict=False))
