"""Recurrences that operators of other libraries compute, by their rules (`ringopt.rule(op, ScanRule(...))`), on
shards.

    o, last = mylib::delta_rule(q, k, v, g)   ->   o_rows, last, ... = sharded_kernel_scan(zeros, [q, k, v, g], ...)

Each rank runs the operator on its own tokens, from the state before them; what travels has the size of the state.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.ir.nodes import arguments_of, shape_of, value_of
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traits import sent_bytes
from ringopt.rules.declare import ScanRule, declaration_of, is_foreign
from ringopt.scans.kernel import ScanKernel, contradiction, state_of
from ringopt.sharding.sharder import Sharder
from ringopt.torch_compat.schema import schema_of

aten = torch.ops.aten
CONVERTED = "a program for any number of ranks has no recurrence of another library's operator on shards yet"


def declared_scans(graph: fx.Graph) -> list[fx.Node]:
    """Calls of operators whose rule says that they are a recurrence."""
    return [node for node in graph.nodes if is_foreign(node) and isinstance(declaration_of(node), ScanRule)]


def tokens_of(node: fx.Node) -> tuple[list[fx.Node], Sharded]:
    """The operands with tokens, and how those are spread."""
    says, given = declaration_of(node), arguments_of(node)
    assert isinstance(says, ScanRule)
    xs = [given[name] for name in says.tokens if isinstance(given[name], fx.Node)]
    return xs, Sharded(says.dim, 1, shape_of(xs[0])[says.dim], 1)


def begin_kernel_scans(sharder: Sharder, scans: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, Sharded]]:
    """What they want to have by tokens; they are placed so when the walk comes to them."""
    for node in scans:
        sharder.understood[node] = partial(place_kernel_scan, sharder, node)
        xs, rows = tokens_of(node)
        yield from ((x, rows) for x in xs)


def place_kernel_scan(sharder: Sharder, node: fx.Node) -> None:
    """Over the ranks, with everything that reads it."""
    says, given = declaration_of(node), arguments_of(node)
    assert isinstance(says, ScanRule)
    kernel, (xs, rows) = ScanKernel.of(node, says), tokens_of(node)
    layout = sharder.ranks.layout(rows.length)
    sharder.reader = node
    made = sharder.over_ranks(
        operators.sharded_kernel_scan.default,
        node,
        None,
        "states",
        state=first_state(sharder, node, says),
        xs=[sharder.sharded(x, rows) for x in xs],
        shared=[sharder.copied(given[name]) for name in kernel.others],
        kernel=kernel.text,
        steps=rows.length,
        segments=chunks_per_rank(layout) * sharder.ranks.size,
        layout=layout,
    )
    sharder.values[node], sharder.placements[node] = made, None
    count = len(value_of(node))
    for part in list(node.users):
        at = part.args[1] % count
        # The last state stands behind the other results.
        place, found = (None, count - 1) if at == says.last else (rows, at - (at > says.last))
        sharder.set(part, sharder.call(operator.getitem, (made, found), part, place), place)


def first_state(sharder: Sharder, node: fx.Node, says: ScanRule) -> fx.Node:
    """That of the call, or zeros."""
    given, last = arguments_of(node)[says.state], state_of(node, says)
    if given is not None:
        return sharder.replicated(given)
    return sharder.step(aten.zeros.default, list(last.shape), like=node, dtype=last.dtype, device=last.device)


def kernel_site(node: fx.Node, mesh: Mesh, layouts: Layouts) -> SiteInfo:
    """What is known of one before it is placed: what the ranks exchange for it, or why all compute all of it."""
    says = declaration_of(node)
    assert isinstance(says, ScanRule)
    name, wrong = schema_of(node.target).name, contradiction(node, says)
    info = SiteInfo.at(node, "scan", name, False)
    if wrong or mesh.name == ANY:
        info.refusal = f"{name}: {wrong or CONVERTED}"
        return info
    _xs, rows = tokens_of(node)
    info.pattern, info.layout = f"{at_hand(rows.length)} tokens", layouts.of(rows.length)
    segments = chunks_per_rank(info.layout) * mesh.size
    if not rows.length >= segments:
        info.refusal = f"{at_hand(rows.length)} tokens for {mesh.size} ranks: every rank needs one in each segment"
        info.layout = "none"
        return info
    kernel, state = ScanKernel.of(node, says), state_of(node, says)
    sized = SizedCall.of(node, mesh.size, mesh.rank, number=at_hand)
    there = {"steps": rows.length, "layout": info.layout, "state": state, "kernel": kernel.text, "segments": segments}
    info.bytes_sent = sent_bytes(sized.conjugate("sharded_kernel_scan", sized.value, **there))
    info.strategy, info.kernel = ("states" if says.axes else "in turn"), name
    carried = f"a state of {list(state.shape)}"
    if kernel.segments is not None:
        info.notes.append("it packs sequences: no state goes over from one to the next")
    if says.axes is None:
        info.notes.append(f"{carried} of {name}: the ranks run one after the other, for its rule has no axes")
    else:
        axes = ", ".join(says.axes)
        info.notes.append(f"{carried} ({axes}) of {name} is affine by its rule; what travels does not grow with n")
    return info
