"""The rule of an operator that was declared token by token, held against the shapes of each call.

    ringopt.rule("mylib::rotate", tokenwise={"x": 1, "angles": 0})
    rotate(x [2, 13, 8], angles [13, 4]) -> [2, 13, 8]              ->   Rule(operands=({1: 1}, {1: 0}))

What the shapes contradict has no rule, and a sentence for the report: sizes that differ, and an operator whose results
on half of the tokens are not half of its results (its fake kernel is asked). Of several results, the tuple is placed
as the first is, and each element from there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx

from ringopt.dims.rule import Rule, aligned, same_dims
from ringopt.errors import first_line
from ringopt.ir.nodes import shape_of, tensor_args, value_of
from ringopt.ir.notes import RULED
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.rules.declare import (
    AttentionRule,
    Dims,
    Gathered,
    Pointwise,
    ScanRule,
    Tokenwise,
    declaration_of,
    declared_for,
)
from ringopt.torch_compat.schema import OpOverload, schema_of

Along = tuple[int, ...]


@dataclass(frozen=True)
class DeclaredRule(Rule):
    """`elements[i]` maps a dim of the i-th result to the dim of the first that it runs along with; `local` takes the
    place of the operator on shards."""

    elements: tuple[dict[int, int], ...] = ()
    local: OpOverload | None = None


class Contradiction(Exception):
    """What a rule says cannot be, for the shapes of a call."""


def declared_rule(node: fx.Node) -> DeclaredRule | None:
    """Of a call of an operator that has one, token by token."""
    found = held(node)
    return found if isinstance(found, DeclaredRule) else None


def element_rule(node: fx.Node) -> Rule | None:
    """Of an element of what a declared operator gives."""
    rule = declared_rule(node.args[0])
    return None if rule is None else Rule((rule.elements[node.args[1]],))


def why_whole(node: fx.Node) -> str:
    """Why an operator that has a rule is computed on all tokens; "" where it has none, or none that says why."""
    says = declaration_of(node)
    if isinstance(says, Gathered):
        return says.why or "its rule says so"
    if isinstance(says, AttentionRule):
        return "it is attention that is not sharded"
    if isinstance(says, ScanRule):
        return "it is a recurrence that is not sharded"
    if says is None:
        return ""
    found = held(node)
    return "its rule has no such dim" if isinstance(found, DeclaredRule) else f"its rule is not used: {found}"


def held(node: fx.Node) -> DeclaredRule | str | None:
    """The rule, or what contradicts it; None where none says that it works token by token. Found once for operands of
    one shape."""
    declared = declared_for(node.target)
    key = (declared, tuple(shape_of(x) for x in tensor_args(node)))
    if RULED not in node.meta or node.meta[RULED][0] != key:
        says, found = declaration_of(node), cast(DeclaredRule | str | None, None)
        try:
            found = rule_by(node, says) if isinstance(says, (Tokenwise, Pointwise)) else None
        except Contradiction as problem:
            found = str(problem)
        node.meta[RULED] = (key, found)
    answer: DeclaredRule | str | None = node.meta[RULED][1]
    return answer


def rule_by(node: fx.Node, says: Tokenwise | Pointwise) -> DeclaredRule:
    """Raises Contradiction."""
    results, operands = results_of(node), [shape_of(x) for x in tensor_args(node)]
    declared = declared_for(node.target)
    local = declared.local if declared is not None else None
    if isinstance(says, Pointwise):
        if any(list(shape) != list(results[0]) for shape in results):
            raise Contradiction(f"its results have the shapes {shapes_of(results)}, and a pointwise one has one shape")
        whole = same_dims(len(results[0]))
        return DeclaredRule(tuple(aligned(results[0], x) for x in operands), (), tuple(whole for _ in results), local)
    named = given_dims(node, says)
    returned = returned_dims(says, list(named.values()), len(results), node)
    first = Side("result 0", results[0], at(returned[0], results[0], "result 0"))
    places = zip(names_of(node), operands, strict=True)
    maps = [first.operand(Side(name, shape, at(named[name], shape, name))) for name, shape in places]
    if not any(maps):
        raise Contradiction("no argument runs along")
    numbered = [(f"result {i}", *each) for i, each in enumerate(zip(results, returned, strict=True))]
    elements = tuple(first.element(Side(name, shape, at(dims, shape, name))) for name, shape, dims in numbered)
    rule = DeclaredRule(tuple(maps), (), elements, local)
    halved(node, rule)
    return rule


@dataclass(frozen=True)
class Side:
    """An argument or a result: its shape, and the dims along which it has tokens."""

    name: str
    shape: Sequence[int]
    dims: Sequence[int]

    @property
    def sizes(self) -> list[int]:
        return [self.shape[dim] for dim in self.dims]

    def operand(self, other: Side) -> dict[int, int]:
        """Its dims -> those of an argument, which may have one token for all."""
        found = {}
        for dim, size, own, rows in zip(other.dims, other.sizes, self.dims, self.sizes, strict=False):
            if same(size, rows):
                found[own] = dim
            elif size != 1:
                raise Contradiction(f"{other.name} has {size} tokens along dim {dim}, and the result has {rows}")
        return found

    def element(self, other: Side) -> dict[int, int]:
        """The dims of a result -> its own."""
        found = {}
        for dim, size, own, rows in zip(other.dims, other.sizes, self.dims, self.sizes, strict=False):
            if not same(size, rows):
                raise Contradiction(f"{other.name} has {size} tokens along dim {dim}, and {self.name} has {rows}")
            found[dim] = own
        return found


def given_dims(node: fx.Node, says: Tokenwise) -> dict[str, Along]:
    """Of each tensor argument of a call, by its name; () for one that is read whole."""
    names = names_of(node)
    if not isinstance(says.dims, Mapping):
        return {name: several(says.dims) for name in names}
    given = {name: several(says.dims[name]) if name in says.dims else () for name in names}
    counts = {len(dims) for dims in given.values() if dims}
    if len(counts) != 1:
        raise Contradiction(f"it names {dict(says.dims)}, and one number of dims for all is needed")
    return given


def returned_dims(says: Tokenwise, given: Sequence[Along], count: int, node: fx.Node) -> list[Along | None]:
    """Of each result."""
    if says.returns is None:
        alike = {dims for dims in given if dims}
        if len(alike) != 1:
            raise Contradiction("arguments run along different dims: say along which the results do, returns=...")
        return [*alike] * count
    if isinstance(says.returns, int):
        return [several(says.returns)] * count
    returned = [None if dims is None else several(dims) for dims in says.returns]
    if len(returned) != count:
        raise Contradiction(f"returns has {len(returned)} entries, and the operator {count} results")
    if returned[0] is None:
        raise Contradiction("the first result has to run along")
    read = {user.args[1] for user in node.users if user.target is operator.getitem}
    for i, dims in enumerate(returned):
        if dims is None and i in read:
            raise Contradiction(f"result {i} is read, and returns says None of it")
    return returned


def several(dims: Dims) -> Along:
    """One number or several."""
    return (dims,) if isinstance(dims, int) else tuple(dims)


def at(dims: Along | None, shape: Sequence[int], name: str) -> list[int]:
    """`dims` counted from 0."""
    found = []
    for dim in dims or ():
        if not -len(shape) <= dim < len(shape):
            raise Contradiction(f"{name} has no dim {dim}: its shape is {list(shape)}")
        found.append(dim % len(shape))
    return found


def names_of(node: fx.Node) -> list[str]:
    """The name of the argument that each of `tensor_args` is, or is an element of."""
    found: list[str] = []
    schema = [argument.name for argument in schema_of(node.target).arguments]
    for name, value in (*zip(schema, node.args, strict=False), *node.kwargs.items()):
        tensors: list[fx.Node] = []
        fx.map_arg(value, tensors.append)
        found += [name for x in tensors if isinstance(value_of(x), (torch.Tensor, tuple, list))]
    return found


def results_of(node: fx.Node) -> list[tuple[int, ...]]:
    """The shapes of what a node gives."""
    value = value_of(node)
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if not all(isinstance(each, torch.Tensor) for each in values):
        raise Contradiction("not all of its results are tensors")
    return [tuple(shape_of(node)) if each is value else tuple(each.shape) for each in values]


def shapes_of(shapes: Sequence[Sequence[int]]) -> str:
    """As text."""
    return ", ".join(str(list(shape)) for shape in shapes)


def halved(node: fx.Node, rule: DeclaredRule) -> None:
    """Raises Contradiction where the operator, given half of the tokens, gives anything but half of the results."""
    results, shapes = results_of(node), [shape_of(x) for x in tensor_args(node)]
    if any(is_open(size) for shape in (*shapes, *results) for size in shape):
        return  # asked of numbers only; what does not fit then is found by the sizes of the sharded graph
    for out in sorted({out for each in rule.operands for out in each}):
        rows = results[0][out]
        half = rows // 2
        if not half:
            continue
        try:
            found = list(shapes_on(node, [each.get(out) for each in rule.operands], half, rule.local or node.target))
        except Exception as error:  # of whatever kind: it is a user's kernel
            raise Contradiction(f"on {half} of {rows} tokens it fails: {first_line(error)}") from None
        for i, (shape, whole, each) in enumerate(zip(found, results, rule.elements, strict=True)):
            wanted = tuple(half if each.get(dim) == out else size for dim, size in enumerate(whole))
            if each and shape != wanted:
                raise Contradiction(f"given {half} of {rows} tokens, result {i} is {list(shape)}, not {list(wanted)}")


def shapes_on(node: fx.Node, dims: Sequence[int | None], rows: int, target: Any) -> Iterator[tuple[int, ...]]:
    """Of the results on fewer tokens, by the operator's fake kernel."""
    places = iter(dims)

    def cut(x: fx.Node) -> Any:
        value = value_of(x)
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return value
        dim = next(places)
        if dim is None or not isinstance(value, torch.Tensor):
            return value
        return value.new_empty([rows if d == dim else size for d, size in enumerate(value.shape)])

    mode = next(value_of(x).fake_mode for x in tensor_args(node))
    with mode, torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), cut)
        found = target(*args, **kwargs)
    yield from (tuple(x.shape) for x in (found if isinstance(found, (tuple, list)) else [found]))
