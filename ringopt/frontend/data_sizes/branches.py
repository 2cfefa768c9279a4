"""One branch that data decide: what it picks, what it writes, and what is felt of it where it is not taken."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import sympy
import torch
import torch.fx as fx
from sympy.logic.boolalg import Boolean
from torch import Tensor

from ringopt.frontend.data_sizes.assertions import as_tensor, holds_number
from ringopt.frontend.data_sizes.by_token import FINDS, is_mask, mask_at
from ringopt.frontend.data_sizes.fake_values import (
    fake_value,
    is_unknown_number,
    made_like,
    memory,
)
from ringopt.frontend.data_sizes.stretches import is_check
from ringopt.ir.nodes import called_name, is_in_place, written_by_name
from ringopt.ir.symbolic_sizes import formula
from ringopt.torch_compat.dynamo_branches import Branch, RowLoop
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.schema import HigherOrderOperator, schema_or_none

# What adds or writes rows, and which operand says where.
ROWS_AT = {
    "index_add": 2, "index_copy": 2, "index_put": 1, "scatter_add": 2, "scatter": 2, "setitem": 1, "masked_fill": 1,
}  # fmt: skip
VIEWS = frozenset((
    "getitem", "getattr", "view", "view_as", "reshape", "permute", "transpose", "swapaxes", "swapdims", "movedim", "t",
    "squeeze", "unsqueeze", "expand", "expand_as", "flatten", "unflatten", "select", "narrow", "chunk", "split",
    "unbind", "detach", "contiguous", "to", "type", "type_as", "float",
))  # fmt: skip
FAILS_WITHOUT_ROWS = frozenset((
    "max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "median", "nanmedian", "mode", "quantile",
    "nanquantile", "kthvalue", "batch_norm", "instance_norm", "item", "tolist",
))  # fmt: skip


class NotPredicable(Exception):
    """Of branches that may be felt where they are not taken: `places` has the code, and where in it, of each."""

    def __init__(self, why: str, places: Iterable[tuple[CodeType, int]] = ()):
        self.places = list(places)
        super().__init__(why)


def plain_name(node: fx.Node) -> str:
    """Of what it calls, without the mark of an operator in place."""
    name = called_name(node)
    return name if name.endswith("__") else name.removesuffix("_")


class BranchedGraph:
    """What is known of all nodes of a graph: those that it had before it was changed (`alive`), the innermost branch of
    each that is in any (`owner`), how many have each memory, which memory is written, who finds rows, by how many there
    are, and what is `selected` in the place of which (selection.py)."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.alive, self.owner = graph, set(graph.nodes), dict[fx.Node, Predicated]()
        self.memories = Counter(map(memory, graph.nodes))
        self.written = {memory(x) for node in graph.nodes for x in written_by_name(node)} - {None}
        self.selected = dict[fx.Node, fx.Node]()
        self.finders = {size: node for node in graph.nodes if sought_in(node) is not None for size in lengths(node)}


class Predicated:
    """A branch: its `nodes`, `truth`, the tensor that says whether it is taken (None where it has no nodes), and
    `empty`, the sizes that are 0 where it is not."""

    def __init__(self, branch: Branch, within: Predicated | None, program: BranchedGraph):
        self.branch, self.within, self.program, self.owner = branch, within, program, program.owner
        self.nodes = all_between([node for node in branch.nodes if node in program.alive])
        self.inside = set(self.nodes)
        self.truth: fx.Node | None = None
        self.empty = set[Any]()
        self.masked = dict[fx.Node, fx.Node]()

    # ---- what has no rows where it is not taken ----
    def mask_rows(self) -> None:
        """Picks nothing there. Raises NotPredicable."""
        if not self.branch.ended or self.branch.changes:
            other = f"changes what Python holds: {self.branch.changes}"
            raise NotPredicable(other if self.branch.ended else "does not go on where the program goes on without it")
        if any(node.graph is not self.program.graph for node in self.branch.nodes):
            raise NotPredicable("is in the graph of a higher-order operator")
        if not self.nodes:
            return
        self.empty |= self.within.empty if self.within is not None else set()
        with self.nodes[0].graph.inserting_before(self.nodes[0]):
            self.truth = self.taken(self.nodes[0])
        for node in self.nodes:
            if self.owner[node] is not self:
                continue
            if (mask := sought_in(node)) is not None:
                node.replace_input_with(mask, self.with_truth(mask, node))
                self.empty |= {size for size in lengths(node) if isinstance(size, sympy.Symbol)}
            elif is_mask(mask := index_of(node)):
                node.replace_input_with(mask, self.with_truth(mask, node))

    def take_in(self, nodes: Sequence[fx.Node]) -> None:
        """Nodes that were put in, here and in the branches around."""
        self.owner.update(dict.fromkeys(nodes, self))
        around: Predicated | None = self
        while around is not None:
            around.inside |= set(nodes)
            around = around.within

    def with_truth(self, mask: fx.Node, user: fx.Node) -> fx.Node:
        """Its elements, those that are true where the branch is taken."""
        if mask not in self.masked:
            self.refuse_written(mask)
            with user.graph.inserting_before(user):
                plain = mask if is_mask(mask) else made_like(user, operator.ne, mask, 0)
                self.masked[mask] = made_like(user, torch.logical_and, plain, self.truth)
            self.inside |= {self.masked[mask], plain} - {mask}
        return self.masked[mask]

    def taken(self, first: fx.Node) -> fx.Node:
        """A tensor without dims, of bools, where the graph inserts."""
        truth, around = self.truth_of(first), self.within.truth if self.within is not None else None
        return truth if around is None else made_like(first, torch.logical_and, truth, around)

    def truth_of(self, first: fx.Node) -> fx.Node:
        """Without the branches around."""
        condition: Any = self.branch.condition
        if isinstance(condition, RowLoop):
            self.refuse_written(condition.over)
            row = made_like(first, operator.getitem, condition.over, int(self.branch.when))
            return row if is_mask(row) else made_like(first, operator.ne, row, 0)
        if not isinstance(fake_value(condition), Tensor):
            if (mask := self.mask_of_size(condition)) is not None:
                self.refuse_written(mask)
                return made_like(first, torch.any, mask)
            self.refuse_written(condition)
            condition = as_tensor(condition, first)
        if not isinstance(condition, fx.Node) or holds_number(condition):
            raise NotPredicable("has a condition on a number that is read from data")
        self.refuse_written(condition)
        truth = condition if is_mask(condition) else made_like(first, operator.ne, condition, 0)
        truth = made_like(first, "reshape", truth, ()) if fake_value(truth).dim() else truth
        return truth if self.branch.when else made_like(first, torch.logical_not, truth)

    def refuse_written(self, decides: fx.Node) -> None:
        """Raises NotPredicable where a tensor, or one that a number is read from, may have other values when it is read
        here than the program had."""
        for x in decides.all_input_nodes if holds_number(decides) else ():
            self.refuse_written(x)
        if memory(decides) in self.program.written:
            raise NotPredicable(f"has a condition or a mask that is written in place: {decides.name}")

    def mask_of_size(self, condition: fx.Node) -> fx.Node | None:
        """The mask of which a condition asks whether it has any row; the number of rows is `empty` from here on."""
        asked = fake_value(condition).node.expr
        asked = asked if isinstance(asked, Boolean) else sympy.Ne(asked, 0)
        symbols = list(asked.free_symbols)
        some = sympy.Symbol("some", positive=True, integer=True)
        truth = sympy.true if self.branch.when else sympy.false
        if len(symbols) != 1 or asked.xreplace({symbols[0]: some}) != truth or asked.subs(symbols[0], 0) != ~truth:
            return None
        finder = self.program.finders.get(symbols[0])
        self.empty |= set(symbols) if finder is not None else set()
        return sought_in(finder) if finder is not None else None

    # ---- that nothing is felt then ----
    def check(self) -> None:
        """Raises NotPredicable."""
        made = self.made_memories()
        carried = {new for _, new in self.branch.carried}
        for node in self.nodes:
            if self.owner[node] is self:
                self.check_node(node, made)
            felt = any(self.is_behind(user) for user in node.users)
            if felt and node not in carried and not is_unknown_number(node) and self.owner[node] is self:
                raise NotPredicable(f"makes {node.name}, which is read after it")
        modes = Counter(plain_name(node) for node in self.nodes)
        if modes["_enter_autocast"] != modes["_exit_autocast"] or modes["_set_grad_enabled"] % 2:
            raise NotPredicable("changes autocast or grad mode")

    def made_memories(self) -> set[Any]:
        """Those that nothing before it and behind it has."""
        inside = Counter(map(memory, self.nodes))
        return {key for key, number in inside.items() if number == self.program.memories[key]}

    def is_behind(self, user: fx.Node) -> bool:
        """Whether the program reads there what the branch has made."""
        return user in self.program.alive and user not in self.inside and not is_check(user)

    def check_node(self, node: fx.Node, made: set[Any]) -> None:
        """Raises NotPredicable where it writes to what is not `made` here, or has no result without rows."""
        name = plain_name(node)
        if isinstance(node.target, HigherOrderOperator) or is_mutable(node) or writes_to_several(node):
            raise NotPredicable(f"calls {name}, of which it is not known what it writes")
        written = [x for x in written_by_name(node) if memory(x) not in made]
        alias = memory(node) is not None and memory(node) not in made and name not in VIEWS
        if (written or alias) and not self.adds_nothing(node):
            raise NotPredicable(f"writes to a tensor from before it, other than to rows that it picks: {name}")
        reduced = any(map(self.is_empty, node.all_input_nodes)) and not self.is_empty(node)
        if name in FAILS_WITHOUT_ROWS and (reduced or name.endswith("norm")):
            raise NotPredicable(f"calls {name}, which has no result without rows")

    def without_rows(self, node: fx.Node) -> fx.Node:
        """The node whose value `node` has where the branch is not taken."""
        while node in self.inside and plain_name(node) != "setitem" and self.owner[node].adds_nothing(node):
            node = node.args[0]
        return node

    def adds_nothing(self, node: fx.Node) -> bool:
        """Whether its result, or what it writes to, is its first operand where the branch is not taken."""
        place = ROWS_AT.get(plain_name(node))
        if place is None or not isinstance(node.args[0], fx.Node):
            return False
        if plain_name(node) == "masked_fill" and fake_value(node).shape != fake_value(node.args[0]).shape:
            return False
        rows = node.args[place] if len(node.args) > place else node.kwargs.get("index", node.kwargs.get("mask"))
        found = [x for x in tree_leaves(rows) if isinstance(x, fx.Node)]
        return any(self.is_empty(x) or x in self.masked.values() for x in found)

    def is_empty(self, node: fx.Node) -> bool:
        """Whether it has no elements where the branch is not taken."""
        tensors = [x for x in tree_leaves(fake_value(node)) if isinstance(x, Tensor)]
        return any(formula(size) in self.empty for x in tensors for size in x.shape)


def writes_to_several(node: fx.Node) -> bool:
    """Whether it writes in place, as its name says, to other than one tensor (`_foreach_add_`)."""
    return is_in_place(called_name(node)) and not written_by_name(node)


def all_between(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """And the assertions that Dynamo inserted later."""
    found = list(nodes[:1])
    while found and found[-1] is not nodes[-1]:
        found.append(found[-1].next)
    return found


def is_mutable(node: fx.Node) -> bool:
    """Whether an operator writes, as its schema says."""
    schema = schema_or_none(node.target)
    return schema is not None and bool(schema.is_mutable)


def lengths(node: fx.Node) -> list[Any]:
    """The first size of what it gives."""
    return [formula(x.shape[0]) for x in tree_leaves(fake_value(node)) if isinstance(x, Tensor) and x.dim()]


def sought_in(node: fx.Node) -> fx.Node | None:
    """The mask by which it picks, or the numbers among which it looks for those that are not 0."""
    given = node.args[0] if len(node.args) == 1 else None
    return given if plain_name(node) in FINDS and isinstance(given, fx.Node) else mask_at(node)


def index_of(node: fx.Node) -> Any:
    """Of an assignment: the only index; the mask by which a tensor is filled."""
    name = plain_name(node)
    if name == "masked_fill":
        return node.args[1] if len(node.args) > 1 else node.kwargs.get("mask")
    index = node.args[1] if name == "setitem" else None
    return index[0] if isinstance(index, tuple) and len(index) == 1 else index
