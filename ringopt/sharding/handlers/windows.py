"""Windows of a sequence, each attended by itself: whole ones are spread, where nothing was cut before them.

    windows = view(x, [B * 8, 16, D])      # S(1 of 8x16x1) is what attention over 16 rows would want of x;
    y = attention(windows, ...)            # of S(1 of 1x8x16), windows, no rank needs anything of another

What attention demands is followed up to the reshape that made the windows, and what that reads is cut there. The first
dim is never taken for a sequence of windows, for it is the batch, or has it folded in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.fx as fx

from ringopt.dims.rule import Rule, ViewRule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import op_name, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.sharding.handlers.demands import Demand, above, climb
from ringopt.sharding.handlers.joins import JOINS
from ringopt.sharding.handlers.rows import ROWS
from ringopt.sharding.sharder import Sharder

Path = tuple[tuple[fx.Node, Rule, int], ...]  # the way down: a node, its rule, and the operand by which it is reached

MOVES = frozenset((*ROWS, *JOINS))  # ops that move the places of a dim, or some of them, and leave it that dim


def windows(
    sharder: Sharder, sites: Iterable[tuple[bool, Iterable[Demand]]], handled: frozenset[str], worked: set[fx.Node]
) -> list[Demand]:
    """How to spread the sequences that are cut into windows on the way to `sites`: whether an attention may be spread
    over the batch, and what it demands of q, k and v. Past ops among `handled` too, that mix rows. Not for one whose
    keys are those of several windows, say of all rows: every rank would compute them all. (What no op among `worked`
    makes, as learned queries, every rank has.) Nor as windows of another that is not spread so: it would gather."""
    alone, others = list[list[Demand]](), list[list[Demand]]()
    known = [(may, list(demands)) for may, demands in sites]
    if not any_to_cut(sharder, [demand for may, demands in known if may for demand in demands], handled):
        return []  # so that no site of a deep model is followed up by itself
    for may, demands in known:
        (alone if may and of_windows(sharder, demands, handled, worked) else others).append(demands)
    barred = {place for _, place in cuts(sharder, others, handled)[0].values()}
    kept = cuts(sharder, alone, handled)[0].values()
    return [(node, place) for node, place in kept if place not in barred]


def of_windows(sharder: Sharder, site: list[Demand], handled: frozenset[str], worked: set[fx.Node]) -> bool:
    """Whether what the site demands is of windows, and joined with nothing else of what these are cut from."""
    found, below = cuts(sharder, [site], handled)
    pending, reached, whole = list(found), set[Demand](), set[fx.Node]()
    while pending:
        demand = pending.pop()
        if demand not in reached:
            reached.add(demand)
            pending += below[demand]
    nodes = [node for node, _ in found.values()]
    while nodes:
        node = nodes.pop()
        if node not in whole:
            whole.add(node)
            nodes += node.all_input_nodes
    windowed = all(wanted in reached or wanted[0] not in worked for wanted in site)
    return windowed and whole.isdisjoint(node for node, _ in below)


def any_to_cut(sharder: Sharder, demands: Iterable[Demand], handled: frozenset[str]) -> bool:
    """Whether above any of `demands` there is a reshape of which the ranks could have equally many windows."""
    pending, seen = list(demands), set[Demand]()
    while pending:
        demand = pending.pop()
        node, place = demand
        if demand in seen or node.op != "call_function":
            continue
        seen.add(demand)
        viewed, climbed = isinstance(rule_of(node), ViewRule), climb(sharder, node, place)
        if climbed is not None:
            if viewed and any(shared_evenly(sharder, at) for _, at in climbed):
                return True
            pending += climbed
        elif not viewed:
            pending += (each for each in above(sharder, node, place, handled) if each[1].dim == place.dim)
    return False


def cuts(
    sharder: Sharder, sites: Sequence[Sequence[Demand]], handled: frozenset[str]
) -> tuple[dict[Demand, Demand], dict[Demand, list[Demand]]]:
    """Demands above which windows are made, with what is to be spread instead; and those that led to each demand."""
    pending: list[tuple[Demand, Path, int]] = [(demand, (), leading(site)) for site in sites for demand in site]
    below: dict[Demand, list[Demand]] = {demand: [] for site in sites for demand in site}
    seen, found = set[Demand](), dict[Demand, Demand]()
    while pending:
        demand, path, dims = pending.pop()
        node, place = demand
        if demand in seen or node.op != "call_function":
            continue
        seen.add(demand)
        rule, operands = rule_of(node), list(tensor_args(node))
        climbed = climb(sharder, node, place)
        further: list[tuple[Demand, Path, int]] = []
        if climbed is None or rule is None:  # an op that mixes rows, of as many dims
            kept = () if isinstance(rule, ViewRule) else above(sharder, node, place, handled)
            further += ((each, path, dims) for each in kept if each[1].dim == place.dim)
        else:
            for operand, at in climbed:
                down = ((node, rule, operands.index(operand)), *path)
                whole = cut_whole(sharder, at, down, dims) if isinstance(rule, ViewRule) else None
                if whole is not None:
                    found[demand] = operand, whole
                else:
                    further.append(((operand, at), down, dims))
        for each, *_ in further:
            below.setdefault(each, []).append(demand)
        pending += further
    return found, below


def leading(site: Sequence[Demand]) -> int:
    """Dims of q, k and v that may be of windows: the batch, and the heads where all have as many (GQA has not)."""
    heads = [shape_of(node)[1] for node, _ in site]
    return 2 if all(same(count, heads[0]) for count in heads) else 1


def cut_whole(sharder: Sharder, place: Sharded, down: Path, dims: int) -> Sharded | None:
    """Windows in the place of rows of each, where ranks can have equally many, and attention finds them among its first
    `dims`."""
    if not shared_evenly(sharder, place):
        return None
    whole = at = Sharded(place.dim, 1, place.outer, place.length * place.inner)
    for node, rule, index in down:
        pushed = rule.push(index, at)
        stays = op_name(node) in MOVES and len(shape_of(node)) == len(shape_of(next(tensor_args(node))))
        if pushed is None and not stays:
            return None
        at = pushed or at
    return whole if at.dim < dims else None


def shared_evenly(sharder: Sharder, place: Sharded) -> bool:
    """Whether ranks can have equally many of the windows that `place` is one row of each of."""
    if sharder.ranks.asks or place.dim == 0 or any(map(is_open, (place.outer, place.length, place.inner))):
        return False
    least = sharder.ranks.least(place.outer)
    return place.outer >= least and place.outer % least == 0
