"""Branches that data decide, computed always and felt only where they are taken (if-conversion).

    for e in hit.nonzero():                                   for e in range(len(hit)):
        rows = where(chosen == e)[0]                  ->          rows = where((chosen == e) & hit[e])[0]
        y.index_add_(0, rows, expert[e](x[rows]))                 y.index_add_(0, rows, expert[e](x[rows]))

    if rows.numel() == 0: continue                    ->      (no rows: nothing is written)

So most mixtures of experts are written. Dynamo traces each branch as if it were taken
(torch_compat/dynamo_branches.py). Here it is proved that one that is not taken has no rows, writes nothing without
rows, and leaves everything of Python as it was. gradients.py keeps the gradient of what no branch used None.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from ringopt.frontend.data_sizes.stretches import erase_with_users, is_check
from ringopt.ir.nodes import called_name, is_in_place, written_by_name
from ringopt.ir.symbolic_sizes import formula
from ringopt.torch_compat.dynamo_branches import Branch, RowLoop, decides
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.schema import HigherOrderOperator, schema_or_none

# What adds or writes rows, and which operand says where.
ROWS_AT = {"index_add": 2, "index_copy": 2, "index_put": 1, "scatter_add": 2, "scatter": 2, "setitem": 1}
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


def name_of(node: fx.Node) -> str:
    """Of what it calls, without the mark of an operator in place."""
    name = called_name(node)
    return name if name.endswith("__") else name.removesuffix("_")


def predicated(
    gm: fx.GraphModule, branches: Sequence[Branch], loops: Sequence[RowLoop], now: Callable[[fx.Node], fx.Node]
) -> list[Predicated]:
    """The branches in Dynamo's graph, which is changed; `now` says which of its nodes stands for one that was traced.
    Raises NotPredicable."""
    for branch in branches:
        stand_for(branch, now)
    for loop in loops:
        loop.over, loop.rows = now(loop.over), [now(row) for row in loop.rows]
    for node in gm.graph.find_nodes(op="call_function", target=decides):
        gm.graph.erase_node(node)
    found, program = dict[Branch, Predicated](), Program(gm.graph)
    for branch in branches:
        found[branch] = Predicated(branch, found[branch.within] if branch.within else None, program)
        program.owner.update(dict.fromkeys(found[branch].nodes, found[branch]))
    failed = dict[tuple[CodeType, int], str]()
    for loop in loops:
        if [branch.when for branch in branches if branch.condition is loop] != list(range(loop.turns)):
            failed[loop.place] = "the loop ends early, or its rows are not read one by one"
    for step in (Predicated.mask_rows, Predicated.check):
        for each in found.values():
            if each.branch.place not in failed:
                try:
                    step(each)
                except NotPredicable as problem:
                    failed[each.branch.place] = str(problem)
    if failed:
        raise NotPredicable("; ".join(failed.values()), failed)
    left = set(gm.graph.nodes)
    for loop in loops:
        know_numbers(loop, left)
    for node in reversed(gm.graph.nodes):
        if not node.users and (holds_number(node) or name_of(node) in ("item", "sym_int")):
            gm.graph.erase_node(node)
    gm.recompile()
    return list(found.values())


class Program:
    """What is known of all nodes of a graph: those that it had before it was changed (`alive`), the innermost branch of
    each that is in any (`owner`), how many have each memory, which memory is written, and who finds rows, by how many
    there are."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.alive, self.owner = graph, set(graph.nodes), dict[fx.Node, Predicated]()
        self.memories = Counter(map(memory, graph.nodes))
        self.written = {memory(x) for node in graph.nodes for x in written_by_name(node)} - {None}
        self.finders = {size: node for node in graph.nodes if sought_in(node) is not None for size in lengths(node)}


class Predicated:
    """A branch: its `nodes`, `truth`, the tensor that says whether it is taken (None where it has no nodes), and
    `empty`, the sizes that are 0 where it is not."""

    def __init__(self, branch: Branch, within: Predicated | None, program: Program):
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
        inside = Counter(map(memory, self.nodes))
        made = {key for key, number in inside.items() if number == self.program.memories[key]}
        if any(self.without_rows(new) is not old for old, new in self.branch.carried):
            raise NotPredicable("has a name stand for another tensor after it")
        carried = {new for _, new in self.branch.carried}
        for node in self.nodes:
            if self.owner[node] is self:
                self.check_node(node, made)
            felt = any(self.is_behind(user) for user in node.users)
            if felt and node not in carried and not is_unknown_number(node) and self.owner[node] is self:
                raise NotPredicable(f"makes {node.name}, which is read after it")
        modes = Counter(name_of(node) for node in self.nodes)
        if modes["_enter_autocast"] != modes["_exit_autocast"] or modes["_set_grad_enabled"] % 2:
            raise NotPredicable("changes autocast or grad mode")

    def is_behind(self, user: fx.Node) -> bool:
        """Whether the program reads there what the branch has made."""
        return user in self.program.alive and user not in self.inside and not is_check(user)

    def check_node(self, node: fx.Node, made: set[Any]) -> None:
        """Raises NotPredicable where it writes to what is not `made` here, or has no result without rows."""
        name = name_of(node)
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
        while node in self.inside and name_of(node) != "setitem" and self.owner[node].adds_nothing(node):
            node = node.args[0]
        return node

    def adds_nothing(self, node: fx.Node) -> bool:
        """Whether its result, or what it writes to, is its first operand where the branch is not taken."""
        place = ROWS_AT.get(name_of(node))
        if place is None or not isinstance(node.args[0], fx.Node):
            return False
        rows = node.args[place] if len(node.args) > place else node.kwargs.get("index")
        found = [x for x in tree_leaves(rows) if isinstance(x, fx.Node)]
        return any(self.is_empty(x) or x in self.masked.values() for x in found)

    def is_empty(self, node: fx.Node) -> bool:
        """Whether it has no elements where the branch is not taken."""
        tensors = [x for x in tree_leaves(fake_value(node)) if isinstance(x, Tensor)]
        return any(formula(size) in self.empty for x in tensors for size in x.shape)


def stand_for(branch: Branch, now: Callable[[fx.Node], fx.Node]) -> None:
    """Has it speak of the nodes that are in the graph."""
    branch.nodes = [now(node) for node in branch.nodes]
    branch.carried = [(now(old) if old is not None else None, now(new)) for old, new in branch.carried]
    if isinstance(branch.condition, fx.Node):
        branch.condition = now(branch.condition)


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
    return given if name_of(node) in FINDS and isinstance(given, fx.Node) else mask_at(node)


def index_of(node: fx.Node) -> Any:
    """Of an assignment: the only index."""
    index = node.args[1] if name_of(node) == "setitem" else None
    return index[0] if isinstance(index, tuple) and len(index) == 1 else index


# ---- loops over what is found ----------------------------------------------------------------------------------------
def looked_for(rows: fx.Node) -> fx.Node | None:
    """The tensor of one dim, of known length, of which `rows` are the places that are not 0."""
    name, given = name_of(rows), rows.args[0] if rows.args else None
    if not isinstance(given, fx.Node):
        return None
    whole = name == "getitem" and rows.args[1] in (slice(None), (slice(None),))
    first = name == "getitem" and rows.args[1] == 0 and isinstance(fake_value(given), tuple)
    column = name in ("flatten", "squeeze", "view", "reshape") and rows.args[1:] in ((), (-1,), (1,))
    if whole or first or column:
        return looked_for(given)
    value = fake_value(given)
    sought = name in FINDS and len(rows.args) == 1 and isinstance(value, Tensor) and value.dim() == 1
    return given if sought and isinstance(value.shape[0], int) else None


def know_numbers(loop: RowLoop, alive: set[fx.Node]) -> None:
    """Writes the number of a turn in the place of the tensor that has it, where that picks one row."""
    graph = loop.over.graph
    for turn, row in enumerate(loop.rows):
        pending = [row]
        while pending:
            item = pending.pop()
            for user in list(item.users):
                if name_of(user) == "getitem" and user.args[0] is item:
                    pending.append(user)  # its only element
                elif name_of(user) == "getitem":
                    user.args = (user.args[0], with_number(user.args[1], item, turn))
    for rows in list(loop.over.users):
        if name_of(rows) in FINDS:
            for user in list(rows.users):
                if is_check(user):
                    erase_with_users(graph, user)
            drop([rows, *rows.users], alive)
    drop(loop.rows, alive)


def with_number(index: Any, item: fx.Node, turn: int) -> Any:
    """An index with the number in the place of `item`, where that means the same."""
    if index is item:
        return slice(turn, turn + 1) if fake_value(item).dim() else turn
    tensors = [place for place, x in enumerate(index) if isinstance(x, fx.Node)]
    if fake_value(item).dim() or tensors != list(range(tensors[0], tensors[-1] + 1)):
        return index  # whose dim comes first where tensors are apart
    return tuple(turn if x is item else x for x in index)


def drop(nodes: Iterable[fx.Node], alive: set[fx.Node]) -> None:
    """Erases those that nobody reads, and what only they read, of what is in the graph."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in alive and not node.users and node.op.startswith("call") and not written_by_name(node):
            given = node.all_input_nodes
            alive.discard(node)
            node.graph.erase_node(node)
            pending += given
