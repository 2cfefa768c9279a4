"""Tensors over queries and keys that the program computes from data, and that cannot be read element by element.

    scores + matmul(q, places)[..., k - q]          keys of relative places
    sdpa(q, k, v, mask_of(pairs))                    a bias made of a representation of pairs

They are computed as the program has it, but a rank needs only the rows of its own queries. A term reads them at the
axis r, which counts the rows that a rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from ringopt.graph.cone import Cone, Unreadable
from ringopt.graph.nodes import op_name, shape_of
from ringopt.graph.term_folding import substitute
from ringopt.graph.terms import Term, axis, load, loads


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


def own_rows(term: Term, tables: Collection[fx.Node]) -> Term:
    """`term`, reading `tables` at the query's own row. Raises Unreadable where it reads another."""
    leaves: dict[Term, Term] = {}
    for each in loads(term):
        if each.source not in tables:
            continue
        at = [dim for dim, place in enumerate(each.index) if place is axis("q")]
        if len(at) != 1:
            name = op_name(each.source) or each.source.name
            raise Unreadable(
                f"{name} makes a tensor {list(shape_of(each.source))} over queries and keys from data, and it is not "
                "read a row at a time",
                each.source,
            )
        index = [axis("r") if dim == at[0] else place for dim, place in enumerate(each.index)]
        leaves[each] = load(each.source, index, each.dtype)
    return substitute(term, leaves=leaves) if leaves else term
