"""Branches that data decide, computed always and felt only where they are taken (if-conversion).

    for e in hit.nonzero():                                   for e in range(len(hit)):
        rows = where(chosen == e)[0]                  ->          rows = where((chosen == e) & hit[e])[0]
        y.index_add_(0, rows, expert[e](x[rows]))                 y.index_add_(0, rows, expert[e](x[rows]))

    if rows.numel() == 0: continue                    ->      (no rows: nothing is written)

So most mixtures of experts are written. Dynamo traces each branch as if it were taken
(torch_compat/dynamo_branches.py). Here it is proved that one that is not taken has no rows, writes nothing without
rows, and leaves everything of Python as it was, but for names of tensors, which are selected (selection.py).
gradients.py keeps the gradient of what no branch used None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any

import torch.fx as fx
from torch import Tensor

from ringopt.frontend.data_sizes.assertions import holds_number
from ringopt.frontend.data_sizes.branches import BranchedGraph, NotPredicable, Predicated, plain_name
from ringopt.frontend.data_sizes.by_token import FINDS
from ringopt.frontend.data_sizes.fake_values import fake_value
from ringopt.frontend.data_sizes.selection import select_carried
from ringopt.frontend.data_sizes.stretches import erase_with_users, is_check
from ringopt.ir.nodes import written_by_name
from ringopt.torch_compat.dynamo_branches import Branch, RowLoop, decides


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
    found, program = dict[Branch, Predicated](), BranchedGraph(gm.graph)
    for branch in branches:
        found[branch] = Predicated(branch, found[branch.within] if branch.within else None, program)
        program.owner.update(dict.fromkeys(found[branch].nodes, found[branch]))
    failed = dict[tuple[CodeType, int], str]()
    for loop in loops:
        if [branch.when for branch in branches if branch.condition is loop] != list(range(loop.turns)):
            failed[loop.place] = "the loop ends early, or its rows are not read one by one"
    for step, order in ((Predicated.mask_rows, 1), (select_carried, -1), (Predicated.check, 1)):
        for each in list(found.values())[::order]:  # -1: those within before those around them
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
        if not node.users and (holds_number(node) or plain_name(node) in ("item", "sym_int")):
            gm.graph.erase_node(node)
    gm.recompile()
    return list(found.values())


def stand_for(branch: Branch, now: Callable[[fx.Node], fx.Node]) -> None:
    """Has it speak of the nodes that are in the graph."""
    branch.nodes = [now(node) for node in branch.nodes]
    branch.carried = [(now(old) if isinstance(old, fx.Node) else old, now(new)) for old, new in branch.carried]
    if isinstance(branch.condition, fx.Node):
        branch.condition = now(branch.condition)


# ---- loops over what is found ----------------------------------------------------------------------------------------
def looked_for(rows: fx.Node) -> fx.Node | None:
    """The tensor of one dim, of known length, of which `rows` are the places that are not 0."""
    name, given = plain_name(rows), rows.args[0] if rows.args else None
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
                if plain_name(user) == "getitem" and user.args[0] is item:
                    pending.append(user)  # its only element
                elif plain_name(user) == "getitem":
                    user.args = (user.args[0], with_number(user.args[1], item, turn))
    for rows in list(loop.over.users):
        if plain_name(rows) in FINDS:
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
