"""Self-attention becomes dilated, where the options ask for it (`segment_lengths`, `dilation_rates`).

    y = attention(q, k, v, None, [attention_mask], ..., "causal", '{"parts": ["visible"], ...}')
        ->
    seen = reshape(tabulate([attention_mask], ...))                                       # [B, 1, 1, n], bool
    y = attention(q, k, v, seen, [], ..., "dilated(2048:1,4096:2,causal)", "")

Another function than the model's own, which is why it is asked for. Causal composes with it, dropout and sinks, and
masks that say which keys, or which queries and which keys, are padding; a query that is padding gets 0. What hides a
key by adding a number below -1e4 hides it whole: a row that sees padding only is 0. All else stays as it was, and the
report says why.

Before: every mask read. After: a site is dilated, or says why it is not. Modules that are dilated themselves
(ringopt/nn.py) are found as sites and stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, OpCall
from ringopt.context_parallel.geometry.dilation import Dilation, dilation_of, is_dilated
from ringopt.dims.origin import origins
from ringopt.expr.terms import Term, dumps
from ringopt.ir.nodes import emit, shape_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.options import DilationOffsets
from ringopt.recognize.additive_mask import Hidden, hidden
from ringopt.rewrite import Facts, Rewrite

attention = operators.attention.default


@dataclass(frozen=True)
class Site:
    """One that is to be dilated. `hidden` is what its mask hides, or why it cannot be said in keys and queries; None
    where it is dilated already."""

    node: fx.Node
    hidden: Hidden | str | None = None


@dataclass(frozen=True)
class Dilate(Rewrite[fx.Node, Site]):
    """Makes self-attention dilated (LongNet, Ding et al. 2023) where options ask for it."""

    name = "dilate"
    writes = ("sites",)

    segment_lengths: tuple[int, ...] | None = None
    dilation_rates: tuple[int, ...] | None = None
    dilation_offsets: DilationOffsets = "paper"

    def subjects(self, facts: Facts) -> Iterable[fx.Node]:
        return facts.context.sites

    def match(self, node: fx.Node, facts: Facts) -> Site | None:
        if node.target is attention and is_dilated(AttentionCall.of(node).pattern):
            return Site(node)
        return Site(node, readable(node, facts.context.sites[node])) if self.segment_lengths is not None else None

    def check(self, found: Site, facts: Facts) -> Refusal | None:
        return Refusal(found.hidden, found.node) if isinstance(found.hidden, str) else None

    def rewrite(self, found: Site, facts: Facts) -> None:
        info = facts.context.sites[found.node]
        if isinstance(found.hidden, Hidden):
            assert self.segment_lengths is not None and self.dilation_rates is not None
            causal = found.hidden.causal
            pattern = Dilation(self.segment_lengths, self.dilation_rates, causal, self.dilation_offsets).text
            thinned(found.node, found.hidden, pattern, facts)
        call = AttentionCall.of(found.node)
        info.pattern = call.pattern
        info.notes += filter(None, notes_of(dilation_of(info.pattern), *map(at_hand, shape_of(call.q)[1:3])))

    def refuse(self, found: Site, refusal: Refusal, facts: Facts) -> None:
        facts.context.sites[found.node].not_dilated = refusal.sentence


def notes_of(dilation: Dilation, heads: int, length: int) -> tuple[str, str]:
    """Notes for the report, at the length of the example inputs."""
    pairs = heads * (length * (length + 1) // 2 if dilation.causal else length * length)
    part = dilation.pairs(length, heads) / pairs
    name = "causal" if dilation.causal else "full"
    return f"computes {part:.1%} of the FLOPs of {name} attention", dilation.sentence_of_left_out(length, heads)


def readable(node: fx.Node, info: SiteInfo) -> Hidden | str:
    """What its mask hides, or why the site cannot be dilated."""
    if info.refusal is not None or node.target is not attention:
        return info.refusal or "it was not read"
    call = AttentionCall.of(node)
    queries, keys = call.rows
    if queries != keys:
        return f"it is no self-attention: {queries} queries look at {keys} keys"
    if looks_elsewhere(*call.operands):
        return "it is no self-attention: keys and values come from where the queries do not"
    if call.attn_mask is not None:
        return "its mask is a tensor that was not read"
    return hidden(call.pattern, call.mask_term)


def looks_elsewhere(q: fx.Node, k: fx.Node, v: fx.Node) -> bool:
    """Cross attention over as many keys as there are queries: keys and values have an origin in common, and none with
    the queries."""
    of_queries, of_keys, of_values = ({end.node for end in origins(x, 2)} for x in (q, k, v))
    return bool(of_keys & of_values) and not of_queries & (of_keys | of_values)


def thinned(node: fx.Node, found: Hidden, pattern: str, facts: Facts) -> None:
    """Makes one attention dilated; its padding mask becomes a mask of each key, and of each query on the output. Sites
    with the same conditions share their tables."""
    call = AttentionCall.of(node)

    def condition(term: Term | None, rows: str) -> fx.Node | None:
        if term is None:
            return None
        text, batch = json.dumps(dumps(term)), shape_of(call.q)[0] if "b" in term.axes else 1
        key = (text, rows, batch, call.rows[1], *call.sources)
        return facts.once(key, lambda: table(node, list(call.sources), text, rows, batch))

    seen, sees = condition(found.seen, "k"), condition(found.sees, "q")
    call.replace(attn_mask=seen, sources=[], pattern=pattern, mask="").write(node)
    if sees is not None:
        with node.graph.inserting_after(node):
            kept = emit(node.graph, torch.ops.aten.where.ScalarOther, (sees, node, 0.0), node)
        node.replace_all_uses_with(kept, lambda user: user is not kept)


def table(node: fx.Node, sources: list[fx.Node], text: str, rows: str, batch: int) -> fx.Node:
    """The condition `text` for each key, [batch, 1, 1, keys], or for each query, [batch, 1, queries, 1]."""
    length = AttentionCall.of(node).rows[1]
    with node.graph.inserting_before(node):
        what = {"sources": sources, "term": text, "rows": rows, "sizes": [batch, 1, length]}
        column = OpCall.to(operators.tabulate.default, **what).emit(node.graph, node)
        if rows == "q":
            return column
        return emit(node.graph, torch.ops.aten.reshape.default, (column, [batch, 1, 1, length]), node)
