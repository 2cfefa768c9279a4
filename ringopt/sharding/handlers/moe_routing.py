"""Rows sorted by the expert they go to, worked on in that order, and put back (mixture of experts without drops; Gale
et al. 2023, MegaBlocks, section 4).

    experts, order = sort(chosen)                        each rank sorts its own rows: `order` counts these,
    ends = cumsum(histc(experts))                   ->   `ends` says where experts end among them,
    y = grouped_mm(x[order // k], w, ends)               and each row meets the weight of its own expert all the same
    z = y[inverse of order]

In between no row has the place it has in the whole. That is nobody's business as long as every op works row by row, on
rows in one order, which is proved of all that is made of `order`, from the sort to where rows are put back, before a
node is written. Else the rows are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.fx as fx

from ringopt.dims.op_families import CASTS, COPIES, RESHAPES
from ringopt.dims.products import GROUPED
from ringopt.dims.rule import Rule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import named, op_name, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import divides, same
from ringopt.sharding.handlers.expert_counts import sum_of_marks
from ringopt.sharding.handlers.random import dropout
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten
Placing = Callable[[], None]
SAME_NUMBERS = (*RESHAPES, *COPIES, *CASTS, "unsqueeze", "detach")
PICKS_BY_PLACE = ("gather", "scatter", "scatter_add")


def routed(sharder: Sharder, node: fx.Node) -> bool:
    """Places a sort of numbers of experts, and tells the sharder how what is made of its order is placed."""
    place = sharder.placements[node.args[0]] if op_name(node) == "sort" else None
    return place is not None and sorts_apart(sharder, node, place)


def routed_by_table(sharder: Sharder, node: fx.Node) -> bool:
    """The same of numbers that every rank has, as those that a table has of tokens, in the order of which tokens are
    picked that are on shards."""
    if op_name(node) != "sort" or len(shape_of(node)) != 1:
        return False
    orders = [element for element in node.users if element.args[1] == 1]
    readers = [reader for order in orders for reader in (order, *order.users)]
    for reader in (user for node in readers for user in node.users):
        tokens = sharder.placements.get(reader.args[0]) if op_name(reader) == "index" else None
        if tokens is not None and tokens.dim == 0 and divides(tokens.size, shape_of(node)[0]):
            share = shape_of(node)[0] // tokens.size
            return sorts_apart(sharder, node, replace(tokens, inner=tokens.inner * share))
    return False


def sorts_apart(sharder: Sharder, node: fx.Node, place: Sharded) -> bool:
    """Each rank sorts its rows `place`, if nobody minds."""
    if len(shape_of(node)) != 1 or named(node, "descending") or not are_places(node.args[0]):
        return False
    routing = Routing(sharder, node, place)
    if not all(map(routing.follows, routing.readers())) or not all(each.users for each in routing.role):
        return False  # what no node reads is the result of an operator taken apart, whose readers are not here
    sharder.understood |= routing.placing
    sharder.reader = node
    args = (sharder.sharded(node.args[0], place), *node.args[1:])
    sharder.set(node, sharder.call(node.target, args, node, place, node.kwargs), place)
    return True


def are_places(node: fx.Node) -> bool:
    """Whether `node` has the places of the largest among some numbers, or numbers that the program takes for places of
    a row: none is negative, and histc counts them all."""
    name = op_name(node)
    if count_places(node):
        return True
    if name in SAME_NUMBERS:
        return holds_places(node) and are_places(node.args[0])
    if name in ("masked_fill", "where"):
        filled = node.args[:1] + node.args[2:] if name == "masked_fill" else node.args[1:]
        return all(are_places(one) if isinstance(one, fx.Node) else one >= 0 for one in filled)
    if name in ("cat", "stack"):
        return all(map(are_places, node.args[0]))
    return name == "argmax" or (name == "getitem" and op_name(node.args[0]) in ("topk", "max") and node.args[1] == 1)


def count_places(node: fx.Node) -> bool:
    """Whether a gather or a scatter of the program is given these integers: both raise an error where one is negative
    (experts from a table of tokens, whose scores are picked by the same numbers)."""
    dtype = value_of(node).dtype
    if dtype not in (torch.int32, torch.int64):
        return False
    if any(op_name(user) in PICKS_BY_PLACE and user.args[2] is node for user in node.users):
        return True
    alike = [user for user in node.users if op_name(user) in SAME_NUMBERS and user.args[0] is node]
    return any(value_of(user).dtype.itemsize >= dtype.itemsize and count_places(user) for user in alike)


def holds_places(node: fx.Node) -> bool:
    """Whether the dtype of `node` keeps numbers of experts in order, rounded at worst; those of 8 bits wrap around."""
    dtype = value_of(node).dtype
    return dtype.is_floating_point or dtype in (torch.int32, torch.int64)


class Routing:
    """What is made of the order in which `sort` puts rows placed as `place`: `role` of each value, and how the ranks
    make it for their own rows (`placing`; elements of the sort are as it is).

    rows     dim 0 is in that order, and each row a function of its own row
    experts  the sorted numbers of experts, of any dtype: rows as well
    order    which row was put here; in `share`, how many of them are one token
    counts   of the rows of each expert, and `ends` the sums of those
    inverse  what puts rows back
    blank    as long as the order, with nothing of it inside
    """

    def __init__(self, sharder: Sharder, sort: fx.Node, place: Sharded):
        self.sharder, self.sort, self.place = sharder, sort, place
        self.role: dict[fx.Node, str] = {sort: "sorted"}
        self.share: dict[fx.Node, int] = {}
        self.placing: dict[fx.Node, Placing] = {}

    def readers(self) -> Iterator[fx.Node]:
        """In the order of the graph; roles are given on the way."""
        node = self.sort.next
        while node.op != "root":
            if any(arg in self.role for arg in node.all_input_nodes):
                yield node
            node = node.next

    def follows(self, node: fx.Node) -> bool:
        made = (self.element, self.divided, self.picked, self.counted, self.inverted)
        ways = (*made, self.added_back, self.multiplied, self.in_pieces, self.dropped, self.row_by_row)
        return node.op == "call_function" and any(way(node) for way in ways)

    def take(self, node: fx.Node, role: str, placing: Placing | None = None) -> bool:
        self.role[node] = role
        if placing is not None:
            self.placing[node] = placing
        return True

    def is_a(self, node: object, *roles: str) -> bool:
        return isinstance(node, fx.Node) and self.role.get(node) in roles

    # ---- ways to read what has a role --------------------------------------------------------------------------------
    def element(self, node: fx.Node) -> bool:
        if node.args[0] is not self.sort:
            return False
        self.share[node] = 1
        return self.take(node, ("experts", "order")[node.args[1]])

    def divided(self, node: fx.Node) -> bool:
        """Rows to the tokens they are of."""
        whole = op_name(node) == "floor_divide" or node.kwargs.get("rounding_mode") in ("trunc", "floor")
        if op_name(node) not in ("floor_divide", "div") or not whole or not self.is_a(node.args[0], "order"):
            return False
        by = node.args[1]
        if not isinstance(by, int) or by < 1:
            return False
        self.share[node] = self.share[node.args[0]] * by
        return self.take(node, "order")

    def picked(self, node: fx.Node) -> bool:
        """Rows in the order, or back from it."""
        if op_name(node) != "index" or len(node.args[1]) != 1:
            return False
        x, (at,) = node.args
        if self.is_a(at, "inverse") and self.is_a(x, "rows", "experts"):
            self.placing[node] = partial(self.local, node, {}, self.place)
            return True
        if not self.is_a(at, "order") or x in self.role or not divides(self.share[at], self.place.inner):
            return False
        token = replace(self.place, inner=self.place.inner // self.share[at])
        placing = partial(self.local, node, {x: token}, self.place)
        return same(shape_of(x)[0], token.size) and self.take(node, "rows", placing)

    def counted(self, node: fx.Node) -> bool:
        name, x = op_name(node), node.args[0]
        placing = partial(self.local, node, {}, None)
        if name == "histc" and self.is_a(x, "experts"):
            first, last = named(node, "min"), named(node, "max")
            return (first, last) == (0, named(node, "bins") - 1) and self.take(node, "counts", placing)
        if name == "cumsum" and self.is_a(x, "counts"):
            return self.take(node, "ends", placing)
        return name == "to" and self.is_a(x, "counts", "ends") and self.take(node, self.role[x], placing)

    def inverted(self, node: fx.Node) -> bool:
        """Numbers from 0 written to the places of the order; or the order sorted."""
        name, x = op_name(node), node.args[0]
        if name in ("empty_like", "zeros_like"):
            return self.is_a(x, "order") and self.take(node, "blank", partial(self.local, node, {}, self.place))
        if name == "argsort":
            at = x
        elif name == "index_put" and len(node.args[1]) == 1 and not named(node, "accumulate"):
            at, counted = node.args[1][0], node.args[2]
            plain = counted.target is aten.arange.default and same(shape_of(counted)[0], self.place.size)
            blank = x not in self.role or self.is_a(x, "blank")
            if not plain or not blank or len(shape_of(x)) != 1 or not same(shape_of(x)[0], self.place.size):
                return False
        else:
            return False
        falls = name == "argsort" and named(node, "descending")
        if falls or not self.is_a(at, "order") or self.share[at] != 1:
            return False
        return self.take(node, "inverse", partial(self.sorted_back, node, at))

    def added_back(self, node: fx.Node) -> bool:
        """Rows added to what is as long as the tokens, or the rows, were."""
        if op_name(node) != "index_add" or len(node.args) != 4 or node.kwargs.get("alpha", 1) != 1:
            return False
        x, dim, at, rows = node.args
        if dim or not self.is_a(at, "order") or not self.is_a(rows, "rows") or x in self.role:
            return False
        if not divides(self.share[at], self.place.inner):
            return False
        token = replace(self.place, inner=self.place.inner // self.share[at])
        self.placing[node] = partial(self.local, node, {x: token}, token)
        return same(shape_of(x)[0], token.size)

    def in_pieces(self, node: fx.Node) -> bool:
        """Split by the counts of experts, each piece by its own, and joined (ringopt/dims/picks.py)."""
        if op_name(node) != "picked" or named(node, "counts") < 0 or named(node, "out") != [0]:
            return False
        counts, given = node.args[0][named(node, "counts")], list(zip(node.args[0], named(node, "along"), strict=True))
        total = sum_of_marks(counts, self.sort.args[0])
        tokens = shape_of(total.args[0])[0] if total is not None else 0
        if total is None or not tokens or not divides(tokens, self.place.size):
            return False
        fits = all(self.is_a(x, "rows") and dim == 0 if dim >= 0 else x not in self.role for x, dim in given)
        if not fits or not divides(self.place.size // tokens, self.place.inner):
            return False
        return self.take(node, "rows", partial(self.pieces, node, counts, total))

    def multiplied(self, node: fx.Node) -> bool:
        """Each row by the matrix of its expert, of all of which every rank has its part of the gradient."""
        if op_name(node) not in GROUPED or len(node.all_input_nodes) != 3:
            return False
        (x, w), ends = node.args[:2], named(node, "offs")
        if not self.is_a(x, "rows") or not self.is_a(ends, "ends") or w in self.role or len(shape_of(w)) != 3:
            return False
        placing = partial(self.local, node, {w: None}, self.place)
        return same(shape_of(w)[0], shape_of(ends)[0]) and self.take(node, "rows", placing)

    def dropped(self, node: fx.Node) -> bool:
        """Each rank draws for its own rows, in whatever order they are."""
        x = node.args[0]
        placing = partial(self.drop, node)
        return op_name(node) == "dropout" and self.is_a(x, "rows") and self.take(node, "rows", placing)

    def row_by_row(self, node: fx.Node) -> bool:
        """By its rule: all its operands are in the order, or have no rows."""
        rule, operands = rule_of(node), list(tensor_args(node))
        if rule is None or len(rule.operands) != len(operands):
            return False
        ours = [self.is_a(operand, "rows", "experts") for operand in operands]
        wanted = [self.place if mine else None for mine in ours]
        outs = {rule.push(i, self.place) for i, mine in enumerate(ours) if mine}
        others = any(operand in self.role for operand, mine in zip(operands, ours, strict=True) if not mine)
        if others or outs != {self.place} or rule.pull(self.place) != wanted:
            return False
        cast = op_name(node) == "to" and self.is_a(operands[0], "experts") and holds_places(node)
        return self.take(node, "experts" if cast else "rows", partial(self.by_rule, node, rule, wanted))

    # ---- on this rank ------------------------------------------------------------------------------------------------
    def local(self, node: fx.Node, given: dict[fx.Node, Sharded | None], place: Sharded | None) -> None:
        """`node` on this rank's own: its operands as they are here, or as `given` wants them."""
        sharder = self.sharder
        sharder.reader = node
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs),
            lambda x: sharder.operand(x, given[x]) if x in given else sharder.values[x],
        )
        sharder.set(node, sharder.call(node.target, args, node, place, kwargs), place)

    def pieces(self, node: fx.Node, counts: fx.Node, total: fx.Node) -> None:
        """With the counts of this rank's own rows."""
        sharder = self.sharder
        sharder.reader = node
        marks, share = total.args[0], self.place.size // shape_of(total.args[0])[0]
        token = replace(self.place, inner=self.place.inner // share)
        mine = sharder.sharded(marks, token)
        mine = sharder.step(total.target, mine, *total.args[1:], like=total, **total.kwargs)
        mine = sharder.step(aten.to.dtype, mine, value_of(counts).dtype, like=total)
        operands = [
            mine if x is counts else sharder.values[x] if dim >= 0 else sharder.copied(x)
            for x, dim in zip(node.args[0], named(node, "along"), strict=True)
        ]
        sharder.set(node, sharder.call(node.target, (operands, *node.args[1:]), node, self.place), self.place)

    def by_rule(self, node: fx.Node, rule: Rule, wanted: Sequence[Sharded | None]) -> None:
        """Also where another operand is sharded, by which the walk would spread it: then what is in the order would be
        gathered, as if its rows had places in the whole."""
        self.sharder.reader = node
        self.sharder.set(node, self.sharder.emit(node, rule, wanted, self.place), self.place)

    def drop(self, node: fx.Node) -> None:
        dropout(self.sharder, node)

    def sorted_back(self, node: fx.Node, order: fx.Node) -> None:
        value = self.sharder.call(aten.argsort.default, (self.sharder.values[order],), node, self.place)
        self.sharder.set(node, value, self.place)
