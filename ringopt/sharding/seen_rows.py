"""What windows along a sharded sequence see: the rank's own rows as they lie, and a few of its neighbours'.

    given  = cat([slice(x_rows, 6, 8)])               # what others want
    edges  = fetch_rows(given, "edges 16:1:-2:3")     # two rows before the first one
    seen   = cat([edges, x_rows])

Inductor writes what makes `x_rows` where `seen` has it, so that nothing is copied. Where a rank wants many rows of
others (layouts that differ, long strides), or one rank does and another wants none (its compiler would drop a message
that the other waits for), all that is seen is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import layout_of, layouts_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import plain
from ringopt.ops import operators
from ringopt.ops.fetch_rows import Wanted, held, homes_and_wants, or_past_end
from ringopt.sharding.emit import Steps

aten = torch.ops.aten

FEW = 8  # parts of what a rank sees, at most
Run = tuple[bool, int, int]  # whether these are the rank's own rows; the first, and that behind the last


@dataclass(frozen=True)
class Seen:
    """`given`: runs of the rank's rows that others want. `edges`: how many rows come from others; `chunks`: the runs of
    which each chunk sees the rows."""

    given: tuple[Run, ...]
    edges: int
    chunks: tuple[tuple[Run, ...], ...]

    @property
    def parts(self) -> int:
        return len(self.given) + sum(map(len, self.chunks))


def seen_rows(step: Steps, x: fx.Node, place: Sharded, wanted: Wanted, out: Sharded) -> list[fx.Node]:
    """The rows of `x`, sharded as `place`, that the windows of each chunk of this rank see; noted as `out`."""
    ranks, layouts = step.sharder.ranks, step.layouts(place, out)
    length = plain(place.length)
    of_all = seen_of_all(wanted, layouts, length, ranks.size)
    if of_all is None:
        return split(step, step.fetch(x, place, wanted, out), place.dim, wanted, out)
    seen, few = of_all[ranks.rank], Wanted("edges", wanted.pieces)
    rows = len(held(layout_of(layouts_of(layouts)[0], length, ranks.size), ranks.rank))
    edges = x
    if any(one.edges for one in of_all):
        given = joined(step, [part(step, x, rows, run, place, out) for run in seen.given], place, out)
        edges = step.over_ranks(
            operators.fetch_rows.default, out, x=given, **step.sharder.factors(place), form=few.form,
            numbers=few.numbers, local=seen.edges, layout=layouts,
        )  # fmt: skip
    return [
        joined(
            step,
            [part(step, *((x, rows) if run[0] else (edges, seen.edges)), run, place, out) for run in runs],
            place,
            out,
        )
        for runs in seen.chunks
    ]


def part(step: Steps, x: fx.Node, rows: int, run: Run, place: Sharded, out: Sharded) -> fx.Node:
    """The rows `run` of `x`, which has so many."""
    _own, first, end = run
    return x if (first, end) == (0, rows) else step(aten.slice.Tensor, x, place.dim, first, end, placement=out)


def joined(step: Steps, parts: list[fx.Node], place: Sharded, out: Sharded) -> fx.Node:
    """One after the other."""
    return parts[0] if len(parts) == 1 else step(aten.cat.default, parts, place.dim, placement=out)


def split(step: Steps, seen: fx.Node, dim: int, wanted: Wanted, out: Sharded) -> list[fx.Node]:
    """All that is seen, chunk by chunk."""
    ranks = step.sharder.ranks
    rows = wanted.ranges(ranks.layout(out.length), ranks.size, ranks.rank)
    if len(rows) == 1:
        return [seen]
    chunks = step(aten.split_with_sizes.default, seen, list(map(len, rows)), dim)
    return [step.item(chunks, i) for i in range(len(rows))]


@lru_cache(maxsize=256)
def seen_of_all(wanted: Wanted, layouts: str, length: int, ranks: int) -> tuple[Seen, ...] | None:
    """What each rank sees; None where all that is seen is better fetched."""
    old, new = layouts_of(layouts)
    few = Wanted("edges", wanted.pieces)
    homes, lacking = homes_and_wants(few, layouts, length, ranks)
    found = []
    for rank in range(ranks):
        place = torch.full((length + 1,), -1)
        rows = held(layout_of(old, length, ranks), rank)
        place[rows] = torch.arange(len(rows))
        chunks, came = [], 0
        for window in wanted.ranges(new, ranks, rank):
            at = place[or_past_end(torch.arange(window.start, window.stop), length)]
            chunks.append(runs_of(at, came))
            came += int((at < 0).sum())
        found.append(Seen(runs_of(place[homes[rank]], 0), len(lacking[rank]), tuple(chunks)))
        if found[-1].parts > FEW or 2 * came > len(rows) or bool(came) != bool(found[0].edges):
            return None
    return tuple(found)


def runs_of(places: Tensor, came: int) -> tuple[Run, ...]:
    """The runs of rows at these places of the rank; those at -1 are the next of others, of which `came` are used up."""
    own = places >= 0
    at = torch.where(own, places, came - 1 + (~own).cumsum(0))
    breaks = (own.diff() | (at.diff() != 1)).nonzero()[:, 0] + 1
    ends = [0, *breaks.tolist(), len(at)] if len(at) else []
    return tuple((bool(own[a]), int(at[a]), int(at[b - 1]) + 1) for a, b in pairwise(ends))
