"""A step that is run many times, in memory that is made once.

    b = bmm(k, s)                    bmm(k, s, out=m0)
    new = sub(v, b)        ->        sub(v, m0, out=m1)
    y[t] = bmm(q, new)               bmm(q, m1, out=y[t])

A step has few numbers, so making memory for each value, views of it, and copies into the results take as long as what
is computed. Here every value has memory that the next step uses again, views of that memory are made once, what a
result is stacked of is computed where it belongs, and so is what a product is added to (step_graph.py). The numbers are
those of the step, but for the rounding of such a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.ir.nodes import outputs_of, shape_of, value_of
from ringopt.kernels.steps.base import OneStep, StepKernel
from ringopt.kernels.steps.one_launch import run_steps, step_kernel
from ringopt.scans.body import placeholders
from ringopt.scans.step_graph import SUMS, add_products, simplify
from ringopt.scans.trace import VIEWS, Kinds, OperandKind, in_own_thread, without_idle_views, writes
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.schema import OpOverload, schema_of

aten = torch.ops.aten
# Whatever the strides of their operand, their result lies in its memory. (A reshape does so where that is contiguous.)
ALIASES = frozenset(
    {aten.transpose.int, aten.permute.default, aten.t.default, aten.expand.default, aten.unsqueeze.default,
     aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.detach.default, aten.diagonal.default}
)  # fmt: skip
# A call of torch's function takes half the time that a call of the operator does: 2 microseconds less.
BINDINGS = {
    aten.bmm.out: torch.bmm, aten.baddbmm.out: torch.baddbmm, aten.mm.out: torch.mm, aten.addmm.out: torch.addmm,
    aten.mul.out: torch.mul, aten.add.out: torch.add, aten.sub.out: torch.sub, aten.neg.out: torch.neg,
    aten.exp.out: torch.exp, aten.sum.IntList_out: torch.sum, aten.reshape.default: torch.reshape,
}  # fmt: skip


@dataclass(frozen=True)
class StepRoles:
    """Of the inputs of a step: what the last step gave ("carry"), a row of something stacked, or the same in all steps
    ("const"); of its outputs: the carries, rows, and what is added up ("sum"). `keeps`: the carries of all steps are
    kept."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    keeps: bool = False

    def places(self, role: str) -> list[int]:
        return [place for place, each in enumerate(self.inputs) if each == role]


def roles_of(carries: int, xs: int, consts: int, ys: int, keeps: bool = False) -> StepRoles:
    """Of a step of a body."""
    inputs = (*["carry"] * carries, *["row"] * xs, *["const"] * consts)
    return StepRoles(inputs, (*["carry"] * carries, *["row"] * ys), keeps)


def kinds_in(inputs: Sequence[Tensor], roles: StepRoles) -> Kinds:
    """Of the operands of a step."""
    pairs = zip(inputs, roles.inputs, strict=True)
    return tuple(OperandKind.of(x, stacked=role == "row") for x, role in pairs)


@dataclass(frozen=True, eq=False)
class RepeatedStep:
    """once(carry, *consts) -> *fixed, the memory of values among it
    ahead(*stacked) -> *rows, stacked: views of what has a row a step
    each(*carries, *into, *rows, *fixed) -> *carries

    into    the places among the outputs of the step that are written to what the caller gives
    kernel  all steps as one launch (ringopt/kernels/steps/one_launch.py), where there is such"""

    roles: StepRoles
    once: fx.GraphModule
    ahead: fx.GraphModule
    each: fx.GraphModule
    into: tuple[int, ...]
    kernel: StepKernel | None = None

    @torch.no_grad()
    def run(self, inputs: Sequence[Tensor], results: Sequence[Tensor], backwards: bool = False) -> list[Tensor]:
        """The last carries, which may lie in a result. `inputs` has rows stacked along dim 0, and so has `results`, for
        each output: rows; the sum that is added to; carries where they are kept, the given ones first, and else
        anything."""
        roles, order = self.roles, -1 if backwards else 1
        carried = [inputs[place] for place in roles.places("carry")]
        stacked = [inputs[place] for place in roles.places("row")]
        count = stacked[0].shape[0]
        if not count:
            return carried
        consts = [inputs[place] for place in roles.places("const")]
        if self.kernel is not None:
            last = run_steps(self.kernel, carried, stacked, consts, results, backwards)
            if last is not None:
                return last
        fixed = self.once(carried[0], *consts)
        into = [self.destinations(place, results[place], carried, order) for place in self.into]
        rows = [x.unbind(0)[::order] for x in self.ahead(*stacked)]
        step = self.each.forward
        for _, *given in zip(range(count), *into, *rows, strict=False):
            carried = step(*carried, *given, *fixed)
        return list(carried)

    def destinations(self, place: int, result: Tensor, carried: Sequence[Tensor], order: int) -> Iterable[Tensor]:
        """Where an output goes, step by step."""
        role = self.roles.outputs[place]
        if role == "sum":
            return cycle([result])
        if role == "row":
            return result.unbind(0)[::order]
        if self.roles.keeps:
            return result.unbind(0)[::order][1:]
        return cycle([torch.empty_like(carried[place], memory_format=torch.contiguous_format) for _ in range(2)])


@lru_cache(maxsize=1024)
def repeated_step(step: Callable[..., Sequence[Tensor]], kinds: Kinds, roles: StepRoles) -> RepeatedStep:
    """Of a step on operands of such kinds."""

    def traced() -> fx.GraphModule:
        with FakeTensorMode(), torch.no_grad():
            operands = [kind.empty() for kind in kinds]
            return make_fx(lambda *given: list(step(*given)), tracing_mode="real")(*operands)

    module = in_own_thread(traced)
    plain = writes(module)
    (without_idle_views if plain else simplify)(module.graph)
    kernel = step_kernel(OneStep(module.graph, roles.inputs, roles.outputs, roles.keeps))
    if not plain:
        add_products(module.graph)
    return replace(_Writer(module, roles, plain).write(), kernel=kernel)


class _Writer:
    """`plain`: a step that writes into its own values stays as it is, and its results are copied to where they go."""

    def __init__(self, step: fx.GraphModule, roles: StepRoles, plain: bool):
        self.step, self.roles, self.plain = step, roles, plain
        self.once, self.ahead, self.each = fx.Graph(), fx.Graph(), fx.Graph()
        self.fixed = dict[fx.Node, fx.Node]()  # what `once` knows: constants, memory, and views of both
        self.constants = set[fx.Node]()  # of these, what has its value then
        self.stacked = dict[fx.Node, fx.Node]()  # what `ahead` knows
        self.made = dict[fx.Node, fx.Node]()  # what `each` knows
        self.given = dict[fx.Graph, list[fx.Node]]({self.once: [], self.ahead: []})  # what `each` is given of theirs
        self.free = list[fx.Node]()  # memory, in `once`, of values that nothing reads any more
        self.held = dict[fx.Node, fx.Node]()  # that of a value

    def write(self) -> RepeatedStep:
        inputs, outputs = placeholders(self.step), outputs_of(self.step.graph)
        like = self.once.placeholder("like")
        for place, role in enumerate(self.roles.inputs):
            of_role = {"const": (self.once, self.fixed), "row": (self.ahead, self.stacked)}
            graph, known = of_role.get(role, (self.each, self.made))
            known[inputs[place]] = graph.placeholder(f"{role}{place}")
        self.constants.update(self.fixed)
        into = self.destinations(outputs)
        self.marks = {graph: self.each.placeholder("mark") for graph in (self.ahead, self.once)}
        calls = [node for node in self.step.graph.nodes if node.op == "call_function"]
        last = last_uses(calls, outputs)
        self.aim(outputs, into)
        for at, node in enumerate(calls):
            self.add(node, like)
            self.free += [self.held[each] for each in last.get(at, ()) if each in self.held]
        self.give(outputs, into)
        for node in reversed(list(self.each.nodes)):
            if node.target in VIEWS and not node.users:
                self.each.erase_node(node)
            node.target = BINDINGS.get(node.target, node.target)
        for graph in (self.once, self.ahead):
            graph.output(tuple(self.given[graph]))
            self.each.erase_node(self.marks[graph])
        once, ahead, each = (fx.GraphModule(torch.nn.Module(), graph) for graph in (self.once, self.ahead, self.each))
        return RepeatedStep(self.roles, once, ahead, each, tuple(into))

    def destinations(self, outputs: Sequence[fx.Node]) -> list[int]:
        """The outputs that are written to what the caller gives: all, but carries that are rows of a result too."""
        pairs = list(zip(outputs, self.roles.outputs, strict=True))
        rows = {out for out, role in pairs if role == "row"}
        into = [at for at, (out, role) in enumerate(pairs) if role != "carry" or self.roles.keeps or out not in rows]
        self.targets = {place: self.each.placeholder(f"into{place}") for place in into}
        return into

    def aim(self, outputs: Sequence[fx.Node], into: Sequence[int]) -> None:
        """What is computed where a result goes. A result is often that in another shape."""
        self.direct = dict[fx.Node, fx.Node]()
        for place in into:
            made = out = outputs[place]
            while made.target is aten.reshape.default:
                made = made.args[0]
            if self.plain or self.roles.outputs[place] == "sum" or made in self.direct or with_out(made) is None:
                continue
            target = self.targets[place]
            if made is not out:
                target = self.each.call_function(aten.reshape.default, (target, list(value_of(made).shape)))
            self.direct[made] = target
            self.made[out] = self.targets[place]
            self.aim_addend(made)

    def aim_addend(self, made: fx.Node) -> None:
        """What a product is added to is computed where the sum goes, if nothing else reads it."""
        if made.target not in SUMS.values():
            return
        addend = source = made.args[0]
        while source.target is aten.reshape.default and len(source.users) == 1:
            source = source.args[0]
        varies = any(arg not in self.fixed for arg in source.all_input_nodes)
        if with_out(source) is None or len(source.users) > 1 or source in self.direct or not varies:
            return
        self.direct[source] = self.made[addend] = self.direct[made]
        if (shape := list(shape_of(source))) != list(shape_of(made)):
            self.direct[source] = self.each.call_function(aten.reshape.default, (self.direct[made], shape))

    # ---- a call ------------------------------------------------------------------------------------------------------
    def add(self, node: fx.Node, like: fx.Node) -> None:
        operands, target = node.all_input_nodes, None if self.plain else with_out(node)
        moves = self.plain or node in self.direct
        known = not moves and all(arg in self.fixed for arg in operands)
        if known and all(arg in self.constants for arg in operands):
            self.constants.add(node)
            self.fixed[node] = self.once.node_copy(node, self.fixed.__getitem__)
        elif known and (node.target in ALIASES or (node.target in VIEWS and self.is_contiguous(operands[0]))):
            self.fixed[node] = self.once.node_copy(node, self.fixed.__getitem__)
        elif operands and operands[0] in self.stacked and (args := of_stacked(node)) and not self.plain:
            self.stacked[node] = self.ahead.call_function(node.target, (self.stacked[operands[0]], *args))
        elif target is None:
            if node not in self.made:
                self.made[node] = self.each.node_copy(node, self.value)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.value)
            if node in self.direct:
                self.made.setdefault(node, self.direct[node])
            else:
                self.take(node, like)
            out = self.direct[node] if node in self.direct else self.value(node)
            self.each.create_node("call_function", target, args, {**kwargs, "out": out}, f"{node.name}_into")

    def is_contiguous(self, node: fx.Node) -> bool:
        """Whether it is memory of a value, in whatever shape."""
        while node.target is aten.reshape.default:
            node = node.args[0]
        return node in self.held

    def value(self, node: fx.Node) -> fx.Node:
        """In `each`."""
        if node not in self.made:
            graph, known = (self.ahead, self.stacked) if node in self.stacked else (self.once, self.fixed)
            self.given[graph].append(known[node])
            with self.each.inserting_before(self.marks[graph]):
                self.made[node] = self.each.placeholder(node.name)
        return self.made[node]

    def take(self, node: fx.Node, like: fx.Node) -> None:
        """Memory for a value, that of one which nothing reads any more if there is such."""
        size, dtype = list(value_of(node).shape), value_of(node).dtype
        place = next((free for free in self.free if (free.args[1], free.kwargs["dtype"]) == (size, dtype)), None)
        if place is None:
            place = self.once.call_function(aten.new_empty.default, (like, size), {"dtype": dtype})
        else:
            self.free.remove(place)
        self.held[node] = self.fixed[node] = place

    # ---- results -----------------------------------------------------------------------------------------------------
    def give(self, outputs: Sequence[fx.Node], into: Sequence[int]) -> None:
        """What is not there already is copied; the carries are what the next step is given."""
        for place in into:
            target, value = self.targets[place], self.value(outputs[place])
            if self.roles.outputs[place] == "sum":
                self.each.call_function(aten.add_.Tensor, (target, value))
            elif target is not value:
                self.each.call_function(aten.copy_.default, (target, value))
        rows = {outputs[place]: self.targets[place] for place in into if self.roles.outputs[place] == "row"}
        carries = [place for place, role in enumerate(self.roles.outputs) if role == "carry"]
        self.each.output(tuple(self.targets.get(place, rows.get(outputs[place])) for place in carries))


def last_uses(calls: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> dict[int, list[fx.Node]]:
    """By the number of a call, the values in memory of their own that nothing reads behind it, nor what may lie in that
    memory. What results lie in is not among them."""
    lies_in, last = dict[fx.Node, set[fx.Node]](), dict[fx.Node, int]()
    for at, node in enumerate(calls):
        below = set[fx.Node]().union(*(lies_in.get(arg, set()) for arg in node.all_input_nodes))
        last.update(dict.fromkeys(below, at))
        lies_in[node] = {node} if with_out(node) else below
    kept, found = set[fx.Node]().union(*(lies_in.get(out, set()) for out in outputs)), dict[int, list[fx.Node]]()
    for node, at in last.items():
        if node not in kept:
            found.setdefault(at, []).append(node)
    return found


def of_stacked(node: fx.Node) -> tuple[Any, ...] | None:
    """The arguments of a view behind its operand, for all steps at once; None where it is no such view."""
    if node.target is aten.reshape.default and 0 not in shape_of(node):
        return ([-1, *shape_of(node)],)
    if node.target is aten.transpose.int:
        rank = len(shape_of(node))
        return tuple(dim % rank + 1 for dim in node.args[1:])
    return None


@lru_cache(maxsize=4096)
def out_variant(target: OpOverload) -> OpOverload | None:
    """The overload that writes its one result to `out`, and takes the same arguments otherwise."""
    schema = schema_of(target)
    if schema.is_mutable or len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return None
    if any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns)):
        return None  # a view
    packet = getattr(aten, schema.name.removeprefix("aten::"))
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    for name in packet.overloads():
        found: OpOverload = getattr(packet, name)
        *arguments, last = schema_of(found).arguments
        if last.is_out and last.name == "out" and [(each.name, str(each.type)) for each in arguments] == wanted:
            return found
    return None


def with_out(node: fx.Node) -> OpOverload | None:
    """By which a call is written to memory."""
    known = isinstance(node.target, OpOverload) and node.target not in VIEWS
    return out_variant(node.target) if known else None
