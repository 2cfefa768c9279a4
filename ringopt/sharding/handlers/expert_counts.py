"""How many rows go to each expert, counted before they are sorted.

    counts = zeros([n, E]).scatter(1, chosen, 1).sum(0)            counts = one_hot(chosen, E).sum((0, 1))

Who splits sorted rows by these counts means the rows of each expert. On a rank the same is true of its own rows and
the counts of these: the sum over them, which no rank is told.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.dims.op_families import CASTS, COPIES, RESHAPES
from ringopt.ir.nodes import named, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import same

SAME = (*RESHAPES, *COPIES, *CASTS, "unsqueeze", "detach")
ZEROS = ("zeros", "zeros_like", "new_zeros")


def sum_of_marks(node: fx.Node, numbers: fx.Node) -> fx.Node | None:
    """The sum that makes `node` the counts of each of `numbers`, which are places in a row of experts, from 0 on; None
    where it is not known to."""
    total = without_casts(node)
    if op_name(total) != "sum" or named(total, "keepdim"):
        return None
    marks = without_casts(total.args[0])
    dims = [dim % len(shape_of(marks)) for dim in (total.args[1:2] or [None])[0] or ()]
    if sorted(dims) != list(range(len(shape_of(marks)) - 1)):
        return None
    chosen = one_hot(marks) if op_name(marks) == "one_hot" else scattered(marks)
    whole = chosen is not None and unshaped(chosen) is unshaped(numbers)
    return total if whole else None


def one_hot(marks: fx.Node) -> fx.Node:
    """Of which numbers."""
    found: fx.Node = marks.args[0]
    return found


def scattered(marks: fx.Node) -> fx.Node | None:
    """The numbers at which ones were written into rows of zeros: different ones in each row, as topk gives them."""
    if op_name(marks) != "scatter" or len(shape_of(marks)) != 2 or marks.args[1] not in (1, -1) or marks.args[3] != 1:
        return None
    index: fx.Node = marks.args[2]
    picks = unshaped(index)
    best = op_name(picks) == "getitem" and op_name(picks.args[0]) == "topk" and picks.args[1] == 1
    last = best and named(picks.args[0], "dim") in (-1, len(shape_of(picks)) - 1)
    rows = shape_of(picks)[-1:] == shape_of(index)[-1:] and same(shape_of(index)[0], shape_of(marks)[0])
    return index if op_name(marks.args[0]) in ZEROS and last and rows else None


def without_casts(node: fx.Node) -> fx.Node:
    """Behind casts to types that hold the same counts."""
    while op_name(node) in (*CASTS, "detach", *COPIES) and value_of(node).dtype.itemsize >= 4:
        node = node.args[0]
    return node


def unshaped(node: fx.Node) -> fx.Node:
    """The same numbers, in whatever shape and type they were."""
    while op_name(node) in SAME:
        node = node.args[0]
    return node
