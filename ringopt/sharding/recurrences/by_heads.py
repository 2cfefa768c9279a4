"""A recurrence by heads: each rank has all steps of its part of a dim along which the recurrence is many.

    S, y = scan([S0], [k, v], [w], body)    ->    S_mine, y_mine = scan([S0_mine], [turn(k), turn(v)], [w], body)
                                                  y_rows = turn(y_mine)

The dim is one of the batch, of heads, of channels (ringopt/scans/independent.py), and the step may be any: a gate that
reads the state, an LSTM. What has tokens changes ranks, there and back (`ringopt::turn`); nothing is told of states.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank, is_grained
from ringopt.cost.recurrence import ScanCase
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.ir.nodes import shape_of, value_of
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand, is_open
from ringopt.ops import work
from ringopt.ops.sized_call import SizedCall
from ringopt.options import Strategy
from ringopt.scans.body import NoBody
from ringopt.scans.call import ScanCall
from ringopt.scans.independent import Independent, independent_dims
from ringopt.scans.trace import sized
from ringopt.sharding.recurrences.kernel_scans import for_all_heads
from ringopt.sharding.recurrences.ways import choose_way, heads_bytes, in_common
from ringopt.sharding.sharder import Sharder


@dataclass(frozen=True)
class ScanHeads:
    """A scan, and the dim along which ranks share it."""

    node: fx.Node
    along: Independent

    @property
    def call(self) -> ScanCall:
        return ScanCall.of(self.node)

    @property
    def common(self) -> list[fx.Node]:
        """What has tokens, and is the same for all heads."""
        return [x for x, dim in self.xs if dim is None]

    @property
    def xs(self) -> list[tuple[fx.Node, int | None]]:
        """With the dim that it is of a step; None where all heads have it in common."""
        first = len(self.call.init)
        return list(zip(self.call.xs, self.along.inputs[first:], strict=False))

    def moved(self, ranks: int) -> int:
        """Bytes of all that has tokens, of one rank's tokens; what is in common goes to every rank."""
        ys = [part for part in self.node.users if part.args[1] >= self.call.body.carries]
        tensors = [value_of(x) for x in (*self.call.xs, *ys, *(x for x in self.common for _ in range(ranks - 1)))]
        return sum(at_hand(x.numel()) * int(x.element_size()) for x in tensors) // ranks

    def held(self, dim: int) -> Sharded:
        """Spread over the heads."""
        return Sharded(dim, 1, self.along.size, 1)


def heads_of(node: fx.Node, ranks: int, layout_of: Callable[[int], str]) -> ScanHeads | str:
    """The dim along which the ranks share a scan, that for which least is moved, or why they cannot."""
    call = ScanCall.of(node)
    if is_open(call.steps.length) or any(is_open(size) for x in call.init for size in shape_of(x)):
        return "a size of it is dynamic"
    found = independent_dims(call.text, call.kinds)
    if not found:
        return "a step mixes all dims of what it carries, or they have one index"
    fits = [ScanHeads(node, one) for one in found if parts_alike(call, one, ranks, layout_of)]
    if not fits:
        sizes = ", ".join(str(one.size) for one in found)
        return f"{sizes} independent indices do not part alike among {ranks} ranks"
    return min(fits, key=lambda one: one.moved(ranks))


def parts_alike(call: ScanCall, along: Independent, ranks: int, layout_of: Callable[[int], str]) -> bool:
    """Whether every rank has as many indices as another, and the body runs on so many."""
    layout = layout_of(along.size)
    if is_grained(layout) or along.size % (chunks_per_rank(layout) * ranks):
        return False  # of a size that is by chance about that of a sequence in chunks
    mine = along.size // ranks

    def part(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
        return tuple(mine if at == dim else size for at, size in enumerate(shape))

    kinds = tuple(
        replace(kind, shape=part(kind.shape, dim)) for kind, dim in zip(call.kinds, along.inputs, strict=True)
    )
    try:
        outputs = sized(call.text, kinds).outputs
    except NoBody:  # a size is written in it
        return False
    whole = sized(call.text, call.kinds).outputs
    return all(
        shape_of(here) == part(shape_of(all_of_it), dim)
        for here, all_of_it, dim in zip(outputs, whole, along.outputs, strict=True)
    )


def heads_or_states(
    node: fx.Node, info: SiteInfo, mesh: Mesh, layouts: Layouts, columns: int, strategy: Strategy
) -> None:
    """By heads where that was asked for, and where a recurrence cannot be shared by states. Else by states: on 2 cores
    a layer of gated delta rule took 0.93 s so, and 1.09 s by heads (8,192 tokens, 8 heads of 64), and on GPUs a
    rank launches its own steps alone. `columns`: runs that make a matrix."""
    affine = info.refusal is None
    if mesh.name == ANY or (affine and strategy != "ulysses"):
        return
    found = heads_of(node, mesh.size, layouts.of)
    if isinstance(found, str):
        if affine:
            info.notes.append(f"its heads are not shared: {found}")
        else:
            info.refusal = f"{info.refusal}; by heads it is not shared: {found}"
        return
    sized_call = SizedCall.of(node, mesh.size, mesh.rank, number=at_hand)
    all_steps, carried = work.steps(sized_call), work.carried(sized_call) if affine else 0
    case = ScanCase(all_steps, carried, info.bytes_sent, found.moved(mesh.size), columns, mesh.size, info.training)
    if affine:
        choose_way(info, case, mesh, value_of(found.call.xs[0]), strategy)
    else:
        info.notes.append(f"shared by heads, for {info.refusal}")
        info.refusal, info.strategy, info.bytes_sent = None, "heads", heads_bytes(case.moved, mesh.size)
        info.layout = layouts.of(found.call.steps.length)
    if info.strategy == "heads":
        info.notes += [in_common(found.common)] if found.common else []
        info.notes.append(f"each rank has {found.along.size // mesh.size} of {found.along.size} independent indices")


def place_scan_by_heads(sharder: Sharder, node: fx.Node) -> None:
    """The scan as it is, on all steps of this rank's heads; its ys are back by steps for all that reads them."""
    found = heads_of(node, sharder.ranks.size, sharder.ranks.layout)
    assert isinstance(found, ScanHeads), found
    call, steps = found.call, found.call.steps
    sharder.reader = node

    def part(x: fx.Node, dim: int | None) -> fx.Node:
        held = found.held(dim) if dim is not None else None
        return sharder.copied(x) if held is None else sharder.once(x, held, partial(sharder.scatter, x, held))

    def turned(x: fx.Node, dim: int | None) -> fx.Node:
        if dim is None:
            return for_all_heads(sharder, x, steps)
        held = found.held(dim + 1)  # behind the steps
        return sharder.once(x, ("turned", held), partial(sharder.turn, x, steps, held, sharder.sharded(x, steps)))

    inputs, first, last = found.along.inputs, len(call.init), len(call.init) + len(call.xs)
    init = [part(x, dim) for x, dim in zip(call.init, inputs[:first], strict=True)]
    xs = [turned(x, dim) for x, dim in found.xs]
    consts = [part(x, dim) for x, dim in zip(call.consts, inputs[last:], strict=True)]
    made = sharder.call(node.target, (init, xs, consts, call.text), node, None)
    sharder.values[node], sharder.placements[node] = made, None
    for out in list(node.users):
        at, dim = out.args[1], found.along.outputs[out.args[1]]
        assert dim is not None
        held = found.held(dim + (at >= first))
        sharder.set(out, sharder.call(operator.getitem, (made, at), out, held), held)
        if at >= first:
            sharder.set(out, sharder.turn(out, held, steps), steps)
