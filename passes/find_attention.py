"""Every call of scaled_dot_product_attention becomes one canonical node.

    scaled_dot_product_attention(q, k, v, mask, is_causal=..., scale=..., enable_gqa=...)
        ->  ringopt::attention(q, k, v, mask, [], None, seed, "full" | "causal", "", dropout_p, scale)

q, k, v become [B, H, S, D]: operands of other ranks are viewed so, those that torch would broadcast are expanded.
nn.MultiheadAttention (need_weights=False) reaches this pass as scaled_dot_product_attention already.
After: same numbers; every attention that is left alone has a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, Sdpa
from ringopt.dims.declared_attention import DeclaredSite, why_not
from ringopt.ir.nodes import op_name, shape_of, value_of
from ringopt.ir.notes import SPELLED
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ops import operators
from ringopt.recognize.emit import draw_seed, expanded, four_dims, four_sizes, mask_of, view, with_positive_scale
from ringopt.rewrite import Facts, Rewrite

aten = torch.ops.aten


@dataclass(frozen=True)
class Called:
    """A call of attention. `sdpa` is None where it is canonical already, as that of a module of ringopt/nn.py is, and
    where it is an operator that is `declared` to be attention and had to stay as it is."""

    node: fx.Node
    info: SiteInfo
    sdpa: Sdpa | None = None
    declared: DeclaredSite | None = None


@dataclass(frozen=True)
class FindAttention(Rewrite[fx.Node, Called]):
    """Rewrites scaled_dot_product_attention as `ringopt::attention`: four dims, explicit scale, seed and mask."""

    name = "find_attention"
    writes = ("sites",)

    def subjects(self, facts: Facts) -> Iterable[fx.Node]:
        return list(facts.graph.nodes)

    def match(self, node: fx.Node, facts: Facts) -> Called | None:
        if node.target is operators.attention.default:
            return Called(node, SiteInfo.at(node, "ringopt", AttentionCall.of(node).pattern, False))
        if (declared := DeclaredSite.of(node)) is not None:
            return Called(node, SiteInfo.at(node, op_name(node), "full", False), declared=declared)
        if node.target is not aten.scaled_dot_product_attention.default:
            return None
        sdpa, form = Sdpa.of(node), _form_of(node)
        pattern, masked = "causal" if sdpa.is_causal else "full", sdpa.attn_mask is not None
        return Called(node, SiteInfo.at(node, form, pattern, masked), sdpa)

    def check(self, found: Called, facts: Facts) -> Refusal | None:
        if found.declared is not None:  # what may be rewritten was, by normalize
            return why_not(found.declared) or Refusal("its rule came too late", found.node)
        return _why_not(found.node, found.sdpa) if found.sdpa is not None else None

    def rewrite(self, found: Called, facts: Facts) -> None:
        node = found.node if found.sdpa is None else canonical(facts.graph, found.node, found.sdpa)
        facts.context.sites[node] = found.info

    def refuse(self, found: Called, refusal: Refusal, facts: Facts) -> None:
        facts.context.sites[found.node] = replace(found.info, refusal=refusal.sentence)


def _form_of(node: fx.Node) -> str:
    if SPELLED in node.meta:
        return str(node.meta[SPELLED])
    callers = [str(name) for name, _ in node.meta.get("source_fn_stack", [])]
    return "multihead_attention" if any("multi_head_attention" in name for name in callers) else "sdpa"


def _why_not(node: fx.Node, site: Sdpa) -> Refusal | None:
    query, key, value = (shape_of(operand) for operand in (site.query, site.key, site.value))
    rank = len(shape_of(node))
    if site.enable_gqa and _heads_of(key) != _heads_of(value):
        return Refusal(f"key {list(key)} and value {list(value)} have different numbers of heads", node)
    if site.attn_mask is not None and len(shape_of(site.attn_mask)) > rank:
        return Refusal(f"the mask {list(shape_of(site.attn_mask))} has more dims than the query {list(query)}", node)
    if site.attn_mask is not None and site.is_causal:
        return Refusal("attn_mask and is_causal are both given", node)
    return None


def _heads_of(shape: tuple[int, ...]) -> int:
    return shape[-3] if len(shape) > 2 else 1


def canonical(graph: fx.Graph, node: fx.Node, site: Sdpa) -> fx.Node:
    """Replaces one call and returns the new node, B H S D."""
    out, rank = shape_of(node), len(shape_of(node))
    with graph.inserting_before(node):
        q, k, v = (four_dims(graph, operand) for operand in operands(graph, site, out[:-2]))
        mask = mask_of(graph, site.attn_mask, out[:-2]) if site.attn_mask is not None else None
        scale = site.scale if site.scale is not None else 1.0 / math.sqrt(shape_of(site.query)[-1])
        q, scale = with_positive_scale(graph, q, scale)
        new = AttentionCall(
            q,
            k,
            v,
            attn_mask=mask,
            seed=draw_seed(graph, node) if site.dropout_p else None,
            pattern="causal" if site.is_causal else "full",
            dropout_p=site.dropout_p,
            scale=scale,
        ).emit(graph, node)
        new.meta = {**node.meta, "val": value_of(node)}
        result = new
        if rank != 4:
            new.meta["val"] = value_of(node).reshape(four_sizes(out))
            result = view(graph, new, list(out))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return new


def operands(graph: fx.Graph, site: Sdpa, lead: tuple[int, ...]) -> list[fx.Node]:
    """Query, key and value with the leading dims of the output, to which torch broadcasts them. KV heads that are
    shared stay fewer than query heads."""
    given = [site.query, site.key, site.value]
    shared = site.enable_gqa or all(_heads_of(shape_of(operand)) == 1 for operand in given[1:])
    result = []
    for place, operand in enumerate(given):
        own = shared and place > 0
        heads = (*lead[:-1], _heads_of(shape_of(operand))) if own and lead else lead
        result.append(expanded(graph, operand, [*heads, *shape_of(operand)[-2:]]))
    return result
