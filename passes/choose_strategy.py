"""For every attention site: how its rows travel, which layout, which kernel; or why it stays replicated.

Values flow between sites, so each sequence has one layout: that in which all sites together are predicted to take least
time (ringopt/cost/choose.py). For causal sites that is zigzag, since contiguous shards give the last rank about
twice the mean work; it needs 2p rows. Sequences of different lengths, as of an encoder and a decoder, may differ.

Before: mask classified. After: `strategy`, `layout`, `kernel`, `bytes_sent` of each site that can be sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.context_parallel.geometry.layouts import text_of
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import on_nodes
from ringopt.cost.choose import choose_strategy, estimate
from ringopt.cost.dilated_site import choose_dilated
from ringopt.cost.layouts import layouts_for
from ringopt.cost.message_bytes import bytes_sent
from ringopt.cost.site import case_of, kernel_of, lengths, looked_at, over_nodes, rates_for
from ringopt.distributed.mesh import ANY
from ringopt.errors import OptionError
from ringopt.ir.nodes import op_name, requires_grad, shape_of, source_line
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand, is_open
from ringopt.options import KernelName, LayoutName, Shard, SiteOptions, Strategy
from ringopt.pipeline import Context, Pass
from ringopt.recognize.row_pairs import NO_SITE, Pairs, pairs_in
from ringopt.scans.call import is_scan
from ringopt.sharding.behind_breaks import reach_products, worth_cutting
from ringopt.sharding.grains import with_grains
from ringopt.sharding.handlers.mixing import mixed_rows, note_of_mixing
from ringopt.sharding.handlers.pairs import enough_queries
from ringopt.sharding.latents import note_of_latents, with_latents
from ringopt.sharding.recurrences.scans import scan_sites
from ringopt.sharding.sites import NO_EXCHANGE, refusal_of


@dataclass(frozen=True)
class ChooseStrategy(Pass):
    """Gives each attention a strategy, a layout and a kernel, those that options name or the cost model's choice."""

    name = "choose_strategy"
    reads = ("mesh",)
    writes = ("sites", "scans", "carries", "layouts", "pairs", "weights", "given", "cuts", "mixed", "notes")

    shard: Shard = "model"
    strategy: Strategy = "auto"
    layout: LayoutName = "auto"
    kernel: KernelName = "auto"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node, info in context.sites.items():
            if info.refusal is None:
                info.refusal = refusal_of(node, info, self.strategy, context.mesh)
        sites = {node: info for node, info in context.sites.items() if info.refusal is None}
        context.carries = requires_grad(gm.graph)
        given = {where.layout for where in context.given.values()}
        context.layouts, why = layouts_for(sites, self, context.mesh, given, context.carries)
        if self.shard == "model":
            scans = [node for node in gm.graph.nodes if is_scan(node)]
            context.layouts = with_grains(context.layouts, scans, context.mesh, bool(context.given), self.layout)
            context.pairs = pairs_of(gm.graph, context)
        if any(where.layout != context.layouts.of(where.placement.length) for where in context.given.values()):
            context.notes.append(f"inputs that arrive in rows are read whole: this graph is {context.layouts.name}")
            context.given.clear()
        context.cuts = worth_cutting(gm.graph, context.cuts, context.layouts, ranks := looked_at(context.mesh))
        if self.shard == "model":
            context.scans = scan_sites(gm.graph, context.mesh, context.layouts, self.strategy, context.carries)
            if not context.mixes_rows and not reach_products(gm.graph, context.cuts):
                attends = bool(context.sites or context.scans)
                found = mixed_rows(gm.graph, context.layouts, ranks, attends, bool(context.pairs))
                context.mixed = {x: at for x, at in found.items() if x not in context.cuts}
                context.notes += note_of_mixing(context.mixed)
        for node, info in sites.items():
            info.notes += [why] if why else []
            call = AttentionCall.of(node)
            if is_dilated(call.pattern):
                choose_dilated(node, info, self, context.mesh, context.layouts.of(call.rows[0]))
            else:
                choose_for(node, info, self, context)


def pairs_of(graph: fx.Graph, context: Context) -> dict[fx.Node, Pairs]:
    """Pairs that are no site and have queries enough for the ranks, by the product of queries and keys."""
    layouts, size = context.layouts, context.mesh.size
    found = {node: pairs for node, pairs in pairs_in(graph).items() if enough_queries(pairs, layouts, size)}
    where = [f"{op_name(node)} {list(shape_of(node))} ({source_line(node)})" for node in found]
    context.notes += [f"pairs of {', '.join(where)} {NO_SITE}"] if where else []
    context.weights = {node.name: dims for pairs in found.values() for node, dims in pairs.weights.items()}
    return found


def choose_for(node: fx.Node, info: SiteInfo, asked: SiteOptions, context: Context) -> None:
    """Fills in strategy, layout, kernel and predicted bytes of one site. Raises OptionError if the strategy cannot."""
    case = case_of(node, context.mesh, asked.kernel, context.carries)
    case, latents = with_latents(node, info, case)
    info.layout = text_of(*map(context.layouts.of, lengths(node, context.mesh)))
    info.strategy = on_nodes(asked.strategy, context.mesh)
    if info.whole:
        info.strategy = "merge" if info.whole == "queries" else "local"
        few = f"{at_hand(min(lengths(node, context.mesh)))} rows of {info.whole} for {context.mesh.size} ranks"
        info.notes.append(NO_EXCHANGE if info.by_heads else f"{few}: all on every rank")
    elif info.strategy == "auto":
        fixed = context.mesh.name != ANY and not any(map(is_open, lengths(node, context.mesh)))
        choice = choose_strategy(case, looked_at(context.mesh), info.layout, rates_for(context.mesh, node), fixed)
        info.strategy = choice.strategy
        info.reason, info.predictions, info.training = choice.reason, choice.predictions, case.training
        info.notes.append(info.reason)
    kernel = kernel_of(AttentionCall.of(node).values, asked.kernel, context.mesh)
    info.kernel, info.kernel_there = kernel.here, kernel.there
    info.notes.append(kernel.reason)
    case = replace(case, whole=info.whole)
    try:
        plan = case.plan(context.mesh.size, info.layout, info.strategy)
    except OptionError as error:
        raise OptionError(f"site {info.module or node.name}: {error}") from error
    if latents is not None:
        found = estimate(case, looked_at(context.mesh), info.layout, info.strategy, rates_for(context.mesh, node))
        info.latents = latents if found.latent else None
        info.notes.append(note_of_latents(latents, case.heads, found))
        case = case if found.latent else case.plain()
    info.bytes_sent = bytes_sent(plan, case.heads, context.mesh.rank)
    if isinstance(plan, HeadExchange) and plan.nodes > 1:
        info.notes.append(over_nodes(plan, case.heads, context.mesh.rank))
