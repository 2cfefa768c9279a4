"""Where a graph without attention and recurrences begins: at operators that mix the tokens of a whole sequence.

    h = linear(x);  y = cumsum(h, 1)   ->   x_rows = scatter(x);  h = linear(x_rows);  y = prefix_sum(h)

Prefix sums (linear attention as a cumsum, minGRU in logarithms) and Fourier transforms (long convolutions, state spaces
as kernels, FNet) say which dim is the sequence. How they are computed on shards their handlers say (halo.py,
by_columns.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.dims.op_families import RUNNING, TRANSFORMS
from ringopt.dims.origin import is_row, origins
from ringopt.ir.nodes import named, op_name, shape_of, source_line, value_of
from ringopt.ir.placement import Layouts, Sharded
from ringopt.sharding.behind_breaks import above_products
from ringopt.sharding.handlers.demands import worked_on

ALONG = frozenset((*RUNNING, *TRANSFORMS, "cumsum"))


def mixed_rows(graph: fx.Graph, layouts: Layouts, ranks: int) -> dict[fx.Node, Sharded]:
    """What such operators read, and how it may be spread: what products have made, or are made of."""
    found: dict[fx.Node, Sharded] = {}
    near = worked_on(graph) | above_products(graph)
    for node in graph.nodes:
        if op_name(node) not in ALONG or node not in near:
            continue
        x = node.args[0]
        dim = named(node, "dim") % len(shape_of(x))
        place = Sharded(dim, 1, shape_of(x)[dim], 1)
        floating = value_of(x).is_floating_point() or value_of(x).is_complex()
        if not floating or not any(map(is_row, origins(x, dim))):
            continue
        if place.length >= chunks_per_rank(layouts.of(place.length)) * ranks:
            found[x] = place
    return found


def note_of_mixing(rows: Mapping[fx.Node, Sharded]) -> list[str]:
    """For the report."""
    users = [user for x in rows for user in x.users if op_name(user) in ALONG]
    what = ", ".join(dict.fromkeys(f"{op_name(user)} ({source_line(user)})" for user in users))
    return [f"no attention and no recurrence was found: tokens are sharded along the dim of {what}"] if rows else []
