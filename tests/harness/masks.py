"""Masks of captured programs beside what classify_mask made of them, for tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import torch
import torch.fx as fx
import torch.nn as nn

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.expr.mask import Mask, ScoreBlock
from ringopt.ir.nodes import shape_of
from ringopt.ir.site import SiteInfo
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.normalize import Normalize
from ringopt.pipeline import Context, Pass
from tests.harness.capturing import after


@dataclass
class Site:
    info: SiteInfo
    node: fx.Node
    given: torch.Tensor | None  # the program's own mask
    flag: str  # "causal" where the program gave no mask but is_causal
    sources: list[torch.Tensor]

    @property
    def mask(self) -> Mask:
        return AttentionCall.of(self.node).mask_term

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        call = AttentionCall.of(self.node)
        return *shape_of(call.q)[:3], call.rows[1]

    def block(self, rows: range, keys: range) -> torch.Tensor:
        """The additive mask that pattern and terms make."""
        b, h, q, k = self.sizes
        visible = seen(pattern_of(AttentionCall.of(self.node).pattern, q, k), rows, keys)
        added = self.mask.additive(ScoreBlock(b, h, rows, keys), self.sources, torch.float32)
        return added.masked_fill(~visible, -math.inf)


class Remember(Pass):
    """Keeps the graph as it is now, to compute what it computes; and its constants, as the backend does."""

    name = "remember"
    reads = ("sites",)
    writes = ("values",)

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        calls = {node.name: AttentionCall.of(node) for node in context.sites}
        self.masks = {name: call.attn_mask.name for name, call in calls.items() if call.attn_mask is not None}
        self.flags = {name: call.pattern for name, call in calls.items()}
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(gm.graph, {}))
        context.values = {node: getattr(gm, node.target) for node in gm.graph.find_nodes(op="get_attr")}


def classified(module: nn.Module, *args: object) -> tuple[list[Site], Context]:
    remember = Remember()
    gm, context = after((Normalize(), FindAttention(), remember, ClassifyMask()), module, *args)
    values: dict[str, torch.Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node):
            values[node.name] = super().run_node(node)
            return values[node.name]

    with torch.no_grad():
        Recorder(gm, graph=remember.graph).run(*gm.meta["inputs"])
    sites = []
    for node, info in context.sites.items():
        given = values[remember.masks[node.name]] if node.name in remember.masks else None
        sources = [values[source.name] for source in AttentionCall.of(node).sources]
        sites.append(Site(info, node, given, remember.flags[node.name], sources))
    return sites, context


def blocks(size: int, step: int) -> list[range]:
    return [range(start, min(start + step, size)) for start in range(0, size, step)]


def assert_same_mask(site: Site) -> None:
    """In every block: hidden where the program hides, else the same bits; and true verdicts."""
    b, h, q, k = site.sizes
    assert AttentionCall.of(site.node).attn_mask is None
    given = site.given
    if given is None:
        given = torch.ones(q, k, dtype=torch.bool)
        given = given.tril() if site.flag == "causal" else given
    given = given.expand(*given.shape[:-2], q, k)
    for rows, keys in product(blocks(q, 5), blocks(k, 7)):
        found, original = site.block(rows, keys), given[..., rows.start : rows.stop, keys.start : keys.stop]
        hidden = found == -math.inf
        if original.dtype == torch.bool:
            assert bool((original == ~hidden).all()) and bool((hidden | (found == 0)).all())
        else:
            assert bool(torch.where(hidden, original <= -1e9, original == found).all())
        kind = site.mask.kind({"b": range(b), "h": range(h), "q": rows, "k": keys}, site.sources)
        block = site.mask.additive(ScoreBlock(b, h, rows, keys), site.sources, torch.float32)
        assert kind == "partial" or bool((block == (-math.inf if kind == "empty" else 0)).all())
        assert Mask.parse(site.mask.text) == site.mask


def only(module: nn.Module, *args: object) -> Site:
    (site,) = classified(module, *args)[0]
    assert_same_mask(site)
    return site
