"""Sizes that data decide (`where(mask)`, `x[mask]`, `split(x, counts.tolist())`) shut up in one operator.

    rows = where(mask)[0]                      mask, x, y: all of known sizes
    part = expert(x[rows])               ->    y_1 = ringopt::picked([mask, x, y, *weights], body)
    y[rows] += part                            y.copy_(y_1)

Dynamo captures such sizes as symbols that nothing bounds, where it is told to. What begins with one and ends where
sizes are known again is a stretch; it is traced, made functional, and stands in the graph as one node
(ringopt/ops/picked.py), so that no pass meets a size that it cannot know. ringopt/dims/picks.py proves which of them
work token by token; others run whole. Where picked tokens attend to each other all tokens do, masked (in_place.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback
from torch import Tensor

from ringopt.calls import OpCall
from ringopt.dims.picks import TokensPicked, tokens_picked
from ringopt.frontend.data_sizes.by_token import sum_by_token
from ringopt.frontend.data_sizes.fake_values import (
    OPEN,
    fake_value,
    is_picked,
    is_unknown,
    is_unknown_number,
    known_size,
    memory,
)
from ringopt.frontend.data_sizes.in_place import NotInPlace, in_place
from ringopt.frontend.explicit_autocast import Uncastable, explicit_casts
from ringopt.frontend.explicit_no_grad import ExplicitDetach
from ringopt.frontend.flatten import Book, Flatten
from ringopt.frontend.functionalize import Functional, Unwritable, views_by_value
from ringopt.frontend.plain_spelling import spell_plainly
from ringopt.ir.nodes import eliminate_dead_code, origin, outputs_of, written_by_name
from ringopt.ir.notes import CHECKPOINTED
from ringopt.ir.real_strides import RealStrides
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ops import operators
from ringopt.ops.picked import sizes_text
from ringopt.scans.body import NoBody, to_text
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.operators import ASSERT_SCALAR
from ringopt.torch_compat.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    PickedSizes,
)
from ringopt.torch_compat.tensors import version_of
from ringopt.torch_compat.tracing import tracing


def has_picks(gm: fx.GraphModule) -> bool:
    """Whether there is such a value in Dynamo's graph."""
    return any(is_unknown(fake_value(node)) for node in gm.graph.nodes)


def without_picks(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph in which all sizes are known, or `gm` where they are. Raises GraphRefused."""
    if not has_picks(gm):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    sum_by_token(graph)
    made = fx.GraphModule(gm, graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    found = [sorted(members, key=lambda node: order[node]) for members in stretches(graph)]
    for members in found:
        Cut.of(members)  # refused before anything is changed
    for members in found:
        shut_up(made, members)
    for node in reversed(graph.nodes):
        if not node.users and is_check(node):
            graph.erase_node(node)
    made.recompile()
    left = next((node for node in graph.nodes if is_picked(node) or is_unknown_number(node)), None)
    if left is not None:
        raise GraphRefused(Refusal(f"{left.name} has a size that is known only when the program runs", left))
    return made


# ---- which nodes -----------------------------------------------------------------------------------------------------
def stretches(graph: fx.Graph) -> list[set[fx.Node]]:
    """The nodes of each, in the order in which they end."""
    members = of_stretches(graph)
    groups = Groups(members)
    touched: dict[Any, fx.Node] = {}
    written = {key for node in members for key in map(memory, written_by_name(node)) if key is not None}
    for node in members:
        for arg in node.all_input_nodes:
            if arg in groups.of:
                groups.join(node, arg)
            if memory(arg) in written:
                groups.join(touched.setdefault(memory(arg), node), node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    found = [each | between(graph, each) for each in groups.all]
    return sorted(found, key=lambda each: max(order[node] for node in each))


def of_stretches(graph: fx.Graph) -> list[fx.Node]:
    """What has such a size, or is made from what has, but for the numbers themselves."""
    found = dict[fx.Node, None]()
    for node in graph.nodes:
        if not node.op.startswith("call") or is_check(node):
            continue
        if is_picked(node) or any(is_unknown_number(arg) or is_picked(arg) for arg in node.all_input_nodes):
            found[node] = None
    return list(found)


class Groups:
    """Nodes, each in a set of its own until it is joined with another."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.of = {node: {node} for node in nodes}

    def join(self, one: fx.Node, other: fx.Node) -> None:
        if self.of[one] is not self.of[other]:
            self.of[one] |= self.of[other]
            for node in self.of[other]:
                self.of[node] = self.of[one]

    @property
    def all(self) -> list[set[fx.Node]]:
        return list({id(each): each for each in self.of.values()}.values())


def between(graph: fx.Graph, members: set[fx.Node]) -> set[fx.Node]:
    """What is made of members, and members are made of."""
    below, above = set(members), set(members)
    for node in graph.nodes:
        if any(arg in below for arg in node.all_input_nodes):
            below.add(node)
    for node in reversed(graph.nodes):
        if any(user in above for user in node.users):
            above.add(node)
    return {node for node in below & above if node.op != "output"} - members


# ---- one operator ----------------------------------------------------------------------------------------------------
@dataclass
class Cut:
    """A stretch taken out of Dynamo's graph: its `members` in order, the tensors it is `given`, those of them that it
    has `written` to, and the members that are `read` outside."""

    members: list[fx.Node]
    given: list[fx.Node] = field(default_factory=list)
    written: list[fx.Node] = field(default_factory=list)
    read: list[fx.Node] = field(default_factory=list)

    @classmethod
    def of(cls, members: Sequence[fx.Node]) -> Cut:
        """Raises GraphRefused."""
        inside = with_numbers(members)
        cut = cls([node for node in members[0].graph.nodes if node in inside])
        for node in cut.members:
            operands = [x for x in node.all_input_nodes if not isinstance(fake_value(x), OPEN)]
            cut.given += [x for x in operands if x not in inside and x not in cut.given]
        tensors = all(isinstance(fake_value(x), Tensor) and not is_picked(x) for x in cut.given)
        cut.read = [x for x in members if any(user not in inside and not is_check(user) for user in x.users)]
        if not tensors or any(not isinstance(fake_value(x), Tensor) or is_picked(x) for x in cut.read):
            raise refused(members[0], "what is made of it is read where sizes have to be known")
        keys = {key for node in cut.members for key in map(memory, written_by_name(node)) if key is not None}
        cut.written = [x for x in cut.given if memory(x) in keys]
        if len({memory(x) for x in cut.written}) != len(cut.written):
            raise refused(members[0], "it writes to a tensor through several views")
        cut.check_order(keys, inside)
        return cut

    def check_order(self, keys: set[Any], inside: set[fx.Node]) -> None:
        """Raises GraphRefused where it cannot run at the place of its last node."""
        node = self.members[0]
        while node is not self.members[-1]:
            node = node.next
            reads = any(x in self.read or memory(x) in keys for x in node.all_input_nodes)
            if node not in inside and reads and not is_check(node):
                raise refused(node, "what it writes to is read in between")

    @property
    def graph(self) -> fx.Graph:
        """Of the tensors given, to those that are read outside and those that were written."""
        made, value = fx.Graph(), dict[fx.Node, fx.Node]()
        for place, x in enumerate(self.given):
            value[x] = made.placeholder(f"x{place}")
            value[x].meta.update(example_value=fake_value(x))
        for node in self.members:
            value[node] = made.node_copy(node, lambda x: value[x] if x in value else int(fake_value(x)))
            value[node].meta.pop(CHECKPOINTED, None)  # the operator is of the region
        made.output(tuple(value[x] for x in (*self.read, *self.written)))
        return made


def with_numbers(members: Iterable[fx.Node]) -> set[fx.Node]:
    """And the numbers that they are given, with the elements of tensors that these are: made once more here."""
    inside, pending = set(members), list(members)
    while pending:
        for arg in pending.pop().all_input_nodes:
            number = isinstance(fake_value(arg), OPEN) or (arg.target in ("item",) and arg not in inside)
            element = any(user.target == "item" and user in inside for user in arg.users) and is_element(arg)
            if arg not in inside and (number or element) and arg.op.startswith("call"):
                inside.add(arg)
                pending.append(arg)
    return inside


def is_element(node: fx.Node) -> bool:
    """counts[i]"""
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[1], int)


def is_check(node: fx.Node) -> bool:
    """A number that is not known, or an assertion about one."""
    return node.target is ASSERT_SCALAR or is_unknown_number(node)


def refused(node: fx.Node, why: str) -> GraphRefused:
    """To be raised."""
    return GraphRefused(Refusal(f"a size is known only when the program runs, and {why}", node))


def shut_up(gm: fx.GraphModule, members: Sequence[fx.Node]) -> None:
    """Puts operators in the place of `members`. Raises GraphRefused."""
    cut, graph = Cut.of(members), gm.graph
    mode = RealStrides(allow_non_fake_inputs=True, shape_env=PickedSizes())
    flat = traced(gm, cut, mode)
    results = outputs_of(flat)
    with graph.inserting_after(cut.members[-1]):
        anchor = graph.call_function(torch.zeros, (0,))
    with graph.inserting_before(anchor):
        try:
            values = in_place(flat, cut.given, members[-1])
        except NotInPlace as problem:
            raise refused(members[0], f"as many tokens attend to others: {problem}") from problem
        for place, x in enumerate((*cut.read, *cut.written)):
            made = values[place] if values is not None else operator_of(graph, cut, flat, results[place], x)
            if place < len(cut.read):
                x.replace_all_uses_with(made, delete_user_cb=lambda user: user not in set(cut.members))
            else:
                graph.call_method("copy_", (x, made)).meta.update(origin(members[-1]), example_value=fake_value(x))
    graph.erase_node(anchor)
    for node in reversed(members):
        if node.users:
            for user in list(node.users):
                if is_check(user):
                    erase_with_users(graph, user)
        graph.erase_node(node)


def erase_with_users(graph: fx.Graph, node: fx.Node) -> None:
    """The users first."""
    for user in list(node.users):
        erase_with_users(graph, user)
    graph.erase_node(node)


def operator_of(graph: fx.Graph, cut: Cut, flat: fx.Graph, result: fx.Node, x: fx.Node) -> fx.Node:
    """A call of `ringopt::picked` for one result. Raises GraphRefused."""
    body = fx.Graph()
    value: dict[fx.Node, fx.Node] = {}
    body.graph_copy(flat, value)
    body.output(value[result])
    eliminate_dead_code(body)
    read = [node for node in body.find_nodes(op="placeholder")]
    operands = [given for given, node in zip(cut.given, read, strict=True) if node.users]
    for node in read:
        if not node.users:
            body.erase_node(node)
    try:
        text = to_text(fx.GraphModule({}, body), 0, len(operands), 0)
    except NoBody as problem:
        raise refused(x, problem.refusal.sentence) from problem
    proofs = tokens_picked(body) or [TokensPicked((-1,) * len(operands), -1)]
    shape = [known_size(size) or 0 for size in fake_value(x).shape]
    sizes: list[int | tuple[int, int]] = list(shape)
    for found in proofs:
        having = [i for i, dim in enumerate(found.along) if dim >= 0]
        if having:
            sizes[found.out] = (having[0], found.along[having[0]])
    call = OpCall.to(
        operators.picked.default, operands=operands, body=text, sizes=sizes_text(fake_value(x).dtype, sizes),
        along=[dim for found in proofs for dim in found.along], out=[found.out for found in proofs],
        counts=max(found.counts for found in proofs),
    )  # fmt: skip
    made = call.insert(graph)
    made.meta.update(origin(x))
    with fake_value(x).fake_mode:
        made.meta["example_value"] = torch.empty(shape, dtype=fake_value(x).dtype, device=fake_value(x).device)
    return made


def traced(gm: fx.GraphModule, cut: Cut, mode: RealStrides) -> fx.Graph:
    """The stretch as a flat functional graph of ATen. Raises GraphRefused."""
    with mode:
        values = [empty_like(fake_value(x)) for x in cut.given]
    try:
        flat = flattened(fx.GraphModule(gm, cut.graph), values, {cut.given.index(x) for x in cut.written}, mode)
        numbers_by_value(flat, cut)
        views_by_value(flat.graph)
        ExplicitDetach(flat.graph).rewrite()
        explicit_casts(flat)
        Functional(flat.graph).rewrite()
        for placeholder, value in zip(flat.graph.find_nodes(op="placeholder"), values, strict=True):
            placeholder.meta["val"] = value
        spell_plainly(flat.graph)
    except (Uncastable, Unwritable, GraphRefused) as problem:
        raise refused(cut.members[0], problem.refusal.sentence) from problem
    except GuardOnDataDependentSymNode as problem:
        raise refused(cut.members[0], "what is done depends on it") from problem
    if any(version_of(x) for x in values):
        raise refused(cut.members[0], "a tensor is written in a way that is not known here")
    eliminate_dead_code(flat.graph)
    return flat.graph


def numbers_by_value(flat: fx.GraphModule, cut: Cut) -> None:
    """Numbers that the graph holds as tensors (the 1 of `mask[rows] = 1`) are made in it. Raises GraphRefused for
    tensors of more than one."""
    for node in flat.graph.find_nodes(op="get_attr"):
        held = getattr(flat, node.target)
        if held.numel() != 1:
            raise refused(cut.members[0], f"what is made of it reads {held.numel()} numbers that are in the program")
        with flat.graph.inserting_before(node):
            how = {"dtype": held.dtype, "device": held.device}
            made = flat.graph.call_function(torch.ops.aten.full.default, (list(held.shape), held.item()), how)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        flat.graph.erase_node(node)


def empty_like(x: Tensor) -> Tensor:
    """Of the sizes at hand, which are numbers."""
    sizes, strides = ([known_size(size) or 0 for size in sizes] for sizes in (x.shape, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)


def flattened(
    stretch: fx.GraphModule, values: Sequence[Tensor], written: set[int], mode: RealStrides
) -> fx.GraphModule:
    """The graph of ATen; what it writes to (by place) is copied first. It casts as autocast has it now."""
    device = values[0].device.type

    def run(*args: Tensor) -> Any:
        given = [x.clone() if place in written else x for place, x in enumerate(args)]
        casts = torch.is_autocast_enabled(device)
        with torch.autocast(device, torch.get_autocast_dtype(device)) if casts else nullcontext():
            return Flatten(stretch, Book()).run(*given)

    with tracing(None), mode, torch.fx.traceback.preserve_node_meta():
        return make_fx(run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
