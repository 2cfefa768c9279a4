"""Scans on shards: what a recurrence wants to have by steps, and the operator that takes its place.

S, y = scan([S0], [k, v], [w], body)   ->   S, y_rows, ... = sharded_scan([S0], [k_rows, v_rows], [w], body, n, ...)

Each rank has consecutive steps. The last carries come out of the exchange, the same on every rank; the gradients of the
first ones, and of what all steps share, are summed over the ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traits import sent_bytes
from ringopt.options import Strategy
from ringopt.scans.affine import AffineStep, prove_affine
from ringopt.scans.call import ScanCall, is_scan
from ringopt.scans.not_affine import pays_in_turn
from ringopt.scans.segment_map import Frame
from ringopt.sharding.recurrences.by_heads import heads_or_states, place_scan_by_heads
from ringopt.sharding.recurrences.kernel_scans import begin_kernel_scans
from ringopt.sharding.recurrences.kernel_sites import declared_scans, kernel_site
from ringopt.sharding.sharder import Sharder


def begin_scans(sharder: Sharder, scans: Mapping[fx.Node, SiteInfo]) -> Iterator[tuple[fx.Node, Sharded]]:
    """What the scans want to have by steps; they are placed so when the walk comes to them."""
    shared = {node: info for node, info in scans.items() if info.refusal is None}
    for node in filter(is_scan, shared):
        place = place_scan_by_heads if shared[node].strategy == "heads" else place_scan
        sharder.understood[node] = partial(place, sharder, node)
        yield from ((x, ScanCall.of(node).steps) for x in ScanCall.of(node).xs)
    yield from begin_kernel_scans(sharder, {node: info for node, info in shared.items() if not is_scan(node)})


def place_scan(sharder: Sharder, node: fx.Node) -> None:
    """Over the ranks, with everything that reads it."""
    call, steps = ScanCall.of(node), ScanCall.of(node).steps
    layout = sharder.ranks.layout(steps.length)
    sharder.reader = node
    made = sharder.over_ranks(
        operators.sharded_scan.default,
        node,
        None,
        "states",
        init=[sharder.copied(x) for x in call.init],
        xs=[sharder.sharded(x, steps) for x in call.xs],
        consts=[sharder.copied(x) for x in call.consts],
        body=call.text,
        steps=steps.length,
        segments=0 if sharder.ranks.group == ANY else chunks_per_rank(layout) * sharder.ranks.size,
        layout=layout,
        ends=last_carries_read(node),
        keeps=call.has_small_states and torch.is_grad_enabled() and sharder.carries[node],
    )
    sharder.values[node], sharder.placements[node] = made, None
    for part in list(node.users):
        place = None if part.args[1] < call.body.carries else steps
        sharder.set(part, sharder.call(operator.getitem, (made, part.args[1]), part, place), place)


def last_carries_read(node: fx.Node) -> bool:
    """Whether anything reads what a scan carries out of its last step."""
    return any(part.args[1] < ScanCall.of(node).body.carries and part.users for part in node.users)


def scan_sites(
    graph: fx.Graph, mesh: Mesh, layouts: Layouts, strategy: Strategy, carries: Mapping[fx.Node, bool]
) -> dict[fx.Node, SiteInfo]:
    """Of all recurrences, those of other libraries' operators too."""
    found = {
        node: scan_site(node, mesh, layouts, strategy, carries[node]) for node in graph.nodes if is_scan(node)
    }  # fmt: skip
    return found | {node: kernel_site(node, mesh, layouts, strategy, carries[node]) for node in declared_scans(graph)}


def scan_site(node: fx.Node, mesh: Mesh, layouts: Layouts, strategy: Strategy, learns: bool) -> SiteInfo:
    """What is known of a scan before it is placed: what the ranks exchange for it, or why all compute all of it."""
    call = ScanCall.of(node)
    length = call.steps.length
    info = SiteInfo.at(node, "scan", f"{at_hand(length)} steps", False)
    info.training = learns
    proof, least = prove_affine(call.text, call.kinds), chunks_per_rank(layouts.of(length)) * mesh.size
    if mesh.name != ANY and not length >= least:
        info.refusal = f"{at_hand(length)} steps for {mesh.size} ranks: every rank needs one in each segment"
        return info
    columns = 0
    if isinstance(proof, Refusal):
        info.refusal = proof.sentence
    else:
        by_states(node, info, note_of(proof), mesh, layouts)
        runs = [Frame(stage).runs for level in proof.levels for stage in level]
        columns = max(runs, default=0) if least > 2 else 0
    heads_or_states(node, info, mesh, layouts, columns, strategy)
    if info.refusal is not None and mesh.name != ANY and pays_in_turn(call.text, call.kinds, length, mesh.size):
        why, info.refusal = info.refusal, None
        by_states(node, info, f"the ranks run one after the other, for {why}", mesh, layouts)
        info.strategy = "in turn"
    return info


def by_states(node: fx.Node, info: SiteInfo, note: str, mesh: Mesh, layouts: Layouts) -> None:
    """Each rank its steps."""
    length = ScanCall.of(node).steps.length
    info.layout, info.strategy = layouts.of(length), "states"
    segments = 0 if mesh.name == ANY else chunks_per_rank(info.layout) * mesh.size
    there = {"steps": length, "segments": segments, "layout": info.layout, "ends": last_carries_read(node)}
    sized = SizedCall.of(node, mesh.size, mesh.rank, number=at_hand)
    info.bytes_sent = sent_bytes(sized.conjugate("sharded_scan", sized.value, **there))
    info.notes.append(note)


def note_of(proof: AffineStep) -> str:
    """For the report: what is carried, and what a rank tells the others of it."""
    stages = [stage for level in proof.levels for stage in level]
    carried = (f"{list(stage.kind.shape)} ({', '.join(stage.axes)})" for stage in stages)
    levels = len(proof.levels)
    return (
        f"a step is affine in what it carries, {' and '.join(carried)}"
        f"{f', in {levels} exchanges one after the other' if levels > 1 else ''}; what travels does not grow with n"
    )
