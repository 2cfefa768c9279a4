"""Attention on shards: what a site wants to have in rows, and the operator that takes its place.

y = attention(q, k, v, "causal")   ->   y = ring_attention(q, k, v, n, n, "causal", ...)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, DilatedCall, RingCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.cost.site import lengths
from ringopt.dims.origin import is_row, origins
from ringopt.distributed.mesh import Mesh
from ringopt.errors import OptionError
from ringopt.ir.nodes import shape_of
from ringopt.ir.placement import Sharded
from ringopt.ir.site import Latents, SiteInfo
from ringopt.ir.symbolic_sizes import at_hand, same
from ringopt.ops import operators
from ringopt.ops.expansion import ExpansionCall
from ringopt.ops.ring import VERSION
from ringopt.options import Strategy
from ringopt.sharding.latents import rows_first
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten

NO_EXCHANGE = "what is spread stands beside its rows (windows of a sequence, say), so none needs another rank's"
GATHERED = "what is spread stands beside its rows, and it cannot be attended to in parts there: it is computed whole"


def refusal_of(node: fx.Node, info: SiteInfo, strategy: Strategy, mesh: Mesh) -> str | None:
    """Why an attention cannot be sharded, None if it can. Raises OptionError where a strategy was asked for by name and
    there are fewer tokens than ranks."""
    ranks = mesh.size
    far = AttentionCall.of(node).mask_term.far
    if far is not None:
        return f"its scores go through a function that holds {far:g}; beside such a number partial sums are not exact"
    queries, keys = lengths(node, mesh)
    if min(queries, keys) >= ranks:
        return None
    if max(queries, keys) >= ranks and min(queries, keys) > 0 and strategy == "auto":
        info.whole = "queries" if queries < keys else "keys"
        info.by_heads = info.whole == "queries" and heads_are_tokens(node, ranks)
        return None
    few = f"{at_hand(min(queries, keys))} rows for {ranks} ranks"
    if strategy != "auto":
        raise OptionError(
            f"option strategy={strategy!r}: site {info.module or node.name} has {few}; every rank needs a "
            'row. Use fewer ranks, longer inputs, or strategy="auto", which leaves such a site replicated'
        )
    return f"{few}: every rank needs a row"


def heads_are_tokens(node: fx.Node, ranks: int) -> bool:
    """Whether tokens stand in the place of heads, each of which has keys of its own (graph transformers, whose edges
    are added to the keys: Dwivedi and Bresson 2020), as many of queries as of keys, and enough for the ranks."""
    call = AttentionCall.of(node)
    queries, keys = shape_of(call.q)[1], shape_of(call.k)[1]
    tokens = [any(map(is_row, origins(x, 1))) for x in (call.q, call.k)]
    return all(tokens) and call.sinks is None and same(queries, keys) and bool(queries >= 2 * ranks)


def demands(node: fx.Node, info: SiteInfo) -> Iterator[tuple[fx.Node, Sharded]]:
    """What a site wants to have in rows."""
    yield from operands(node, info)
    if info.whole != "queries":
        call = AttentionCall.of(node)
        rows = call.mask_term.row_dims
        yield from ((call.sources[i], Sharded(dim, 1, call.rows[0], 1)) for i, dim in rows.items())


def operands(node: fx.Node, info: SiteInfo) -> Iterator[tuple[fx.Node, Sharded]]:
    """The same of q, k and v alone."""
    if info.by_heads:
        yield from ((x, Sharded(1, 1, shape_of(x)[1], 1)) for x in AttentionCall.of(node).operands)
        return
    sides = zip(AttentionCall.of(node).operands, ("queries", "keys", "keys"), strict=True)
    yield from ((x, Sharded(2, 1, shape_of(x)[2], 1)) for x, side in sides if info.whole != side)


def place_attention(sharder: Sharder, node: fx.Node, info: SiteInfo, asked: str) -> bool:
    """False where no rows are missing: then it is sharded over batch or heads like any other operator. `asked` is the
    strategy of the options."""
    call = AttentionCall.of(node)
    alike = 1 if is_dilated(call.pattern) else 2  # leading dims: each head of dilated attention keeps rows of its own
    if any(place is not None and place.dim < alike for place in map(sharder.placements.get, call.operands)):
        info.strategy, info.bytes_sent = "none", 0
        return False  # sharded over batch or heads (windows folded into the batch): no rows are missing
    if is_dilated(call.pattern):
        return _attend_dilated(sharder, node, info, asked)
    q_length, kv_length = call.rows
    rows = {"queries": q_length, "keys": kv_length}
    q_layout, kv_layout = ("replicated" if info.whole == side else sharder.ranks.layout(rows[side]) for side in rows)
    sharder.reader = node

    def operand(x: fx.Node, side: str) -> fx.Node:
        return sharder.copied(x) if info.whole == side else sharder.sharded(x, Sharded(2, 1, rows[side], 1))

    latents = info.latents
    q = operand(call.q, "queries")
    k, v = travelling(sharder, node, latents) if latents else (operand(call.k, "keys"), operand(call.v, "keys"))
    sources, learned = sources_of(sharder, call, info)
    expand = expansion(call, latents, len(sources)).to_text() if latents is not None else ""
    if latents is not None:
        learned += [len(sources) + i for i, x in enumerate(latents.consts) if sharder.carries[x]]
        sources += [sharder.copied(x) for x in latents.consts]
    ring = RingCall(
        q,
        k,
        v,
        sources=sources,
        sinks=sharder.copied(call.sinks) if call.sinks is not None else None,
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
        group=sharder.ranks.group,
        version=VERSION,
        expand=expand,
        site=info.module,
    )
    to = operators.ring_attention.default
    both = sharder.step(to, *ring.to(to).args, like=node)
    out = None if info.whole == "queries" else Sharded(2, 1, q_length, 1)
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, out), out)
    return True


def sources_of(sharder: Sharder, call: AttentionCall, info: SiteInfo) -> tuple[list[fx.Node], list[int]]:
    """What the mask reads, placed, and the numbers of those that have a gradient."""
    parsed = call.mask_term
    learned = [i for i in parsed.differentiable if sharder.carries[call.sources[i]]]

    def placed(i: int, source: fx.Node) -> fx.Node:
        if i in parsed.row_dims and info.whole != "queries":
            return sharder.sharded(source, Sharded(parsed.row_dims[i], 1, call.rows[0], 1))
        return sharder.copied(source) if i in learned else sharder.replicated(source)

    return [placed(i, source) for i, source in enumerate(call.sources)], learned


def expansion(call: AttentionCall, latents: Latents, sources: int) -> ExpansionCall:
    """How K and V are made of what travels, beside so many `sources` of the mask."""
    _, k, v = call.values
    return ExpansionCall(latents.body, sources, int(k.shape[1]), int(k.shape[3]), int(v.shape[3]), latents.flops)


def travelling(sharder: Sharder, node: fx.Node, latents: Latents) -> tuple[fx.Node, fx.Node]:
    """What travels in the places of K and V: this rank's rows of all that they are made of, side by side, and no
    numbers."""
    rows = Sharded(2, 1, AttentionCall.of(node).rows[1], 1)
    parts = []
    for x, place, numbers in latents.cut:
        by_rows = sharder.step(aten.permute.default, sharder.sharded(x, place), rows_first(x, place), like=node)
        parts.append(sharder.step(aten.reshape.default, by_rows, [1, 1, -1, numbers], like=node, placement=rows))
    z = sharder.step(aten.cat.default, parts, 3, like=node, placement=rows) if len(parts) > 1 else parts[0]
    none = sharder.step(aten.slice.Tensor, z, 3, 0, 0, like=node, placement=rows)
    return z, sharder.step(aten.detach.default, none, like=node, placement=rows)


def _attend_dilated(sharder: Sharder, node: fx.Node, info: SiteInfo, asked: str) -> bool:
    call = AttentionCall.of(node)
    length = call.rows[0]
    out = Sharded(2, 1, length, 1)
    sharder.reader = node
    q, k, v = (sharder.sharded(x, out) for x in call.operands)
    dilated = DilatedCall(
        q,
        k,
        v,
        seen=sharder.replicated(call.attn_mask) if call.attn_mask is not None else None,
        sinks=sharder.copied(call.sinks) if call.sinks is not None else None,
        seed=sharder.replicated(call.seed) if call.seed is not None else None,
        length=length,
        pattern=call.pattern,
        dropout_p=call.dropout_p,
        scale=call.scale,
        layout=sharder.ranks.layout(length),
        strategy=asked,
        kernel=info.kernel,
        group=sharder.ranks.group,
        version=VERSION,
        site=info.module,
    )
    to = operators.dilated_attention.default
    both = sharder.step(to, *dilated.to(to).args, like=node)
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, out), out)
    return True


def note_no_exchange(info: SiteInfo, done: bool) -> None:
    """A site that `place_attention` left, and that was computed on shards all the same, or was not: it needed no
    strategy."""
    info.notes = [(NO_EXCHANGE if done else GATHERED) if note == info.reason else note for note in info.notes]
