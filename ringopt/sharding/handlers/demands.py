"""Where a sequence begins: what is to be cut although nobody demands its rows by a rule.

    x = conv1d(embedding(ids), w)      # a demand for rows of x stops here: a row needs its neighbours
    q = linear(x)                      # attended over, so its rows are wanted

Demands climb over ops that work token by token (ringopt/sharding/sharder.py). Above one that mixes rows in a way this
package knows, the values would be computed whole, on every rank. So before the walk the demands of all sites, and of
what later meets the rows that they give (a branch beside attention), are followed further up, past such ops: an operand
of one is a source, and is spread as soon as it is there; the handlers then find it sharded. What is read whole all the
same is computed whole as if nothing had been cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.dims.rule import ViewRule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import LIKE, NEW, is_aten, named, op_name, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import divides, is_open
from ringopt.ops import operators
from ringopt.sharding.behind_breaks import WEIGHTY
from ringopt.sharding.emit import enough_rows
from ringopt.sharding.handlers.branches import branches
from ringopt.sharding.handlers.joins import JOINS
from ringopt.sharding.handlers.patches import are_patches, patches
from ringopt.sharding.handlers.slots import slots
from ringopt.sharding.sharder import Sharder
from ringopt.torch_compat.symbolic_shapes import statically_known_true

Demand = tuple[fx.Node, Sharded]

# What makes an activation of less: to compute it whole is to hold it, and its gradient, whole.
WORK = WEIGHTY | {"embedding"}


def sources(
    sharder: Sharder, demands: Iterable[Demand], handled: frozenset[str], worked: set[fx.Node]
) -> dict[fx.Node, Sharded]:
    """How to spread the values that ops among `handled` read on their way to what is demanded. Only what there is work
    above (`worked`), or in the op: to cut an input in order to slice it would send what every rank has. Sums over all
    tokens that layers work on are such values too (slots.py), and inputs that much else is made of (branches.py)."""
    demands, bases = list(demands), dict[fx.Node, Sharded]()
    pending, seen, found = [*joined(sharder, demands), *demands], set[fx.Node](), slots(sharder, worked)
    while pending:
        node, place = pending.pop()
        if node not in worked:
            bases.setdefault(node, place)
        if node in seen or node not in worked or node.op != "call_function":
            continue
        seen.add(node)
        if are_patches(node, place) and named(node.args[0], "input") not in worked:  # of what layers made, rows are cut
            found[node], sharder.climbers[node] = place, partial(patches, sharder, node)
            continue
        climbed = climb(sharder, node, place)
        if climbed is not None:
            pending += climbed
            for x, at in picked(sharder, node):
                # (What is demanded may be rows of it, of which heads are picked by number: x[:, :, [-1]].)
                if x in worked and all(operand is not x for operand, _ in climbed):
                    found[x] = at
                    pending.append((x, at))
            continue
        for operand, at in above(sharder, node, place, handled):
            if op_name(node) in WORK or operand in worked:
                found.setdefault(operand, at)
                pending.append((operand, at))
    sites = [user for node, _ in demands for user in node.users if not is_aten(user)]
    return branches(sharder, bases, sites, seen) | found


def joined(sharder: Sharder, demands: Sequence[Demand]) -> Iterator[Demand]:
    """What meets the rows that attention gives token by token, as a convolution beside it does: its rows are wanted as
    well."""
    rows = {y: place for q, place in demands for y in q.users if is_attention_of(q, y)}
    for node in next(iter(rows)).graph.nodes if rows else ():
        rule, operands = rule_of(node), list(tensor_args(node))
        if node in rows or rule is None or len(rule.operands) != len(operands):
            continue
        for i, x in enumerate(operands):
            out = rule.push(i, rows[x]) if x in rows else None
            wanted = rule.pull(out) if out is not None else None
            if out is not None and wanted is not None and sharder.consistent(rule, wanted, out):
                rows[node] = out
                yield from ((y, at) for y, at in zip(operands, wanted, strict=True) if at is not None and y not in rows)
                break


def is_attention_of(q: fx.Node, node: fx.Node) -> bool:
    """Whether `node` is an attention whose queries are `q`."""
    return node.target is operators.attention.default and AttentionCall.of(node).q is q


def worked_on(graph: fx.Graph) -> set[fx.Node]:
    """What ops that make activations have made, or have gone into. New zeros have a shape of them, nothing else."""
    worked = set[fx.Node]()
    for node in graph.nodes:
        made = not worked.isdisjoint(node.all_input_nodes) and op_name(node) not in (*LIKE, *NEW)
        if op_name(node) in WORK or made:
            worked.add(node)
    return worked


def climb(sharder: Sharder, node: fx.Node, place: Sharded) -> list[Demand] | None:
    """The demands on the operands of a token-wise op; None of another."""
    rule, operands = rule_of(node), list(tensor_args(node))
    wanted = rule.pull(place) if rule is not None and len(rule.operands) == len(operands) else None
    if rule is None or wanted is None or not sharder.consistent(rule, wanted, place):
        return None
    return [(operand, at) for operand, at in zip(operands, wanted, strict=True) if at is not None]


def picked(sharder: Sharder, node: fx.Node) -> Iterator[Demand]:
    """The sequence that rows are picked from by numbers, whose own demand is for the numbers. Tables that are looked up
    in (of rotations, say) carry no gradient, and every rank has them; what has fewer elements than are picked (means of
    segments) every rank had better have."""
    if op_name(node) in ("gather", "index", "index_select", "take_along_dim") and sharder.carries[node.args[0]]:
        x, rule = node.args[0], rule_of(node)
        along = set(rule.operands[0].values()) if rule is not None else set()
        dims = [dim for dim in range(len(shape_of(x))) if dim not in along]
        fewer = statically_known_true(prod(shape_of(x)) < prod(shape_of(node)))
        if len(dims) == 1 and not fewer and enough_rows(sharder, shape_of(x)[dims[0]]):
            yield x, Sharded(dims[0], 1, shape_of(x)[dims[0]], 1)


def above(sharder: Sharder, node: fx.Node, place: Sharded, handled: frozenset[str]) -> Iterator[Demand]:
    """Which rows of its operands an op that mixes rows is given, for the rows `place` of it."""
    if not is_aten(node):
        return
    rule = rule_of(node)
    if isinstance(rule, ViewRule):
        yield from merged(sharder, node, rule, place)
    elif op_name(node) == "index_add":
        yield from put_in_order(node, place)
    elif op_name(node) == "im2col":
        rows = len(shape_of(node.args[0])) - 2
        yield node.args[0], Sharded(rows, 1, shape_of(node.args[0])[rows], 1)
    elif op_name(node) in handled:
        operands = node.args[0] if op_name(node) in JOINS and isinstance(node.args[0], (list, tuple)) else node.args[:1]
        for operand in operands:
            if len(shape_of(operand)) == len(shape_of(node)) and enough_rows(sharder, shape_of(operand)[place.dim]):
                yield operand, Sharded(place.dim, 1, shape_of(operand)[place.dim], 1)


def put_in_order(node: fx.Node, place: Sharded) -> Iterator[Demand]:
    """The numbers of experts, of which tokens that are added up here were sorted by (moe_routing.py)."""
    order = node.args[2]
    while op_name(order) in ("div", "floor_divide"):
        order = order.args[0]
    if place.dim == 0 and op_name(order) == "getitem" and op_name(order.args[0]) == "sort":
        numbers = order.args[0].args[0]
        if len(shape_of(numbers)) == 1 and divides(place.size, shape_of(numbers)[0]):
            yield numbers, replace(place, inner=place.inner * (shape_of(numbers)[0] // place.size))


def merged(sharder: Sharder, node: fx.Node, rule: ViewRule, place: Sharded) -> Iterator[Demand]:
    """A sequence that a reshape makes of several dims (the rows and columns of a picture): the outermost of them that
    the ranks can share."""
    before = prod(rule.new[: place.dim]) * place.outer
    for dim, size in enumerate(rule.old):
        outer = max(1, before // max(1, prod(rule.old[:dim])))
        if is_open(size) or is_open(outer) or size % outer or size == outer:
            continue
        at = Sharded(dim, outer, size // outer, 1)
        made = rule.push(0, at)
        if made is not None and made.dim == place.dim and enough_rows(sharder, at.length):
            yield node.args[0], at
            return
