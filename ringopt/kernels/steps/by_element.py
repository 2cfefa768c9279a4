"""A step of a recurrence that computes each element of its state by itself, written as a kernel in Triton: all steps
are one launch, in which the state stays in registers.

    s = add(mul(s, a), b)   ->   s0 = tl.load(carries[0] + at, mask=there)
                                 for n in range(count):
                                     r0 = tl.load(rows[0] + ..., mask=there); ...
                                     x0 = s0 * r0
                                     x1 = x0 + r1
                                     tl.store(into[0] + ...); s0 = x1

Floats are computed in float32 and rounded where the step has 16 bits. A step of another kind (a matrix product, a sum)
is a Refusal, and is run operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from ringopt.ir.nodes import op_name, outputs_of, shape_of, value_of
from ringopt.ir.refusal import Refusal
from ringopt.kernels.score_program import HELPERS, OPS, NoForm, kind_of, number_text, rounded
from ringopt.kernels.steps.base import OneStep, Tensors

# Beside those of scores; gradients are made of some.
MORE = {
    "square": "{0} * {0}", "reciprocal": "1.0 / {0}", "rsqrt": "1.0 / tl.sqrt({0})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    "tanh_backward": "{0} * (1.0 - {1} * {1})", "sigmoid_backward": "{0} * {1} * (1.0 - {1})",
}  # fmt: skip
FORMS = {**{name: ways[0] for name, ways in OPS.items()}, **MORE}
SAME = frozenset(("detach", "clone", "alias", "expand", "view", "reshape", "unsqueeze", "to", "_to_copy"))
FILLS = {"zeros_like": 0.0, "ones_like": 1.0}
PREFIX = {"carry": "s", "row": "r", "const": "k"}


@dataclass(frozen=True)
class ElementKernel:
    """By the text of `steps(carries, rows, consts, into, last, count, first, order, total, sizes, at_rows, at_consts,
    BLOCK)`."""

    program: str

    @staticmethod
    def of(step: OneStep) -> ElementKernel | Refusal:
        """Of a step that computes each element of its state by itself."""
        try:
            return ElementKernel(_Writer(step).text())
        except NoForm as why:
            return Refusal(str(why))

    def run(self, carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool) -> list[Tensor]:
        from ringopt.kernels.steps.triton_steps import run_elements

        return run_elements(self.program, carried, rows, consts, into, backwards)


class _Writer:
    """Lines: `before` the steps, `lines` that compute in each, `stored` that write there and carry on."""

    def __init__(self, step: OneStep):
        self.step, self.before, self.lines, self.stored = step, list[str](), list[str](), list[str]()
        self.given = [node for node in step.graph.nodes if node.op == "placeholder"]
        self.made = outputs_of(step.graph)
        carries = [node for node, role in zip(self.given, step.inputs, strict=True) if role == "carry"]
        if not carries:
            raise NoForm("it carries nothing")
        self.shape = tuple(shape_of(carries[0]))
        for node in (*carries, *self.made):
            if tuple(shape_of(node)) != self.shape:
                raise NoForm(f"it gives {list(shape_of(node))} beside a state of {list(self.shape)}")
        self.names = dict[fx.Node, str]()

    def text(self) -> str:
        """Of the kernel."""
        inside = self.inputs()
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self.names[node] = self.call(node)
        behind = self.results()
        head = ["at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)", "there = at < total", "rest = at"]
        for dim in reversed(range(len(self.shape))):
            head += [f"i{dim} = rest % sizes[{dim}]", f"rest = rest // sizes[{dim}]"]
        head += [*self.before, "for n in range(count):", "    t = tl.cast(first + n * order, tl.int64)"]
        body = [f"    {line}" for line in (*inside, *self.lines, *self.stored)]
        return SIGNATURE + "".join(f"    {line}\n" for line in (*head, *body, *behind))

    def inputs(self) -> list[str]:
        """What is read in each step; what is read once goes before."""
        inside, numbers = list[str](), {"carry": 0, "row": 0, "const": 0}
        for node, role in zip(self.given, self.step.inputs, strict=True):
            self.fits(node)
            number = numbers[role]
            numbers[role] += 1
            dtype = value_of(node).dtype
            name, apart = f"{PREFIX[role]}{number}", f"at_{role}s[{number}]"
            if role == "carry":
                value = rounded(f"tl.load(carries[{number}] + at, mask=there, other=0)", dtype)
                self.before.append(f"{name} = {value}")
            else:
                first = 1 if role == "row" else 0
                steps = [f"i{dim} * {apart}[{dim + first}]" for dim in range(len(self.shape))]
                place = " + ".join([*(["t * " + apart + "[0]"] if role == "row" else []), *steps]) or "at * 0"
                line = f"{name} = {rounded(f'tl.load({role}s[{number}] + ({place}), mask=there, other=0)', dtype)}"
                (inside if role == "row" else self.before).append(line)
            self.names[node] = name
        return inside

    def fits(self, node: fx.Node) -> None:
        """Raises NoForm for a value that is no broadcast one of the state's elements."""
        if not isinstance(value_of(node), Tensor):
            raise NoForm(f"{op_name(node)} gives several values")
        sizes = tuple(shape_of(node))
        behind = self.shape[len(self.shape) - len(sizes) :] if len(sizes) <= len(self.shape) else ()
        if len(behind) != len(sizes) or any(size not in (1, of) for size, of in zip(sizes, behind, strict=True)):
            raise NoForm(f"{node} is {list(sizes)}, and the state {list(self.shape)}")
        kind_of(value_of(node).dtype)

    def call(self, node: fx.Node) -> str:
        """A line, and the name of its value."""
        self.fits(node)
        name = op_name(node)
        if name in SAME:
            if name != "expand" and stripped(node.args[0]) != stripped(node):
                raise NoForm(f"{name} moves elements")
            value = self.names[node.args[0]]
        elif name in FILLS:
            value = repr(FILLS[name])
        else:
            value = value_text(node, self.names.__getitem__)
        made = f"x{len(self.lines)}"
        self.lines.append(f"{made} = {rounded(value, value_of(node).dtype)}")
        return made

    def results(self) -> list[str]:
        """What is written behind the last step."""
        behind, carried, number = list[str](), list[tuple[str, str]](), 0
        for place, (node, role) in enumerate(zip(self.made, self.step.outputs, strict=True)):
            value = self.names[node]
            if role == "sum":
                self.before.append(f"a{place} = tl.zeros([BLOCK], tl.float32)")
                self.stored.append(f"a{place} += {value}")
                at = f"into[{place}] + at"
                behind.append(f"tl.store({at}, tl.load({at}, mask=there) + a{place}, mask=there)")
            elif role == "row":
                self.stored.append(self.store(place, "t", value))
            else:
                if self.step.keeps:  # behind the one that is given: in front of it, backwards
                    self.stored.append(self.store(place, "(t + (order + 1) // 2)", value))
                carried.append((f"s{number}", value))
                number += 1
        self.stored += [f"n{name} = {value}" for name, value in carried]
        self.stored += [f"{name} = n{name}" for name, _ in carried]
        return [*behind, *(f"tl.store(last[{at}] + at, {name}, mask=there)" for at, (name, _) in enumerate(carried))]

    @staticmethod
    def store(place: int, row: str, value: str) -> str:
        return f"tl.store(into[{place}] + {row} * total + at, {value}, mask=there)"


def value_text(node: fx.Node, name_of: Callable[[fx.Node], str]) -> str:
    """What is computed element by element, of operands by their names. Raises NoForm for anything else."""
    name, args = op_name(node), list(node.args)
    if (name, args[1:]) == ("pow", [2]):
        name, args = "square", args[:1]
    if name not in FORMS or node.kwargs or any(isinstance(arg, (list, tuple)) for arg in args):
        raise NoForm(f"{name} has no form in Triton for an element by itself")
    operands = [name_of(arg) if isinstance(arg, fx.Node) else number_text(arg) for arg in args]
    if f"{{{len(operands) - 1}}}" not in FORMS[name] or f"{{{len(operands)}}}" in FORMS[name]:
        raise NoForm(f"{name} of {len(operands)} has no form in Triton")
    return FORMS[name].format(*operands)


def stripped(node: fx.Node) -> list[Any]:
    """Its sizes without ones in front."""
    sizes: Sequence[Any] = shape_of(node)
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return list(sizes[first:])


SIGNATURE = (
    HELPERS
    + """@triton.jit
def steps(
    carries, rows, consts, into, last, count, first, order, total, sizes, at_rows, at_consts, BLOCK: tl.constexpr
):
"""
)
