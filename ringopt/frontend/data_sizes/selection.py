"""Names that stand for another tensor behind a branch that data decide: which one is selected.

    if mask.any():                      taken = mask.any()
        x = x / scale         ->        y = where(taken, x, x.detach()) / scale
                                        x = where(taken, y, x)

What comes in has no gradient where the branch is not taken: that of a quotient by 0 would be NaN, not 0. Selected are
results of operators that are cheap and defined for any number; others are left to a graph break, behind which they are
computed where they are needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.frontend.data_sizes.assertions import holds_number
from ringopt.frontend.data_sizes.branches import (
    VIEWS,
    NotPredicable,
    Predicated,
    is_mutable,
    plain_name,
    writes_to_several,
)
from ringopt.frontend.data_sizes.fake_values import fake_value, made_like, memory
from ringopt.frontend.data_sizes.stretches import is_check
from ringopt.ir.nodes import written_by_name
from ringopt.ir.symbolic_sizes import formula
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.schema import is_pointwise_name

CASTS = VIEWS | {"double", "half", "bfloat16", "bool", "int", "long"}  # some casts, of what has the dtype, are views
CHEAP = frozenset(("sum", "mean", "norm", "amax", "amin", "any", "all", "zeros_like", "ones_like"))
# Where no gradient comes to the result, none comes to the operands, whatever these are.
PASS_ZEROS = CASTS | {"sum", "masked_fill", "where", "add", "sub", "neg", "nan_to_num", "clamp"}
OTHER = "has a name stand for another tensor after it"


def select_carried(branch: Predicated) -> None:
    """Puts in the place of what such names stand for what the program has, taken or not; of branches within others
    first. Raises NotPredicable."""
    selected = branch.program.selected
    pairs = [(old, selected.get(new, new)) for old, new in branch.branch.carried]
    # All of them or none: a gradient that goes on where the branch is not taken would be cut.
    selects = any(branch.without_rows(new) is not old for old, new in pairs)
    made = dict[fx.Node, fx.Node]()
    for old, new in pairs if selects else ():
        tensors = is_tensor_node(old) and is_tensor_node(new) and new in branch.inside
        if not tensors or branch.truth is None or made.setdefault(new, old) is not old:
            raise NotPredicable(OTHER)
    for old, new in pairs:
        if selects or memory(old) != memory(new):
            refuse_written_later(branch, old, new)
    if not selects:
        return
    branch.branch.carried = []
    made_here = branch.made_memories()
    for node in branch.inside:
        refuse_costly(node)
        if {memory(x) for x in written_by(node)} - made_here:  # which `cut_gradients` would make a copy of
            raise NotPredicable(f"{OTHER}, and writes to one from before it")
    if any(plain_name(node) not in PASS_ZEROS and learns(node) for node in branch.inside):
        cut_gradients(branch)
    for new, old in made.items():
        selected[new] = select(branch, new, old)


def is_tensor_node(x: Any) -> bool:
    """Whether it is a node, of a tensor: before a branch a name may stand for anything."""
    return isinstance(x, fx.Node) and isinstance(fake_value(x), Tensor)


def refuse_costly(node: fx.Node) -> None:
    """Raises NotPredicable where it takes long, draws, or may fail on values of a branch that is not taken."""
    name = plain_name(node)
    if is_check(node) or holds_number(node):
        return
    picks = name == "getitem" and any(isinstance(x, fx.Node) for x in tree_leaves(node.args[1]))
    if picks or not (name in CASTS | CHEAP or is_pointwise_name(name)):
        raise NotPredicable(f"{OTHER}, and calls {name}")


def refuse_written_later(branch: Predicated, old: fx.Node, new: fx.Node) -> None:
    """Raises NotPredicable where a tensor is written, or given to the caller, that may be one from before the
    branch."""
    behind = branch.nodes[-1] if branch.nodes else new
    while (behind := behind.next).op != "root":
        if {memory(x) for x in written_by(behind)} & {memory(old), memory(new)}:
            raise NotPredicable(f"{OTHER}, which is written later")
    output, given = new.graph.output_node(), {memory(x) for x in new.graph.find_nodes(op="placeholder")}
    if memory(old) in given and memory(new) in map(memory, output.all_input_nodes):
        raise NotPredicable(f"{OTHER}, which is returned and may be an input")


def written_by(node: fx.Node) -> list[fx.Node]:
    """What a call writes to, or may."""
    unnamed = is_mutable(node) or writes_to_several(node) or "out" in node.kwargs
    return node.all_input_nodes if unnamed else written_by_name(node)


def learns(node: fx.Node) -> bool:
    """Whether a gradient may go through."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(fake_value(node)))


def cut_gradients(branch: Predicated) -> None:
    """Of what goes into the branch, where it is not taken."""
    entries = dict[fx.Node, fx.Node]()
    for node in list(branch.nodes):
        for x in node.all_input_nodes:
            if x in branch.inside or not learns(x):
                continue
            if x not in entries:
                with x.graph.inserting_before(branch.nodes[0]):
                    held = made_like(node, "detach", x)
                    entries[x] = made_like(node, torch.where, branch.truth, x, held)
                branch.take_in([held, entries[x]])
            node.replace_input_with(x, entries[x])


def select(branch: Predicated, new: fx.Node, old: fx.Node) -> fx.Node:
    """The one or the other, for all that read `new` behind the branch. Raises NotPredicable where they differ in more
    than their values."""
    place = branch.nodes[-1].next
    while plain_name(place) == "where" and place not in branch.program.alive:  # of branches within
        place = place.next
    with new.graph.inserting_before(place):
        one = made_like(new, torch.where, branch.truth, new, old)
    returned = memory(new) in map(memory, new.graph.output_node().all_input_nodes)
    if kind(new) != kind(old) or strides(one) != strides(new) or (returned and strides(old) != strides(new)):
        raise NotPredicable(f"{OTHER}, of another shape, dtype or order of dims")
    new.replace_all_uses_with(one, lambda user: user is not one and user not in branch.inside)
    if branch.within is not None:
        branch.within.take_in([one])
    return one


def kind(node: fx.Node) -> object:
    """All of a tensor but its values and how it lies in memory."""
    x = fake_value(node)
    return [*map(formula, x.shape)], x.dtype, x.device, x.layout


def strides(node: fx.Node) -> object:
    """Of a tensor."""
    return [*map(formula, fake_value(node).stride())]
