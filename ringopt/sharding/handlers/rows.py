"""Rows picked and moved along the sequence.

    y = x[:, 0]              ->   y      = select(fetch_rows(x_rows, "take 0:1:1"), 1, 0)      # the owner tells all
    y = x[:, 1:]             ->   y_rows = fetch_rows(x_rows, "move 1:1:10")                   # a row from a neighbour
    y = pad(x, (0, 0, 1, 0)) ->   y_rows = fetch_rows(x_rows, "move -1:1:12")
    y = x[b, last]           ->   y      = index(look_up_rows(x_rows, last), [b, arange(2)])   # rows known when it runs

A slice of many rows is a sequence of its own, sharded by the same layout: two values of equally many rows line up,
whatever they were cut from. A slice of a few rows, too few for every chunk of the layout to have one, is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import torch
import torch.fx as fx

from ringopt.dims.op_families import SPLITS
from ringopt.dims.rules import rule_of
from ringopt.distributed.mesh import ANY
from ringopt.ir.nodes import named, op_name, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import at_hand, is_open, place_of, slice_of
from ringopt.ops import operators
from ringopt.ops.fetch_rows import Piece, held, moved, taken
from ringopt.sharding.emit import Handler, Steps, enough_rows, getitems, sequence_at
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def select(sharder: Sharder, node: fx.Node) -> bool:
    """One place along the sharded dim, of which the sequence may be a factor."""
    x, dim, index = node.args[:3]
    place = sharder.placements[x]
    if place is None or dim % len(shape_of(x)) != place.dim:
        return False
    index = place_of(index, place.size)
    outer, rest = parted(index, place.length * place.inner) if place.outer > 1 else (0, index)
    row, inner = parted(rest, place.inner) if place.inner > 1 else (rest, 0)
    rows = Steps(sharder, node).fetch(sharder.values[x], place, taken((row, 1, 1)), None)
    args = (rows, place.dim, outer * place.inner + inner)
    sharder.set(node, sharder.call(aten.select.int, args, node, None), None)
    return True


def parted(index: int, size: int) -> tuple[int, int]:
    """`divmod`, which takes no open sizes."""
    return index // size, index % size


def slice_(sharder: Sharder, node: fx.Node) -> bool:
    """A slice of the sequence: its tokens move to the ranks of the result's layout."""
    x, dim = node.args[0], named(node, "dim")
    piece = slice_of(shape_of(x)[dim], *(named(node, name) for name in ("start", "end", "step")))
    return cut(sharder, node, dim, piece, node)


def narrow(sharder: Sharder, node: fx.Node) -> bool:
    """As a slice of step 1; not with a start that is a tensor."""
    x, dim, start, length = node.args[:4]
    if isinstance(start, fx.Node):
        return False
    return cut(sharder, node, dim, (place_of(start, shape_of(x)[dim]), 1, length), node)


def split(sharder: Sharder, node: fx.Node) -> bool:
    """Each element of the tuple that is used is cut out by itself."""
    dim, sizes = named(node, "dim"), [value.shape[named(node, "dim")] for value in value_of(node)]
    users = getitems(node)
    if users is None or not all(sizes[user.args[1]] for user in users):
        return False
    ends = list(accumulate(sizes))
    pieces = {user: (ends[user.args[1]] - sizes[user.args[1]], 1, sizes[user.args[1]]) for user in users}
    return all(cut(sharder, node, dim, piece, user) for user, piece in pieces.items())


def cut(sharder: Sharder, node: fx.Node, dim: int, piece: Piece, of: fx.Node) -> bool:
    """`of` (`node`, or an element of its tuple) is these rows of the argument of `node`."""
    place = sequence_at(sharder, node.args[0], [dim])
    if place is None or not piece[2]:
        return False
    return rearranged(Steps(sharder, node), place, piece, of=of)


def rearranged(
    step: Steps, place: Sharded, *pieces: Piece, of: fx.Node | None = None, local: fx.Node | None = None
) -> bool:
    """The node's rows are these of its argument (of `local`, where that is what is left of it), one after the other."""
    sharder, node = step.sharder, of or step.node
    length = sum(count for _, _, count in pieces)
    out = Sharded(place.dim, 1, length, 1) if enough_rows(sharder, length) else None
    wanted = moved(*pieces) if out is not None else taken(*pieces)
    x = sharder.values[step.node.args[0]] if local is None else local
    if out is not None and list(pieces) == [(0, 1, length)] and stays(sharder, place, out):
        here = sharder.rows(length, sharder.ranks.layout(length))
        sharder.set(node, sharder.call(aten.slice.Tensor, (x, place.dim, 0, here), node, out), out)
    else:
        sharder.set(node, step.fetch(x, place, wanted, out, node), out)
    return True


def stays(sharder: Sharder, place: Sharded, out: Sharded) -> bool:
    """Whether every rank's rows of a sequence without its end are the first of those that it has of all: what a
    convolution adds behind the end is on the last one."""
    ranks = sharder.ranks
    if ranks.group == ANY or is_open(place.length) or is_open(out.length):
        return False
    old, new = map(ranks.laid_out, (place.length, out.length))
    return all(torch.equal(held(new, rank), held(old, rank)[: len(held(new, rank))]) for rank in range(ranks.size))


def sequence_among(sharder: Sharder, x: fx.Node, dims: Sequence[int]) -> tuple[Sharded, list[int]] | None:
    """The placement of `x` where its sequence is one of `dims`, with nothing else folded into it; and all of them, from
    0."""
    place, all_dims = sharder.placements[x], [dim % len(shape_of(x)) for dim in dims]
    if place is None or place.outer * place.inner > 1 or place.dim not in all_dims:
        return None
    return place, all_dims


def roll(sharder: Sharder, node: fx.Node) -> bool:
    """Along other dims first, on each rank for itself."""
    shifts, found = list(named(node, "shifts")), sequence_among(sharder, node.args[0], named(node, "dims"))
    if found is None:
        return False
    (place, dims), step = found, Steps(sharder, node)
    others = [i for i, dim in enumerate(dims) if dim != place.dim]
    local = sharder.values[node.args[0]]
    if others:
        amounts, along = [shifts[i] for i in others], [dims[i] for i in others]
        local = step(aten.roll.default, local, amounts, along, placement=place)
    first = -sum(shift for shift, dim in zip(shifts, dims, strict=True) if dim == place.dim) % place.length
    return rearranged(step, place, (first, 1, place.length - first), (0, 1, first), local=local)


def flip(sharder: Sharder, node: fx.Node) -> bool:
    """Other dims are flipped locally; along the sequence tokens move to the ranks of the reversed order."""
    found = sequence_among(sharder, node.args[0], named(node, "dims"))
    if found is None:
        return False
    (place, dims), step = found, Steps(sharder, node)
    others, local = [dim for dim in dims if dim != place.dim], sharder.values[node.args[0]]
    if others:
        local = step(aten.flip.default, local, others, placement=place)
    return rearranged(step, place, (place.length - 1, -1, place.length), local=local)


def repeat(sharder: Sharder, node: fx.Node) -> bool:
    """The whole once more: each rank repeats its rows, and the sequence is the inner one of two factors."""
    x = node.args[0]
    place, times = sharder.placements[x], list(node.args[1])
    if place is None:
        return False
    times = [1] * (len(shape_of(x)) - len(times)) + times  # tile may say less
    dim = place.dim + len(times) - len(shape_of(x))
    out, step = replace(place, dim=dim, outer=place.outer * times[dim]), Steps(sharder, node)
    sharder.set(node, step(aten.repeat.default, sharder.values[x], times, placement=out), out)
    return True


def repeat_interleave(sharder: Sharder, node: fx.Node) -> bool:
    """Each row several times."""
    x, times, dim = node.args[0], node.args[1], named(node, "dim")
    place = sharder.placements[x]
    if place is None or node.target is not aten.repeat_interleave.self_int or dim is None:
        return False
    out, step = replace(place, inner=place.inner * times), Steps(sharder, node)
    sharder.set(node, step(node.target, sharder.values[x], times, place.dim, placement=out), out)
    return True


def pad(sharder: Sharder, node: fx.Node) -> bool:
    """Padding of the sequence by zeros or by rows of its own; of other dims beside it, on each rank for itself."""
    x, amounts = node.args[0], list(named(node, "pad"))
    place = sharder.placements[x]
    at = 2 * (len(shape_of(node)) - 1 - place.dim) if place is not None else len(amounts)
    if place is None or place.outer * place.inner > 1 or not any(amounts[at : at + 2]):
        return False
    pieces = _padded(node, amounts[at], amounts[at + 1], place.length)
    if pieces is None:
        return False
    step, local = Steps(sharder, node), sharder.values[x]
    others = [*amounts[:at], 0, 0, *amounts[at + 2 :]]
    if any(others):
        rest = node.args[2:] if op_name(node) == "pad" else (named(node, "value"),)
        local = step(node.target, local, others, *rest, placement=place)
    return rearranged(step, place, *pieces, local=local)


def _padded(node: fx.Node, before: int, after: int, n: int) -> tuple[Piece, ...] | None:
    mode = "constant" if op_name(node) == "constant_pad_nd" else named(node, "mode")
    if mode == "constant" and not named(node, "value"):
        return ((-before, 1, n + before + after),)
    if mode == "constant" or min(before, after) < 0:
        return None
    first, last = {
        "circular": ((n - before, 1, before), (0, 1, after)),
        "replicate": ((0, 0, before), (n - 1, 0, after)),
        "reflect": ((before, -1, before), (n - 2, -1, after)),
    }[mode]
    return first, (0, 1, n), last


def diff(sharder: Sharder, node: fx.Node) -> bool:
    """Each row less the one before it."""
    x, place = node.args[0], sequence_at(sharder, node.args[0], [named(node, "dim")])
    plain = (named(node, "n"), named(node, "prepend"), named(node, "append")) == (1, None, None)
    if place is None or not plain or not enough_rows(sharder, place.length - 1):
        return False
    out, step = Sharded(place.dim, 1, place.length - 1, 1), Steps(sharder, node)
    later, earlier = (step.fetch(sharder.values[x], place, moved((a, 1, out.length)), out) for a in (1, 0))
    op = aten.ne.Tensor if value_of(x).dtype == torch.bool else aten.sub.Tensor
    sharder.set(node, sharder.call(op, (later, earlier), node, out), out)
    return True


# ---- by index ------------------------------------------------------------------------------------------------------
def index(sharder: Sharder, node: fx.Node) -> bool:
    """x[..., i, ...], of which `i` counts rows of the sequence."""
    x, indices = node.args
    place = sharder.placements[x]
    if place is None or len(indices) <= place.dim or indices[place.dim] is None:
        return False
    found = looked_up(sharder, node, indices[place.dim])
    if found is None:
        return from_whole(sharder, node, indices[place.dim], -1)
    others = [None if i is None else sharder.replicated(i) for i in indices]
    others[place.dim] = found[1]
    sharder.set(node, sharder.call(node.target, (found[0], others), node, None), None)
    return True


def index_select(sharder: Sharder, node: fx.Node) -> bool:
    """index_select, and gather along the sequence."""
    x, dim, rows = node.args[:3]
    if sequence_at(sharder, x, [dim]) is None:
        return False
    found = looked_up(sharder, node, rows)
    if found is None:
        return from_whole(sharder, node, rows, dim if op_name(node) == "gather" else 0)
    sharder.set(node, sharder.call(node.target, (found[0], dim, found[1]), node, None), None)
    return True


def take_along_dim(sharder: Sharder, node: fx.Node) -> bool:
    """A gather with indices that broadcast: tokens are looked up by their indices."""
    x, rows, dim = node.args[0], node.args[1], named(node, "dim")
    if dim is None or sequence_at(sharder, x, [dim]) is None:
        return False
    found = looked_up(sharder, node, rows)
    if found is None:
        return from_whole(sharder, node, rows, dim)
    sharder.set(node, sharder.call(node.target, (*found, dim), node, None), None)
    return True


def from_whole(sharder: Sharder, node: fx.Node, rows: fx.Node, dim: int) -> bool:
    """As many rows as there are, in an order known only when it runs (tokens shuffled, or kept at random): they come
    from the gathered sequence, but each rank takes only its own of them. `dim`: of `rows`, along which they count."""
    rule, operands, sizes = rule_of(node), list(tensor_args(node)), shape_of(rows)
    place = sharder.placements[node.args[0]]
    if rule is None or place is None or place.outer * place.inner > 1 or len(rule.operands) != len(operands):
        return False
    dim = dim % len(sizes) if sizes else 0
    if sharder.placements[rows] is not None or not sizes or not enough_rows(sharder, sizes[dim]):
        return False
    out = rule.push(operands.index(rows, 1), Sharded(dim, 1, sizes[dim], 1))
    wanted = rule.pull(out) if out is not None else None
    if out is None or wanted is None or wanted[0] is not None or not sharder.consistent(rule, wanted, out):
        return False
    sharder.reader = node
    if node.args[0] in sharder.sources:  # to gather its rows is less than to compute all that made it
        sharder.converted.pop((node.args[0], "whole"), None)
    sharder.set(node, sharder.emit(node, rule, wanted, out), out)
    return True


def looked_up(sharder: Sharder, node: fx.Node, rows: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The rows asked for, from their owners, and what `rows` is as an index into these. None where so many are asked
    for that every rank would hold more than its shard: then the sequence is better gathered."""
    x, once = node.args[0], without_repeats(rows)
    count, place = prod(once), sharder.placements[x]
    numbers = value_of(rows).dtype in (torch.int32, torch.int64)
    if place is None or place.outer * place.inner > 1 or not numbers:
        return None
    if at_hand(count) * sharder.ranks.size > at_hand(place.length):
        return None
    step = Steps(sharder, node)
    asked = sharder.replicated(rows)
    for dim, stride in enumerate(value_of(rows).stride()):
        if stride == 0:
            asked = step(aten.narrow.default, asked, dim, 0, 1)
    flat = step(aten.reshape.default, step(aten.to.dtype, asked, torch.int64), [-1])
    dim, length, layout = place.dim, place.length, sharder.ranks.layout(place.length)
    given = {"x": sharder.values[x], "rows": flat, "dim": dim, "length": length, "layout": layout}
    picked = step.over_ranks(operators.look_up_rows.default, **given)
    order = step(aten.arange.default, count, device=value_of(rows).device)
    return picked, step(aten.expand.default, step(aten.reshape.default, order, once), list(shape_of(rows)))


def without_repeats(rows: fx.Node) -> list[int]:
    """The sizes of an index without what `expand` repeats, which strides of 0 tell."""
    return [1 if stride == 0 else size for size, stride in zip(shape_of(rows), value_of(rows).stride(), strict=True)]


ROWS: dict[str, Handler] = {
    "index": index,
    **dict.fromkeys(("index_select", "gather"), index_select),
    "take_along_dim": take_along_dim,
    "select": select,
    "slice": slice_,
    "narrow": narrow,
    **dict.fromkeys(SPLITS, split),
    "roll": roll,
    "flip": flip,
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    "diff": diff,
}
