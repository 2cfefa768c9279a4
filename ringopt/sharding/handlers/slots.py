"""Slots: rows of their own that are sums over all tokens, and that layers then work on.

    z = einsum("tec,td->ecd", dispatch, x)   ->   z = all_reduce(einsum(...));  z_rows = scatter(z, dim c)
    y = bmm(gelu(bmm(z, w1)), w2)            ->   y_rows = bmm(gelu(bmm(z_rows, w1)), w2)
    out = einsum("tec,ecd->td", combine, y)  ->   out_rows = einsum(..., combine_rows, gather(y_rows))

Experts of a given capacity (Switch, GShard) and soft mixtures of experts have about as many slots as there are tokens.
Every rank has all of what is summed up, so the layers would be computed whole on every rank. To cut it sends nothing;
what the layers give is gathered.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.dims.contraction_rules import PRODUCTS
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import op_name, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.work import product
from ringopt.sharding.sharder import Sharder

# The part of the graph's FLOPs from which on a gather is worth it; and how many products with weights make layers.
LEAST_PART, LAYERS = 0.02, 2


def slots(sharder: Sharder, worked: set[fx.Node]) -> dict[fx.Node, Sharded]:
    """How to cut sums over tokens that layers work on. `worked`: what is made of activations."""
    sums = [node for node in worked if is_sum(node, worked)]
    least, found = LEAST_PART * sum(map(flops, worked if sums else ())), dict[fx.Node, Sharded]()
    for node in sums:
        ways = [at for at in rows_of(sharder, node) if layers_work_on(sharder, node, at, worked, least)]
        if ways:
            found[node] = max(ways, key=lambda at: at_hand(at.length))  # so that ranks have about equally many
    return found


def is_sum(node: fx.Node, worked: set[fx.Node]) -> bool:
    """Whether it is a product of two activations that sums over dims of both."""
    rule = rule_of(node) if op_name(node) in PRODUCTS else None
    return rule is not None and bool(rule.summed) and all(x in worked for x in tensor_args(node))


def rows_of(sharder: Sharder, node: fx.Node) -> list[Sharded]:
    """Its dims that one operand alone has, and that are long enough for the ranks."""
    rule = rule_of(node)
    dims = [dim for operand in (rule.operands if rule is not None else ()) for dim in operand]
    alone = [dim for dim in dict.fromkeys(dims) if dims.count(dim) == 1]
    sizes = [(dim, shape_of(node)[dim]) for dim in alone]
    return [Sharded(dim, 1, size, 1) for dim, size in sizes if at_hand(size) >= sharder.ranks.least(size)]


def layers_work_on(sharder: Sharder, node: fx.Node, place: Sharded, worked: set[fx.Node], least: float) -> bool:
    """Whether products with weights, of more than `least` FLOPs, work on rows `place` of `node` alone, which no
    attention demands."""
    rows, pending, count, work = {node: place}, [node], 0, 0
    while pending:
        x = pending.pop()
        for user in x.users:
            if user.target is operators.attention.default:
                return False
            out = pushed(sharder, user, x, rows[x]) if user not in rows else None
            if out is None:
                continue
            if op_name(user) in PRODUCTS and any(other not in worked for other in tensor_args(user)):
                count, work = count + 1, work + flops(user)
            if count >= LAYERS and work > least:
                return True
            rows[user] = out
            pending.append(user)
    return False


def pushed(sharder: Sharder, node: fx.Node, x: fx.Node, place: Sharded) -> Sharded | None:
    """The rows of `node` that are made of rows `place` of `x`, token by token."""
    rule, operands = rule_of(node), list(tensor_args(node))
    if rule is None or len(rule.operands) != len(operands):
        return None
    out = rule.push(operands.index(x), place)
    wanted = rule.pull(out) if out is not None else None
    return out if out is not None and wanted is not None and sharder.consistent(rule, wanted, out) else None


def flops(node: fx.Node) -> int:
    """Of a product, at the sizes at hand; 0 of what is none."""
    return product(node, SizedCall.of(node, 1, 0, number=at_hand)) if op_name(node) in PRODUCTS else 0
