"""Where a program works chunk by chunk, ranks hold whole chunks.

    y = scan(x.view(B, n // 64, 64, D), ...)        # x [B, n, D] is cut between chunks of 64: "zigzag:64x6" for n = 384

Then the reshape is one of what a rank has, and nothing inside of a chunk is sent. How many rows a step takes is read
off the graph: the demand of a scan for its steps climbs to a reshape that makes steps of rows. Where there is a chunk
for every rank and none for every segment of a zigzag, the sequence is contiguous. Where the number of chunks is open,
it is that of the length, "zigzag:64".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.dims.rules import rule_of
from ringopt.distributed.mesh import Mesh
from ringopt.ir.nodes import op_name, shape_of, tensor_args
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.symbolic_sizes import at_hand, divides, formula, is_open, plain, same
from ringopt.scans.affine import AffineStep, prove_affine
from ringopt.scans.call import ScanCall
from ringopt.scans.not_affine import pays_in_turn

Grain = tuple[int, int]  # rows of a unit, and how many units
ONE_MORE = frozenset({"cat", "constant_pad_nd", "pad", "slice", "narrow"})


def with_grains(layouts: Layouts, scans: Iterable[fx.Node], mesh: Mesh, given: bool, asked: str) -> Layouts:
    """The layouts, cut between chunks where scans that ranks can share work chunk by chunk. Inputs that are `given` in
    rows are cut already. `asked` is the layout that options name, or "auto"."""
    if given:
        return layouts
    shared = [node for node in scans if is_shared(ScanCall.of(node), mesh.size)]
    least = 1 if asked == "auto" else chunks_per_rank(asked)
    found = {
        (rows, formula(units), own): (rows, units, own)
        for each in grains_of(shared, least * mesh.size)
        for rows, units, own in laid_out(each, layouts, mesh.size)
    }
    return replace(layouts, grains=tuple(found.values()))


def laid_out(grain: Grain, layouts: Layouts, ranks: int) -> Iterator[tuple[int, int, str]]:
    """With the layout of a sequence of such units, and of the steps that there are for them; "" for that which it has
    otherwise."""
    rows, units = grain
    if units >= chunks_per_rank(layouts.plain(rows * units)) * ranks:
        yield rows, units, ""
    else:
        yield from ((rows, units, "contiguous"), (1, units, "contiguous"))


def is_shared(call: ScanCall, ranks: int) -> bool:
    """Whether each rank has steps of its own."""
    affine = isinstance(prove_affine(call.text, call.kinds), AffineStep)
    return affine or pays_in_turn(call.text, call.kinds, call.steps.length, ranks)


def grains_of(scans: Iterable[fx.Node], least: int) -> tuple[Grain, ...]:
    """Of the sequences that have steps of several rows; fewer than `least` units are too few to be cut between."""
    every = (found for node in scans for found in chunks_of(node))
    chunks = {(rows, formula(units)): (rows, units) for rows, units in every if units >= least}
    found = list[Grain]()
    for rows, steps in sorted(chunks.values(), key=lambda each: (each[0], at_hand(each[1])), reverse=True):
        larger = [(grain, units) for grain, units in found if are_near(rows * steps, grain * units, grain)]
        if not larger:
            found.append((rows, steps))
        elif larger[0][0] % rows == 0 and larger[0][0] > rows:  # its steps are cut where the larger chunks end
            found.append((larger[0][0] // rows, larger[0][1]))
    return tuple(found)


def are_near(one: int, other: int, grain: int) -> bool:
    """Whether two lengths surely differ by less than a unit."""
    return same(one, other) if is_open(one) or is_open(other) else abs(one - other) < grain


def chunks_of(scan: fx.Node) -> Iterator[Grain]:
    """How many rows a unit has, and how many units there are; (1, units) where steps are one more or less."""
    xs = ScanCall.of(scan).xs
    steps = shape_of(xs[0])[0]
    pending, seen = [(x, Sharded(0, 1, steps, 1)) for x in xs], set[fx.Node]()
    while pending:
        node, place = pending.pop()
        if place.inner > 1 and not is_open(place.inner):
            yield int(place.inner), plain(place.length)
            if not is_open(steps) and place.length != steps:
                yield 1, int(place.length)
        elif node not in seen and place.inner == 1:
            seen.add(node)
            pending += above(node, place)


def inside_chunks(node: fx.Node, rows: Sharded, grains: Sequence[tuple[int, int, str]]) -> bool:
    """Whether rows of a value are those inside of chunks that ranks hold whole."""
    pending, seen = [(node, rows)], set[fx.Node]()
    while pending:
        each, place = pending.pop()
        if any(grain > 1 and same(grain, place.length) and divides(units, place.outer) for grain, units, _ in grains):
            return True
        if each not in seen:
            seen.add(each)
            pending += climbed(each, place)
    return False


def above(node: fx.Node, place: Sharded) -> Iterator[tuple[fx.Node, Sharded]]:
    """How the demand climbs over an op that works row by row, or that puts a row before or behind them, or drops it."""
    yield from climbed(node, place)
    if op_name(node) in ONE_MORE and place.outer * place.inner == 1:
        for operand in tensor_args(node):
            rows = shape_of(operand)[place.dim] if len(shape_of(operand)) == len(shape_of(node)) else 0
            if not is_open(rows) and abs(rows - place.length) == 1:
                yield operand, Sharded(place.dim, 1, rows, 1)


def climbed(node: fx.Node, place: Sharded) -> Iterator[tuple[fx.Node, Sharded]]:
    """How the demand climbs over an op that works row by row."""
    rule, operands = rule_of(node), list(tensor_args(node))
    wanted = rule.pull(place) if rule is not None and len(rule.operands) == len(operands) else None
    for i, (operand, at) in enumerate(zip(operands, wanted or (), strict=False)):
        if rule is not None and at is not None and rule.push(i, at) == place:
            yield operand, at
