"""A step in complex numbers as one in real numbers, in which each complex value is a pair along a last dim of 2.

    s' = a * s + x      ->      re = a.re * s.re - a.im * s.im + x.re
                                im = a.re * s.im + a.im * s.re + x.im        s' = stack([re, im], -1)

What is affine in complex numbers is affine in their parts, so the proof, the maps of segments, the kernels and the
gradients know real numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ringopt.dims import op_families as families
from ringopt.ir.nodes import argument, is_tensor, op_name, outputs_of, shape_of, value_of
from ringopt.scans.body import NoBody, placeholders, to_text
from ringopt.scans.trace import Kinds, OperandKind, sized
from ringopt.torch_compat.operators import TO_COPY

aten = torch.ops.aten

EACH_PART = (*families.RESHAPES, *families.PERMUTATIONS, *families.SLICES, *families.COPIES, "expand", "unsqueeze",
             "select", "sum", "mean", "neg")  # fmt: skip


class Pair(NamedTuple):
    """The parts of a complex value; a real operand has no imaginary part."""

    re: Any
    im: Any = None


def is_complex(node: Any) -> bool:
    """Whether a value is a tensor of complex numbers."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex()


def has_complex(graph: fx.Graph) -> bool:
    """Whether a step computes with them."""
    return any(is_complex(node) for node in graph.nodes)


def in_real_numbers(text: str, kinds: Kinds) -> tuple[str, Kinds]:
    """The body `text` on operands of such kinds, and what they are then. Raises NoBody."""
    body = sized(text, kinds)
    if not has_complex(body.module.graph):
        return text, kinds
    real = real_step(body.module)
    return to_text(real, body.carries, body.xs, body.consts), tuple(
        OperandKind.of(value_of(node)) for node in placeholders(real)
    )


def real_step(step: fx.GraphModule) -> fx.GraphModule:
    """The step on pairs; its nodes have fake values. Raises NoBody for an operator whose parts are not known here."""
    real = RealStep()
    for node in step.graph.nodes:
        if node.op == "placeholder":
            real.take(node)
        elif node.op != "output":
            real.add(node)
    real.graph.output(tuple(real.joined(out) for out in outputs_of(step.graph)))
    return fx.GraphModule(torch.nn.Module(), real.graph)


class RealStep:
    """The graph that is built. `made` has a Pair for a complex value, and a node for a real one."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}

    def take(self, node: fx.Node) -> None:
        new, value = self.graph.placeholder(node.name), value_of(node)
        new.meta["val"], self.made[node] = value, new
        if is_complex(node):
            new.meta["val"] = OperandKind.of(value).in_pairs().without_numbers()
            self.made[node] = Pair(*(self.call(aten.select.int, new, -1, part) for part in (0, 1)))

    def add(self, node: fx.Node) -> None:
        if not is_complex(node) and not any(map(is_complex, node.all_input_nodes)):
            self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
            return
        rule = RULES.get(op_name(node))
        if rule is None:
            raise NoBody(f"{op_name(node)} of complex numbers", node)
        found = rule(self, node)
        self.made[node] = self.whole(found, node) if is_complex(node) else found

    def whole(self, found: Pair, node: fx.Node) -> Pair:
        """With an imaginary part, and both parts of the shape of `node`, which one operand alone may have given."""
        im, how = found.im, {"dtype": value_of(node).dtype.to_real()}
        if not isinstance(im, fx.Node):
            im = self.call(aten.full_like.default, found.re, im or 0, **how)
        given = [x for x in node.args[:3] if is_tensor(x)]
        if op_name(node) in ("add", "sub", "rsub", "where") and any(shape_of(x) != shape_of(node) for x in given):
            return Pair(*(self.call(aten.expand.default, part, list(shape_of(node))) for part in (found.re, im)))
        return Pair(found.re, im)

    def joined(self, node: fx.Node) -> fx.Node:
        """An output."""
        found = self.made[node]
        return self.call(aten.stack.default, list(found), -1) if isinstance(found, Pair) else found

    def parts(self, x: Any) -> Pair:
        """Of an operand: a tensor or a number."""
        if isinstance(x, fx.Node):
            found = self.made[x]
            return found if isinstance(found, Pair) else Pair(found)
        return Pair(x.real, x.imag) if isinstance(x, complex) else Pair(x)

    # ---- arithmetic of parts, where None is 0 ------------------------------------------------------------------------
    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def times(self, x: Any, y: Any) -> Any:
        if x is None or y is None:
            return None
        if not isinstance(x, fx.Node):
            x, y = y, x
        return self.call(aten.mul.Tensor, x, y) if isinstance(x, fx.Node) else x * y

    def plus(self, x: Any, y: Any, sign: int = 1) -> Any:
        if y is None:
            return x
        if x is None:
            return self.times(y, sign) if sign != 1 else y
        if not isinstance(x, fx.Node) and not isinstance(y, fx.Node):
            return x + sign * y
        if not isinstance(x, fx.Node):
            x, y, sign = self.times(y, sign), x, 1
        return self.call(aten.add.Tensor if sign == 1 else aten.sub.Tensor, x, y)

    def product(self, x: Pair, y: Pair, by: Callable[[Any, Any], Any]) -> Pair:
        """(a + bi)(c + di), where `by` multiplies parts."""
        return Pair(self.plus(by(x.re, y.re), by(x.im, y.im), -1), self.plus(by(x.re, y.im), by(x.im, y.re)))


Rule = Callable[[RealStep, fx.Node], Any]


def each_part(step: RealStep, node: fx.Node) -> Pair:
    """The operator on both parts."""
    if node.kwargs.get("dtype") is not None:
        raise NoBody(f"{op_name(node)} of complex numbers with a dtype", node)
    return Pair(*(step.call(node.target, part, *node.args[1:], **node.kwargs) for part in step.parts(node.args[0])))


def product(step: RealStep, node: fx.Node) -> Pair:
    """Of two operands, by elements."""
    return step.product(step.parts(node.args[0]), step.parts(node.args[1]), step.times)


def matrix_product(step: RealStep, node: fx.Node) -> Pair:
    """Of two operands, with sums."""
    x, y = map(step.parts, node.args[:2])
    return step.product(x, y, lambda a, b: None if a is None or b is None else step.call(node.target, a, b))


def einsum(step: RealStep, node: fx.Node) -> Pair:
    """Of two operands."""
    equation, operands = node.args[:2]
    if len(operands) != 2:
        raise NoBody(f"einsum of {len(operands)} operands of complex numbers", node)
    x, y = map(step.parts, operands)
    return step.product(x, y, lambda a, b: None if a is None or b is None else step.call(node.target, equation, [a, b]))


def total(step: RealStep, node: fx.Node) -> Pair:
    """add, sub, rsub."""
    first, second = map(step.parts, node.args[:2])
    if op_name(node) == "rsub":
        first, second = second, first
    alpha, sign = argument(node, 2, "alpha", 1), 1 if op_name(node) == "add" else -1
    if alpha != 1:
        second = step.product(second, step.parts(alpha), step.times)
    return Pair(*(step.plus(x, y, sign) for x, y in zip(first, second, strict=True)))


def quotient(step: RealStep, node: fx.Node) -> Pair:
    """By something real."""
    x, y = map(step.parts, node.args[:2])
    if y.im is not None or node.kwargs:
        raise NoBody("a division by complex numbers", node)
    return Pair(*(None if part is None else step.call(aten.div.Tensor, part, y.re) for part in x))


def conjugate(step: RealStep, node: fx.Node) -> Pair:
    """With the other sign of the imaginary part."""
    x = step.parts(node.args[0])
    return Pair(x.re, step.call(aten.neg.default, x.im))


def unchanged(step: RealStep, node: fx.Node) -> Pair:
    """What was only written down."""
    return step.parts(node.args[0])


def exponential(step: RealStep, node: fx.Node) -> Pair:
    """A rotation."""
    x = step.parts(node.args[0])
    size = step.call(aten.exp.default, x.re)
    return Pair(*(step.times(size, step.call(f, x.im)) for f in (aten.cos.default, aten.sin.default)))


def cast(step: RealStep, node: fx.Node) -> Pair:
    """To other complex numbers, or from real ones."""
    if not is_complex(node):
        raise NoBody("a cast of complex numbers to real ones", node)
    how = {"dtype": value_of(node).dtype.to_real()}
    return Pair(*(None if part is None else step.call(TO_COPY, part, **how) for part in step.parts(node.args[0])))


def choice(step: RealStep, node: fx.Node) -> Pair:
    """where."""
    condition, *both = node.args
    first, second = (step.parts(x) for x in both)
    return Pair(*(_chosen(step, step.made[condition], x, y) for x, y in zip(first, second, strict=True)))


def _chosen(step: RealStep, condition: fx.Node, x: Any, y: Any) -> Any:
    if x is None and y is None:
        return None
    x, y = (0.0 if part is None else part for part in (x, y))
    kinds = {(True, True): "self", (False, True): "ScalarSelf", (True, False): "ScalarOther", (False, False): "Scalar"}
    return step.call(getattr(aten.where, kinds[isinstance(x, fx.Node), isinstance(y, fx.Node)]), condition, x, y)


def from_parts(step: RealStep, node: fx.Node) -> Pair:
    """complex(re, im)."""
    return Pair(*(step.made[x] for x in node.args))


def paired(step: RealStep, node: fx.Node) -> Pair:
    """view_as_complex."""
    x = step.made[node.args[0]]
    return Pair(*(step.call(aten.select.int, x, -1, part) for part in (0, 1)))


RULES: dict[str, Rule] = {
    **dict.fromkeys(EACH_PART, each_part),
    **dict.fromkeys(families.MATRIX_PRODUCTS, matrix_product),
    **dict.fromkeys(("add", "sub", "rsub"), total),
    **dict.fromkeys(families.CASTS, cast),
    **dict.fromkeys(("conj", "_conj", "conj_physical"), conjugate),
    "resolve_conj": unchanged,
    "mul": product,
    "div": quotient,
    "einsum": einsum,
    "exp": exponential,
    "where": choice,
    "complex": from_parts,
    "view_as_complex": paired,
    "real": lambda step, node: step.parts(node.args[0]).re,
    "imag": lambda step, node: step.parts(node.args[0]).im,
    "view_as_real": lambda step, node: step.joined(node.args[0]),
}
