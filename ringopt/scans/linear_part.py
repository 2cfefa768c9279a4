"""What a step does to one value that it carries: its linear part, read off the graph.

    S' = g * S + k.mT @ (v - k @ S)      linear:    S -> g * S + k.mT @ -(k @ S)
    m' = max(m - w, k)                   max-plus:  m -> m - w          (max is its sum, + its product)

The linear part is the same graph without the addends that the value is no part of. An operator that is not known to be
linear in it is a refusal: what stands in no table here is never taken for affine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims import op_families as families
from ringopt.ir.nodes import argument, is_tensor, named, op_name, outputs_of, shape_of, tensor_args, value_of
from ringopt.scans.body import placeholders
from ringopt.torch_compat.operators import TO_COPY

aten = torch.ops.aten

# Take nothing from their operand but its sizes and its dtype.
SHAPE_ONLY = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "sym_size"}
)


class NotAffine(Exception):
    """An operator of the step is not affine in the value; `node` is its node."""

    def __init__(self, sentence: str, node: fx.Node):
        self.node = node
        super().__init__(sentence)


def read(node: fx.Node) -> list[fx.Node]:
    """The operands whose numbers the value of a node is made of."""
    if node.op != "call_function" or op_name(node) in SHAPE_ONLY:
        return []
    return [node.args[0]] if op_name(node) in families.CASTS else list(node.all_input_nodes)


class LinearPart:
    """Builds the linear part of `step`, whose first input is the value and whose first output is the new one; its other
    inputs and outputs stay as they are."""

    def __init__(self, step: fx.GraphModule):
        self.step, self.graph = step, fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.state = placeholders(step)[0]
        self.dependent = {self.state}
        for node in step.graph.nodes:
            if any(arg in self.dependent for arg in read(node)):
                self.dependent.add(node)

    def by(self, rules: dict[str, PartRule]) -> fx.GraphModule:
        """The step by these rules. Raises NotAffine."""
        for node in self.step.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder" or node not in self.dependent:
                self.values[node] = self.copy(node)
                continue
            rule = rules.get(op_name(node))
            if rule is None:
                raise NotAffine(f"{op_name(node)} of what a step carries", node)
            self.values[node] = made = rule(self, node)
            made.meta["val"] = value_of(node)
        first, *others = outputs_of(self.step.graph)
        new = self.values[first] if first in self.dependent else self.zeros(self.values[self.state])
        self.graph.output((new, *(self.values[other] for other in others)))
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.step, self.graph)

    def on(self, node: fx.Node) -> list[fx.Node]:
        """Its operands that the value is part of."""
        return [arg for arg in tensor_args(node) if arg in self.dependent]

    def call(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        new.meta["val"] = value_of(like)
        return new

    def copy(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, lambda arg: self.values[arg])

    def zeros(self, like: fx.Node) -> fx.Node:
        return self.call(aten.zeros_like.default, like, like=like)

    def alone(self, node: fx.Node, x: fx.Node, factor: Any = 1) -> fx.Node:
        """The operand `x` of `node`, times a number, as all that is left of `node`: of its shape and dtype."""
        found = self.values[x]
        if factor != 1:
            found = self.call(aten.mul.Scalar, found, factor, like=x)
        if value_of(x).dtype != value_of(node).dtype:
            found = self.graph.call_function(TO_COPY, (found,), {"dtype": value_of(node).dtype})
            found.meta["val"] = value_of(x).new_empty(value_of(x).shape, dtype=value_of(node).dtype)
        if shape_of(x) != shape_of(node):
            found = self.call(aten.expand.default, found, list(shape_of(node)), like=node)
        return found


PartRule = Callable[[LinearPart, fx.Node], fx.Node]


# ---- linear ----------------------------------------------------------------------------------------------------------
def kept(part: LinearPart, node: fx.Node) -> fx.Node:
    """Linear in its operands together."""
    return part.copy(node)


def cast(part: LinearPart, node: fx.Node) -> fx.Node:
    """To another dtype that has room for fractions."""
    if not value_of(node).is_floating_point():
        raise NotAffine(f"a cast to {value_of(node).dtype} of what a step carries", node)
    return part.copy(node)


def in_one(part: LinearPart, node: fx.Node) -> fx.Node:
    """Linear in each operand, as long as the value is part of one only."""
    if len(part.on(node)) > 1:
        raise NotAffine(f"{op_name(node)} of two operands that both hold what a step carries", node)
    return part.copy(node)


def quotient(part: LinearPart, node: fx.Node) -> fx.Node:
    """By something that the value is no part of."""
    if part.on(node) != [node.args[0]] or node.kwargs.get("rounding_mode") is not None:
        raise NotAffine("a division that is not by a number that the step knows without what it carries", node)
    return part.copy(node)


def joined(part: LinearPart, node: fx.Node) -> fx.Node:
    """cat, stack: zeros in the place of what the value is no part of."""
    parts = [part.values[x] if x in part.dependent else part.zeros(part.values[x]) for x in node.args[0]]
    return part.call(node.target, parts, *node.args[1:], like=node, **node.kwargs)


def difference(part: LinearPart, node: fx.Node) -> fx.Node:
    """add, sub, rsub: the addends that the value is part of."""
    on, (first, second) = part.on(node), node.args[:2]
    if len(on) == 2:
        return part.copy(node)
    alpha, reverse = argument(node, 2, "alpha", 1), op_name(node) == "rsub"
    is_second = on[0] is second
    negative = op_name(node) == "sub" if is_second else reverse
    scaled = is_second != reverse
    assert on[0] in (first, second)
    return part.alone(node, on[0], (alpha if scaled else 1) * (-1 if negative else 1))


def product_and_sum(part: LinearPart, node: fx.Node) -> fx.Node:
    """addmm, baddbmm: beta * x + alpha * a @ b."""
    x, a, b = node.args[:3]
    held = [arg in part.dependent for arg in (x, a, b)]
    if held[1] and held[2]:
        raise NotAffine(f"{op_name(node)} of two factors that both hold what a step carries", node)
    if held[0] and (held[1] or held[2]):
        return part.copy(node)
    if held[0]:
        return part.alone(node, x, named(node, "beta"))
    product = part.call(aten.matmul.default, part.values[a], part.values[b], like=node)
    alpha = named(node, "alpha")
    return product if alpha == 1 else part.call(aten.mul.Scalar, product, alpha, like=node)


def layer(part: LinearPart, node: fx.Node) -> fx.Node:
    """linear: without its bias, unless that too is made of the value."""
    x, weight, bias = (*node.args, None)[:3]
    if x in part.dependent and weight in part.dependent:
        raise NotAffine("linear of two operands that both hold what a step carries", node)
    if bias in part.dependent and (x in part.dependent or weight in part.dependent):
        return part.copy(node)
    if bias in part.dependent:
        return part.alone(node, bias)
    return part.call(aten.linear.default, part.values[x], part.values[weight], like=node)


def choice(part: LinearPart, node: fx.Node) -> fx.Node:
    """where: 0 in the place of what the value is no part of."""
    condition, *both = node.args
    if condition in part.dependent:
        raise NotAffine("a choice by what a step carries", node)

    def side(x: Any) -> fx.Node:
        if x in part.dependent:
            return part.alone(node, x)
        zero = part.graph.call_function(aten.full.default, ([], 0), {"dtype": value_of(node).dtype})
        zero.meta["val"] = value_of(node).new_empty(())
        return zero

    return part.call(aten.where.self, part.values[condition], side(both[0]), side(both[1]), like=node)


def masked(part: LinearPart, node: fx.Node) -> fx.Node:
    """masked_fill: 0 in the place of the number."""
    x, mask, value = node.args
    if mask in part.dependent or value in part.dependent:
        raise NotAffine("masked_fill by what a step carries", node)
    return part.call(aten.masked_fill.Scalar, part.values[x], part.values[mask], 0, like=node)


VIEWS = (
    *families.RESHAPES, *families.PERMUTATIONS, *families.SLICES, *families.COPIES, "expand", "unsqueeze",
    "select", "diagonal",
)  # fmt: skip
LINEAR: dict[str, PartRule] = {
    **dict.fromkeys((*VIEWS, "neg", "sum", "mean", "flip"), kept),
    **dict.fromkeys(families.CASTS, cast),
    **dict.fromkeys(("mul", *families.MATRIX_PRODUCTS, "mv", "einsum"), in_one),
    **dict.fromkeys(("add", "sub", "rsub"), difference),
    **dict.fromkeys(("addmm", "baddbmm"), product_and_sum),
    **dict.fromkeys(("cat", "stack"), joined),
    "div": quotient,
    "linear": layer,
    "where": choice,
    "masked_fill": masked,
}


# ---- max-plus --------------------------------------------------------------------------------------------------------
def shifted(part: LinearPart, node: fx.Node) -> fx.Node:
    """add, sub: something that the step knows is added to the value."""
    first = part.on(node) == [node.args[0]]
    if not first and (op_name(node) != "add" or len(part.on(node)) > 1 or argument(node, 2, "alpha", 1) != 1):
        raise NotAffine(f"{op_name(node)} of what a step carries, beside a maximum", node)
    return part.copy(node)


def maximum(part: LinearPart, node: fx.Node) -> fx.Node:
    """Of the value and of something else, or of two values."""
    on = part.on(node)
    if not is_tensor(node) or len(node.args) != 2 or not isinstance(node.args[1], fx.Node):
        raise NotAffine(f"{op_name(node)} over a dim of what a step carries", node)
    return part.copy(node) if len(on) > 1 else part.alone(node, on[0])


MAX_PLUS: dict[str, PartRule] = {
    **dict.fromkeys((*families.COPIES, "expand", "unsqueeze", *families.RESHAPES), kept),
    **dict.fromkeys(families.CASTS, cast),
    **dict.fromkeys(("add", "sub"), shifted),
    **dict.fromkeys(("maximum", "max"), maximum),
}
