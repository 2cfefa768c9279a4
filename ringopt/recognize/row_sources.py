"""Tensors over queries and keys that the program computes from data, and that cannot be read element by element.

    scores + matmul(q, places)[..., k - q]          keys of relative places
    sdpa(q, k, v, mask_of(pairs))                    a bias made of a representation of pairs

They are computed as the program has it, but a rank needs only the rows of its own queries. A term reads them at the
axis r, which counts the rows that a rank holds. A skew (pad, reshape so that rows shift, slice; Music Transformer,
Huang et al. 2018; Transformer-XL, Dai et al. 2019, appendix B) of as many places as keys runs over into the row of the
next query: that is read at r in a copy that is moved by one row.

    T[q + (k - q + n) // (n + 1), j]   ->   where((k - q + n) // (n + 1) == 1, moved T[r, j], T[r, j])

In a picture of w columns a place is a row and a column of it (positions by both: Li et al. 2022, MViTv2, as in SAM):

    T[q // w, q % w, k // w]           ->   T[r, k // w] of a view with one dim for both
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.fx as fx

from ringopt.expr.simplify import apply, compare, substitute, where
from ringopt.expr.terms import Affine, Load, Term, affine, axis, load, loads
from ringopt.ir.nodes import op_name, origin, shape_of, value_of
from ringopt.ir.notes import ROWS_OF
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.recognize.lift import Cone, Unreadable
from ringopt.recognize.lift_views import addends, plus

aten = torch.ops.aten


def element(cone: Cone, node: fx.Node, index: Sequence[Term], never: Collection[fx.Node] = ()) -> Term:
    """The element of `node`; tables that end the climb are added to the stops of `cone`. Raises Unreadable where that
    would be one of `never`."""
    while True:
        try:
            return cone.at(node, index)
        except Unreadable as problem:
            table = problem.refusal.node
            if table is None or table in never or table in cone.stops:
                raise
            cone.stops = {*cone.stops, table}
            cone.found.clear()


class OwnRows:
    """Of the tables of one graph. `carries` says which nodes have a gradient; copies are entered there."""

    def __init__(self, carries: MutableMapping[fx.Node, bool]):
        self.carries = carries

    def of(self, term: Term, tables: Collection[fx.Node], cone: Cone) -> Term:
        """`term`, reading `tables` at the query's own row and the one beside it. Raises Unreadable where it reads
        others."""
        read: dict[Term, Term] = {each: self.near(each, cone) for each in loads(term) if each.source in tables}
        return substitute(term, leaves=read) if read else term

    def near(self, table: Load, cone: Cone) -> Term:
        """An element, at r of the table or of a copy of it."""
        table = self.merged(table)
        found = [(dim, *row) for dim, place in enumerate(table.index) if (row := row_of(place, cone)) is not None]
        if not found and axis("k") in table.index:
            return table
        if len(found) != 1:
            name = op_name(table.source) or table.source.name
            raise Unreadable(
                f"{name} makes a tensor {list(shape_of(table.source))} over queries and keys from data, and it is not "
                "read a row at a time",
                table.source,
            )
        ((dim, away, rows),) = found
        index = [axis("r") if other == dim else place for other, place in enumerate(table.index)]
        read = [load(self.moved(table.source, dim, by, cone.sizes["q"]), index, table.dtype) for by in rows]
        return read[0] if len(read) == 1 else where(compare("eq", away, rows[1]), read[1], read[0], table.dtype)

    def merged(self, table: Load) -> Load:
        """The same element of a view in which the row and the column of a query's place in a picture are one dim."""
        source, place = table.source, axis("q")
        for dim in range(len(table.index) - 1):
            width = shape_of(source)[dim + 1]
            if is_open(width):  # a term that holds it would ask for its number
                continue
            both = tuple(apply(op, [place, width], place.dtype) for op in ("floor_divide", "remainder"))
            if table.index[dim : dim + 2] == both:
                index = [*table.index[:dim], place, *table.index[dim + 2 :]]
                return load(self.flat(source, dim), index, table.dtype)
        return table

    def flat(self, table: fx.Node, dim: int) -> fx.Node:
        """A table whose `dim` and the next are one."""
        sizes = shape_of(table)
        shape = [*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]]
        return self.copied(table, "rows", aten.reshape.default, shape, shape)

    def moved(self, table: fx.Node, dim: int, first: int, count: int) -> fx.Node:
        """`count` rows of a table, from `first` on; there are zeros beyond its ends, which nothing reads."""
        size = shape_of(table)[dim]
        if first == 0 and same(size, count):
            return table
        pad = [0, 0] * (len(shape_of(table)) - 1 - dim) + [-first, first + count - size]
        shape = [count if other == dim else n for other, n in enumerate(shape_of(table))]
        return self.copied(table, "moved", aten.constant_pad_nd.default, pad, shape)

    def copied(self, table: fx.Node, name: str, target: Any, given: list[int], shape: list[int]) -> fx.Node:
        """The table in another form, of this shape, right behind it."""
        with table.graph.inserting_after(table):
            name = f"{table.name}_{name}"
            copy = table.graph.create_node("call_function", target, (table, given), name=name)
        copy.meta = origin(table) | {ROWS_OF: table, "val": value_of(table).new_empty(shape)}
        self.carries[copy] = self.carries[table]
        return copy


def row_of(place: Term, cone: Cone) -> tuple[Term, range] | None:
    """How far from the query's own row a place is, and between which bounds, if these are one or two rows."""
    parts = list(addends(place))
    if not any(isinstance(part, Affine) and dict(part.steps).get("q") == 1 for part in parts):
        return None
    opposite: Term = affine({"q": -1}, 0)
    away = reduce(plus, parts, opposite)
    least, most = cone.bounds(away)
    return (away, range(least, most + 1)) if most - least <= 1 else None
