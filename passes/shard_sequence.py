"""Shard everything between the attention sites along the sequence.

    x = linear(embedding(ids))              x = linear(embedding(scatter(ids, n)))               # n / p tokens
    y = attention(q, k, v, "causal")   ->   y = ring_attention(q, k, v, n, n, "causal", ...)
    return y                                return gather(y, n)

Everything starts replicated. An attention site demands q, k, v sharded along their rows; its output is sharded; rules
(ringopt/dims/rules.py) push that forward, and demands climb back to the inputs (ringopt/sharding/sharder.py). What
mixes rows in a known way (a slice, a loss, a convolution) is computed on shards with what little the ranks need of each
other (ringopt/sharding), also above the first site (ringopt/sharding/handlers/demands.py); all else is computed on
gathered operands and reported.

Before: functional graph, sites chosen by choose_strategy.
After: every value replicated (same bits and same complete gradient on every rank) or sharded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, DilatedCall, RingCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.context_parallel.geometry.layouts import LAYOUTS, layout_of
from ringopt.distributed.mesh import ANY
from ringopt.ir.autograd_function import CustomGradient
from ringopt.ir.memory import base_of, shared_outputs
from ringopt.ir.nodes import (
    eliminate_dead_code,
    is_random,
    is_tensor,
    module_path,
    named,
    op_name,
    shape_of,
    source_line,
    tensor_args,
    value_of,
)
from ringopt.ir.placement import Sharded, Spread
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import plain
from ringopt.ops import operators
from ringopt.ops.ring import VERSION
from ringopt.pipeline import Context, Pass, SiteInfo
from ringopt.report import Gather
from ringopt.sharding.composite import parts_of
from ringopt.sharding.emit import enough_rows
from ringopt.sharding.handlers.autograd_function import Functions, Places
from ringopt.sharding.handlers.batched_attention import told_apart
from ringopt.sharding.handlers.by_columns import MIXED
from ringopt.sharding.handlers.demands import Demand, sources, worked_on
from ringopt.sharding.handlers.registry import HANDLERS, across
from ringopt.sharding.handlers.windows import windows
from ringopt.sharding.sharder import Sharder


class ShardSequence(Pass):
    name = "shard_sequence"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if not context.shards:
            return
        mesh, layout = context.mesh, context.layouts.of

        def rows_here(length: int, layout: str) -> int:
            if mesh.name == ANY:
                raise GraphRefused(Refusal("rows of a rank had to be counted, and the ranks are known only later"))
            return sum(map(len, layout_of(layout, plain(length), mesh.size).ranges(mesh.rank)))

        def least(length: int) -> int:
            return LAYOUTS[layout(length)].chunks_per_rank * mesh.size

        decided: dict[fx.Node, Places] = {}
        while True:
            sharder = Sharder(gm.graph, mesh.name, layout, mesh.rank, mesh.size, rows_here, least, mesh.name == ANY)
            sharder.climbs = context.options.shard == "model"
            functions = Functions(sharder, decided)
            handled, worked = frozenset(HANDLERS), worked_on(gm.graph)
            whole = windows(sharder, in_windows(context), handled, worked)
            wanted = [*demands(context), *whole]
            pairs = {x: at for x, at in context.pairs.items() if enough_rows(sharder, at.length)}
            sharder.sources = sources(sharder, wanted, handled | MIXED, worked) | pairs | dict(whole)
            random = walk(sharder, functions, gm.graph, context)
            eliminate_dead_code(sharder.graph)
            if not (twice := functions.twice()):
                break
            decided |= twice
        context.replicated_random += random + functions.random()
        context.notes += functions.notes() + sharder.relaid
        gm.graph = sharder.finished()
        refuse_mixed_statistics(gm.graph)
        record(sharder, context)


def refuse_mixed_statistics(graph: fx.Graph) -> None:
    """batch_norm writes its running statistics without saying so in its schema, and needs them again in the backward: a
    sharded call that writes the same ones would take them away."""
    written = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        if named(node, "training") and named(node, "running_mean") in written:
            said = "two calls of batch_norm update the same running statistics, and one of them cannot be sharded"
            raise GraphRefused(Refusal(said, node))


def walk(sharder: Sharder, functions: Functions, graph: fx.Graph, context: Context) -> list[str]:
    """Places every node; returns the names of those that draw the same random numbers on every rank."""
    random = []
    for node in graph.nodes:
        if node in context.given:
            sharder.hold(node, context.given[node].placement)
        elif node.op in ("placeholder", "get_attr"):
            sharder.keep(node)
        elif node.op == "output":
            leave(sharder, node, context)
        elif isinstance(node.target, CustomGradient):
            functions.place(node)
        elif node not in sharder.values and not spread(sharder, node, context):
            # (A handler of a tuple places its elements with it.)
            sharder.whole(node)
            random += [node.name] if is_random(node) else []
        if node in sharder.sources and sharder.placements[node] is None:
            sharder.begin(node)
    return random


def demands(context: Context) -> Iterator[Demand]:
    """What the attention sites, and pairs that are none, want to have in rows."""
    yield from context.pairs.items()
    for node in sharded_sites(context):
        info = context.sites[node]
        yield from operands(node, info)
        if info.whole != "queries":
            call = AttentionCall.of(node)
            rows = call.mask_term.row_dims
            yield from ((call.sources[i], Sharded(dim, 1, call.rows[0], 1)) for i, dim in rows.items())


def in_windows(context: Context) -> Iterator[tuple[bool, Iterator[Demand]]]:
    """The same of q, k and v, for each site; and whether it may be spread over the batch instead."""
    for node in sharded_sites(context):
        parts = not is_dilated(AttentionCall.of(node).pattern) and not told_apart(node)
        yield parts, operands(node, context.sites[node])


def sharded_sites(context: Context) -> Iterator[fx.Node]:
    if context.options.shard == "model":
        yield from (node for node, info in context.sites.items() if info.refusal is None)


def operands(node: fx.Node, info: SiteInfo) -> Iterator[Demand]:
    sides = zip(AttentionCall.of(node).operands, ("queries", "keys", "keys"), strict=True)
    yield from ((x, Sharded(2, 1, shape_of(x)[2], 1)) for x, side in sides if info.whole != side)


def spread(sharder: Sharder, node: fx.Node, context: Context) -> bool:
    site = context.sites.get(node)
    if site is not None and site.refusal is None and attend(sharder, node, context):
        return True
    if context.options.shard == "attention":
        return False  # whoever reads what attention gives has it gathered
    if node in sharder.understood:
        sharder.understood[node]()
        return True
    cut = any(map(sharder.placements.get, tensor_args(node)))
    done = cut and (sharder.along(node) or across(sharder, node) or in_parts(sharder, node, context))
    if site is not None and site.refusal is None:
        site.notes = [(BESIDE if done else GATHERED) if note == site.reason else note for note in site.notes]
    return done


def in_parts(sharder: Sharder, node: fx.Node, context: Context) -> bool:
    """An operator that torch defines by others, each of which is sharded by itself."""
    parts = parts_of(node, frozenset(HANDLERS)) if node not in context.sites else None
    users = list(node.users)
    if parts is None or (not is_tensor(node) and any(user.target is not operator.getitem for user in users)):
        return False
    made = dict(zip(parts.find_nodes(op="placeholder"), dict.fromkeys(tensor_args(node)), strict=True))
    for part in parts.nodes:
        if part.op == "call_function":
            with node.graph.inserting_before(node):
                made[part] = node.graph.node_copy(part, made.__getitem__)
            sharder.adopt(made[part], like=node)
            if not spread(sharder, made[part], context):
                sharder.whole(made[part])
    found = fx.map_arg(parts.output_node().args[0], made.__getitem__)
    for user, value in [(node, found)] if is_tensor(node) else [(user, found[user.args[1]]) for user in users]:
        sharder.set(user, sharder.values[value], sharder.placements[value])
        sharder.climbers[user] = partial(sharder.sharded, value)
    return True


def leave(sharder: Sharder, node: fx.Node, context: Context) -> None:
    """Outputs: whole, or left on their ranks where the option `outputs` says so."""
    sharder.reader = node
    context.left.clear()  # of an earlier walk
    outputs = list(node.args[0]) if isinstance(node.args[0], (tuple, list)) else []
    bases = bases_of(sharder, node, context)

    def whole(out: fx.Node) -> fx.Node:
        return sharder.as_view(out, bases[out]) if out in bases else sharder.replicated(out)

    if context.options.outputs == "gather" or not outputs:
        sharder.graph.output(fx.map_arg(node.args[0], whole)).meta.update(node.meta)
        return
    places = context.order.outputs if context.order is not None else range(len(outputs))
    for i, out in enumerate(outputs):
        placement = sharder.placements.get(out) if isinstance(out, fx.Node) else None
        if placement is not None and out not in bases:
            value, where = value_of(out), module_path(out) or source_line(out)
            name = f"output {places[i]} ({out.name}{', ' + where if where else ''})"
            # Whoever reads the rows later has no symbols: what is open is fixed.
            size, stride = (tuple(map(int, sizes)) for sizes in (value.shape, node.meta["strides"][i]))
            context.left[i] = Spread(
                placement.fixed(), sharder.layout(placement.length), sharder.group, size, stride, name
            )
            outputs[i] = sharder.values[out]
        else:
            outputs[i] = fx.map_arg(out, whole)
    sharder.graph.output(tuple(outputs)).meta.update(node.meta)


def bases_of(sharder: Sharder, node: fx.Node, context: Context) -> dict[fx.Node, fx.Node]:
    """The outputs that are made again as views, and of what: of an input, or of what several of them lie in; not where
    the rows of that are all that a rank has or is to have. Raises GraphRefused."""
    found: dict[fx.Node, fx.Node] = {}
    for memory, outputs in shared_outputs(node.graph):
        base = base_of(memory, outputs)
        if isinstance(base, Refusal):
            raise GraphRefused(base)
        if base not in context.given and (memory[0] == "input" or context.options.outputs != "local"):
            found |= dict.fromkeys(outputs, base)
    return found


BESIDE = "what is spread stands beside its rows (windows of a sequence, say), so none needs another rank's"
GATHERED = "what is spread stands beside its rows, and it cannot be attended to in parts there: it is computed whole"


# ---- attention -----------------------------------------------------------------------------------------------------
def attend(sharder: Sharder, node: fx.Node, context: Context) -> bool:
    call, info = AttentionCall.of(node), context.sites[node]
    alike = 1 if is_dilated(call.pattern) else 2  # leading dims: each head of dilated attention keeps rows of its own
    if any(place is not None and place.dim < alike for place in map(sharder.placements.get, call.operands)):
        info.strategy, info.bytes_sent = "none", 0
        return False  # sharded over batch or heads (windows folded into the batch): no rows are missing
    if is_dilated(call.pattern):
        return attend_dilated(sharder, node, context)
    q_length, kv_length = call.rows
    rows = {"queries": q_length, "keys": kv_length}
    q_layout, kv_layout = ("replicated" if info.whole == side else sharder.layout(rows[side]) for side in rows)
    sharder.reader = node

    def operand(x: fx.Node, side: str) -> fx.Node:
        return sharder.beside(x) if info.whole == side else sharder.sharded(x, Sharded(2, 1, rows[side], 1))

    q, k, v = operand(call.q, "queries"), operand(call.k, "keys"), operand(call.v, "keys")
    parsed = call.mask_term
    learned = [i for i in parsed.differentiable if sharder.carries[call.sources[i]]]

    def placed(i: int, source: fx.Node) -> fx.Node:
        if i in parsed.row_dims and info.whole != "queries":
            return sharder.sharded(source, Sharded(parsed.row_dims[i], 1, q_length, 1))
        return sharder.beside(source) if i in learned else sharder.replicated(source)

    ring = RingCall(
        *(q, k, v),
        sources=[placed(i, source) for i, source in enumerate(call.sources)],
        sinks=sharder.beside(call.sinks) if call.sinks is not None else None,
        seed=sharder.replicated(call.seed) if call.seed is not None else None,
        q_length=q_length,
        kv_length=kv_length,
        pattern=call.pattern,
        mask=call.mask,
        learned=learned,
        dropout_p=call.dropout_p,
        scale=call.scale,
        q_layout=q_layout,
        kv_layout=kv_layout,
        strategy=info.strategy,
        kernel=info.kernel,
        group=sharder.group,
        version=VERSION,
    )
    both = sharder.step(operators.ring_attention.default, *ring.args, like=node)
    out = None if info.whole == "queries" else Sharded(2, 1, q_length, 1)
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, out), out)
    return True


def attend_dilated(sharder: Sharder, node: fx.Node, context: Context) -> bool:
    call = AttentionCall.of(node)
    length = call.rows[0]
    out = Sharded(2, 1, length, 1)
    sharder.reader = node
    q, k, v = (sharder.sharded(x, out) for x in call.operands)
    dilated = DilatedCall(
        *(q, k, v),
        seen=sharder.replicated(call.attn_mask) if call.attn_mask is not None else None,
        sinks=sharder.beside(call.sinks) if call.sinks is not None else None,
        seed=sharder.replicated(call.seed) if call.seed is not None else None,
        length=length,
        pattern=call.pattern,
        dropout_p=call.dropout_p,
        scale=call.scale,
        layout=sharder.layout(length),
        strategy=context.options.strategy,
        kernel=context.sites[node].kernel,
        group=sharder.group,
        version=VERSION,
    )
    both = sharder.step(operators.dilated_attention.default, *dilated.args, like=node)
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, out), out)
    return True


def record(sharder: Sharder, context: Context) -> None:
    """Gathers for the report. One whose result was dead code costs nothing and is not told."""
    alive = set(sharder.graph.nodes)
    for note in sharder.gathers:
        if sharder.converted[note.value, "whole"] in alive:
            op = "output" if note.reader.op == "output" else op_name(note.reader)
            line = source_line(note.reader) or source_line(note.value)
            context.gathers.append(Gather(op, sharder.describe(note), note.bytes, module_path(note.reader), line))
