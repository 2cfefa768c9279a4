"""Reshapes that cut the sequence: it is spread anew, along one of the dims that it is cut into.

y = view(x, [B, 4, 6, D])   ->   x_windows = respread(x_rows, 1, (1, 24, 1), (1, 4, 6))      # whole windows
                                 y_rows    = reshape(x_windows, [B, -1, 6, D])
"""

from __future__ import annotations

from math import prod

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import is_grained
from ringopt.dims.rule import ViewRule
from ringopt.dims.rules import rule_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.sharding.emit import enough_rows
from ringopt.sharding.sharder import Sharder


def reshaped(sharder: Sharder, node: fx.Node) -> bool:
    """The outermost dim that ranks can share about evenly, or else the longest: windows of a sequence are spread whole,
    for inside one rows are mixed."""
    rule = rule_of(node)
    place = sharder.placements[node.args[0]] if isinstance(rule, ViewRule) else None
    if not isinstance(rule, ViewRule) or place is None:
        return False
    first = batch_dims(rule, place.dim)
    if sharder.ranks.asks:  # other rows may be too few for the ranks that there will be
        return is_grained(sharder.ranks.layout(place.length)) and in_units(sharder, node, rule, place)
    if any(map(is_open, (*rule.old[first:], *rule.new[first:]))):
        return in_units(sharder, node, rule, place)
    found: list[tuple[Sharded, Sharded]] = []
    before = prod(rule.old[first : place.dim]) * place.outer  # of batch rows, which may be folded into the same dim
    for dim, size in enumerate(rule.new[first:], first):
        outer = max(1, before // max(1, prod(rule.new[first:dim])))
        out = Sharded(dim, outer, size // outer, 1)
        wanted = rule.pull(out) if size % outer == 0 and enough_rows(sharder, out.length) else None
        if wanted is not None and wanted[0] is not None and wanted[0].dim == place.dim:
            found.append((out, wanted[0]))
    if not found:
        return False
    still = [pair for pair in found if sharder.ranks.same_rows(place, pair[1])]  # nothing is sent
    even = still or [pair for pair in found if evenly(sharder, pair[0].length)]
    out, source = even[0] if even else max(found, key=lambda pair: pair[0].length)
    sharder.reader = node
    sharder.set(node, sharder.emit(node, rule, [source], out), out)
    return True


def in_units(sharder: Sharder, node: fx.Node, rule: ViewRule, place: Sharded) -> bool:
    """Of open sizes, or for any ranks: the dim of whole chunks, where ranks hold those, so that nothing is sent."""
    for dim, size in enumerate(rule.new):
        out = Sharded(dim, 1, size, 1)
        wanted = rule.pull(out)
        source = wanted[0] if wanted is not None else None
        if source is not None and source.dim == place.dim and sharder.ranks.same_rows(place, source):
            sharder.reader = node
            sharder.set(node, sharder.emit(node, rule, [source], out), out)
            return True
    return False


def batch_dims(rule: ViewRule, last: int) -> int:
    """How many dims before `last` are as they were; their sizes may be open."""
    pairs = zip(rule.old[:last], rule.new, strict=False)
    return next((dim for dim, pair in enumerate(pairs) if not same(*pair)), min(last, len(rule.new)))


def evenly(sharder: Sharder, length: int) -> bool:
    """Whether no rank has more than 5/4 of its share."""
    ranks = sharder.ranks
    layout = ranks.laid_out(length)
    return max(sum(map(len, layout.ranges(rank))) for rank in range(ranks.size)) * ranks.size <= 1.25 * length


def without_outer_factor(sharder: Sharder, x: fx.Node) -> bool:
    """Spreads `x` along all places of its sharded dim, where the sequence was a factor of it."""
    place = sharder.placements.get(x)
    if place is None or place.outer * place.inner == 1:
        return False
    whole = Sharded(place.dim, 1, place.size, 1)
    moved = sharder.respread(x, whole)
    if moved is not None:
        sharder.set(x, moved, whole)
    return moved is not None
