"""What a program asserts of its data, asked behind its graph.

    assert lengths.max().item() <= n      ->      outputs + [lengths.max() <= n]     # and held after the call
    assert mask.any()                     ->      outputs + [mask.any() != 0]
    if mask.all(): raise ValueError("")   ->      outputs + [mask.all() == 0]
    torch.arange(lengths.max())           ->      torch.arange(n), outputs + [lengths.max() == n]

Passes keep what outputs are made of, and drop assertions: so the conditions become outputs, of which every rank has the
whole, and a call raises where one of them does not hold, on all ranks alike. A number that is read for an assertion
alone is compared as the tensor it is an element of, so that no trace has to know it. (How many numbers `arange` gives
is known where the rest of the program needs as many: Dynamo asserts it.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.expr.terms import INTEGERS
from ringopt.frontend.data_sizes.fake_values import OPEN, fake_value, is_unknown
from ringopt.ir.nodes import origin
from ringopt.ir.symbolic_sizes import plain, same
from ringopt.torch_compat.dynamo import COMPARISONS
from ringopt.torch_compat.dynamo_branches import ERRORS, decides, raises
from ringopt.torch_compat.operators import ASSERT_SCALAR, ASSERT_TENSOR

MEANT_ALIKE = (  # of a number and of the tensor that it is the element of
    *COMPARISONS, operator.add, operator.sub, operator.mul,
)  # fmt: skip
COUNTED = ("start", "end", "step")
UNNAMED = "an assertion of the program"


@dataclass(frozen=True)
class Assertion:
    """What a call says where it does not hold, and the `error` that the program raises then; None: as torch does."""

    words: str
    error: type[Exception] | None = None


def take_assertions(gm: fx.GraphModule) -> tuple[Assertion, ...]:
    """Those in Dynamo's graph, whose conditions are its last outputs from here on. Those that sizes decide stay where
    they are."""
    nodes = list(gm.graph.nodes)
    held = [found for node in nodes if (found := taken(node) or number_taken(node)) is not None]
    if held:
        output = gm.graph.output_node()
        output.args = ((*output.args[0], *(condition for condition, _ in held)),)
        for node in reversed(gm.graph.nodes):
            if not node.users and holds_number(node):
                gm.graph.erase_node(node)
        gm.recompile()
    return tuple(assertion for _, assertion in held)


def taken(node: fx.Node) -> tuple[fx.Node, Assertion] | None:
    """The condition of an assertion, which is erased."""
    condition = node.args[0] if node.target in ASSERT_TENSOR else None
    if node.target in (ASSERT_SCALAR, raises):
        condition = as_tensor(node.args[0], node)
    if not isinstance(condition, fx.Node) or not isinstance(fake_value(condition), torch.Tensor):
        return None
    error = ERRORS[node.args[2]] if node.target is raises else None
    function = operator.eq if error is not None and node.args[1] else operator.ne  # which have no gradient
    with node.graph.inserting_before(node):
        kept = node.graph.call_function(function, (condition, 0))
    kept.meta.update(origin(node), example_value=function(fake_value(condition), 0))
    node.graph.erase_node(node)
    words = node.args[-1] if len(node.args) > 1 else UNNAMED
    return kept, Assertion(words, error)


def number_taken(node: fx.Node) -> tuple[fx.Node, Assertion] | None:
    """Of a number that is read from a tensor, where the rest of the program needs one that is known (its mask has to be
    as long as the sequence): that it is this one, which takes its place."""
    counts = node.target is torch.arange
    tensor = counted_to(node) if counts else node.args[0] if node.target == "item" else None
    value = fake_value(tensor) if isinstance(tensor, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype not in INTEGERS:
        return None
    number = number_at_hand(fake_value(node).shape[0] if counts else fake_value(node), node.graph)
    if number is None or (counts and number == 0):  # of 0, the end may be any number below
        return None
    words = f"{tensor} is not {number}, of which the program needs as many"
    with node.graph.inserting_before(node):
        condition = node.graph.call_function(operator.eq, (tensor, number))
    known = fake_value(number) if isinstance(number, fx.Node) else number
    condition.meta.update(origin(node), example_value=value == known)
    if counts:
        node.args, node.kwargs = (number,), {name: x for name, x in node.kwargs.items() if name not in COUNTED}
    for user in [] if counts else list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda x: number if x is node else x)
    return condition, Assertion(words)


def counted_to(node: fx.Node) -> Any:
    """What `torch.arange` counts to, however it is spelled; None where it does not count by 1 from 0."""
    names = COUNTED if len(node.args) > 1 or "end" in node.kwargs else ("end",)
    given = {"start": 0, "step": 1, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given["end"] if (given["start"], given["step"]) == (0, 1) else None


def number_at_hand(number: Any, graph: fx.Graph) -> int | fx.Node | None:
    """A number as it is, or the input that has it."""
    if isinstance(plain(number), int):
        return int(number)
    if not isinstance(number, torch.SymInt) or is_unknown(number):
        return None
    sizes = [x for x in graph.find_nodes(op="placeholder") if isinstance(fake_value(x), torch.SymInt)]
    return next((x for x in sizes if same(fake_value(x), number)), None)


def as_tensor(number: Any, before: fx.Node) -> Any:
    """A number that is read from a tensor as that tensor, also in what is made of it; others as they are; None where
    there is no such tensor, or the number is read otherwise too, such as a size."""
    if not isinstance(number, fx.Node) or not holds_number(number):
        return number
    if number.target == "item":
        return number.args[0] if asserted_only(number) else None
    args = [as_tensor(arg, before) for arg in number.args]
    if all(made is arg for made, arg in zip(args, number.args, strict=True)):
        return number
    counted = number.target is torch.sym_ite and number.args[1:] == (1, 0)  # whether it is true, as a number
    target, given = (operator.mul, (args[0], 1)) if counted else (number.target, tuple(args))
    if target not in MEANT_ALIKE or None in given:
        return None
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, given)
    found = [fake_value(arg) if isinstance(arg, fx.Node) else arg for arg in given]
    made.meta.update(origin(number), example_value=target(*found))
    return made


def asserted_only(number: fx.Node) -> bool:
    """Whether assertions alone are made of it, and branches that are traced as if they were taken."""
    others = [user for user in number.users if user.target not in (ASSERT_SCALAR, decides, raises)]
    return all(holds_number(user) and asserted_only(user) for user in others)


def holds_number(node: fx.Node) -> bool:
    """Whether it is one, known or not: Dynamo takes what is asserted for true from there on."""
    return node.op.startswith("call") and isinstance(fake_value(node), (int, float, *OPEN))


def reads_numbers(gm: fx.GraphModule) -> bool:
    """Whether a number is read for anything else."""
    return any(node.target == "item" for node in gm.graph.nodes)


class Asserted:
    """`run`, whose last outputs are the conditions of `assertions`. Raises where one does not hold: what the program
    raises; of an `assert` a RuntimeError, as a graph of torch's does: on a GPU some time later."""

    def __init__(self, run: Callable[..., Any], assertions: Sequence[Assertion]) -> None:
        self.run, self.assertions = run, assertions

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.run(*inputs)
        kept = len(outputs) - len(self.assertions)
        for condition, assertion in zip(outputs[kept:], self.assertions, strict=True):
            if assertion.error is None:
                ASSERT_TENSOR[-1](condition, assertion.words)
            elif not condition:
                raise assertion.error(assertion.words)
        return outputs[:kept]
