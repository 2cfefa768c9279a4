"""Every call of scaled_dot_product_attention becomes one canonical node.

    scaled_dot_product_attention(q, k, v, mask, is_causal=..., scale=..., enable_gqa=...)
        ->  ringopt::attention(q, k, v, mask, [], None, seed, "full" | "causal", "", dropout_p, scale)

q, k, v become [B, H, S, D]: operands of other ranks are viewed so, those that torch would broadcast are expanded.
nn.MultiheadAttention (need_weights=False) reaches this pass as scaled_dot_product_attention already, its projection and
head split beside it.
After: same numbers; every attention that is left alone has a refusal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.ir.nodes import module_path, shape_of, source_line, value_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ops import operators
from ringopt.pipeline import Context, Pass
from ringopt.recognize.emit import draw_seed, expanded, four_dims, four_sizes, mask_of, view, with_positive_scale
from ringopt.torch_compat.schema import schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Sdpa:
    """The arguments of scaled_dot_product_attention, however they were given."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    attn_mask: fx.Node | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def of(cls, node: fx.Node) -> Sdpa:
        names = [argument.name for argument in schema_of(node.target).arguments]
        return cls(**dict(zip(names, node.args)), **node.kwargs)  # noqa: B905


@dataclass(frozen=True)
class FindAttention(Pass):
    """Rewrites scaled_dot_product_attention as `ringopt::attention`: four dims, explicit scale, seed and mask."""

    name = "find_attention"
    writes = ("sites",)

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node in list(gm.graph.nodes):
            if node.target is operators.attention.default:  # a module of ringopt/nn.py
                pattern = AttentionCall.of(node).pattern
                context.sites[node] = SiteInfo(module_path(node), "ringopt", pattern, False, source_line(node))
            if node.target is not aten.scaled_dot_product_attention.default:
                continue
            site = Sdpa.of(node)
            pattern = "causal" if site.is_causal else "full"
            masked = site.attn_mask is not None
            info = SiteInfo(module_path(node), form_of(node), pattern, masked, source_line(node))
            refusal = check(node, site)
            if refusal is None:
                context.sites[rewrite(gm.graph, node, site)] = info
            else:
                info.refusal = refusal.sentence
                context.sites[node] = info


def form_of(node: fx.Node) -> str:
    """How the program called it, for the report."""
    callers = [str(name) for name, _ in node.meta.get("source_fn_stack", [])]
    return "multihead_attention" if any("multi_head_attention" in name for name in callers) else "sdpa"


def check(node: fx.Node, site: Sdpa) -> Refusal | None:
    """Why a call is left as it is, None if it can be rewritten."""
    query, key, value = (shape_of(operand) for operand in (site.query, site.key, site.value))
    rank = len(shape_of(node))
    if site.enable_gqa and heads_of(key) != heads_of(value):
        return Refusal(f"key {list(key)} and value {list(value)} have different numbers of heads", node)
    if site.attn_mask is not None and len(shape_of(site.attn_mask)) > rank:
        return Refusal(f"the mask {list(shape_of(site.attn_mask))} has more dims than the query {list(query)}", node)
    if site.attn_mask is not None and site.is_causal:
        return Refusal("attn_mask and is_causal are both given", node)
    return None


def heads_of(shape: tuple[int, ...]) -> int:
    """The number of heads of a shape [..., H, S, D], 1 for [S, D]."""
    return shape[-3] if len(shape) > 2 else 1


def rewrite(graph: fx.Graph, node: fx.Node, site: Sdpa) -> fx.Node:
    """Replaces one call and returns the new node, B H S D."""
    out, rank = shape_of(node), len(shape_of(node))
    with graph.inserting_before(node):
        q, k, v = (four_dims(graph, operand) for operand in operands(graph, site, out[:-2]))
        mask = mask_of(graph, site.attn_mask, out[:-2]) if site.attn_mask is not None else None
        scale = site.scale if site.scale is not None else 1.0 / math.sqrt(shape_of(site.query)[-1])
        q, scale = with_positive_scale(graph, q, scale)
        pattern = "causal" if site.is_causal else "full"
        seed = draw_seed(graph, node) if site.dropout_p else None
        args: Any = (q, k, v, mask, [], None, seed, pattern, "", site.dropout_p, scale)
        new = graph.create_node("call_function", operators.attention.default, args, {}, "attention")
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
    shared = site.enable_gqa or all(heads_of(shape_of(operand)) == 1 for operand in given[1:])
    result = []
    for place, operand in enumerate(given):
        own = shared and place > 0
        heads = (*lead[:-1], heads_of(shape_of(operand))) if own and lead else lead
        result.append(expanded(graph, operand, [*heads, *shape_of(operand)[-2:]]))
    return result
