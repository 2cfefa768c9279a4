"""For every attention site: how its rows travel, which layout, which kernel; or why it stays replicated.

Values flow between sites, so each sequence has one layout: that in which all sites together are predicted to take least
time (ringopt/cost/choose.py). For causal sites that is zigzag, since contiguous shards give the last rank about
twice the mean work; it needs 2p rows. Sequences of different lengths, as of an encoder and a decoder, may differ.

Before: mask classified. After: `strategy`, `layout`, `kernel`, `bytes_sent` of each site that can be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.context_parallel.geometry.layouts import LAYOUTS, text_of
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import on_nodes
from ringopt.cost.choose import Case, choose, choose_layout, choose_layouts
from ringopt.cost.message_bytes import bytes_between, bytes_sent
from ringopt.cost.simulate import Heads
from ringopt.distributed.agreed_rates import agreed_rates
from ringopt.distributed.mesh import ANY, PretendedMesh
from ringopt.errors import OptionError
from ringopt.hardware.rates import Rates, cautious, rates_of
from ringopt.ir.nodes import named, op_name, requires_grad, shape_of, source_line, value_of
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.symbolic_sizes import at_hand, formula, is_open
from ringopt.kernels.choose import choose as choose_kernel
from ringopt.passes.dilated_sites import choose_dilated, dilated_layout
from ringopt.pipeline import Context, Pass, SiteInfo
from ringopt.recognize.row_pairs import NO_SITE, pairs_in
from ringopt.report import readable

LEAST = 2  # ranks


class ChooseStrategy(Pass):
    name = "choose_strategy"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node, info in context.sites.items():
            if info.refusal is None:
                info.refusal = refusal_of(node, info, context)
        sites = {node: info for node, info in context.sites.items() if info.refusal is None}
        context.carries = requires_grad(gm.graph)
        context.layouts, why = layouts_for(sites, context)
        context.pairs = pairs_of(gm.graph, context)
        if any(where.layout != context.layouts.of(where.placement.length) for where in context.given.values()):
            context.notes.append(f"inputs that arrive in rows are read whole: this graph is {context.layouts.name}")
            context.given.clear()
        for node, info in sites.items():
            info.notes += [why] if why else []
            if is_dilated(AttentionCall.of(node).pattern):
                choose_dilated(node, info, context)
            else:
                choose_for(node, info, context)


def pairs_of(graph: fx.Graph, context: Context) -> dict[fx.Node, Sharded]:
    """Queries of what is no site, where every chunk of their layout has a row of them."""
    if context.options.shard == "attention":
        return {}
    found = {
        node: pairs
        for node, pairs in pairs_in(graph).items()
        if at_hand(pairs.rows.length)
        >= LAYOUTS[context.layouts.of(pairs.rows.length)].chunks_per_rank * context.mesh.size
    }
    where = [f"{op_name(node)} {list(shape_of(node))} ({source_line(node)})" for node in found]
    if where:
        context.notes.append(f"pairs of {', '.join(where)} {NO_SITE}")
    context.weights = {node.name: dims for pairs in found.values() for node, dims in pairs.weights.items()}
    return {pairs.queries: pairs.rows for pairs in found.values()}


def lengths(node: fx.Node, context: Context) -> tuple[int, int]:
    """Of queries and keys. A program for any number of ranks holds them against that number when it runs."""
    q, k = AttentionCall.of(node).rows
    return (at_hand(q), at_hand(k)) if context.mesh.name == ANY else (q, k)


def refusal_of(node: fx.Node, info: SiteInfo, context: Context) -> str | None:
    options, ranks = context.options, context.mesh.size
    far = AttentionCall.of(node).mask_term.far
    if far is not None:
        return f"its scores go through a function that holds {far:g}; beside such a number partial sums are not exact"
    queries, keys = lengths(node, context)
    if min(queries, keys) >= ranks:
        return None
    if max(queries, keys) >= ranks and options.strategy == "auto":
        info.whole = "queries" if queries < keys else "keys"
        return None
    said = f"{at_hand(min(queries, keys))} rows for {ranks} ranks"
    if options.strategy != "auto":
        raise OptionError(
            f"option strategy={options.strategy!r}: site {info.module or node.name} has {said}; every rank needs a "
            'row. Use fewer ranks, longer inputs, or strategy="auto", which leaves such a site replicated'
        )
    return f"{said}: every rank needs a row"


def asked_strategy(context: Context) -> str:
    """That of the options, over the nodes that the ranks are on. Raises OptionError."""
    return on_nodes(context.options.strategy, context.mesh)


def layouts_for(sites: dict[fx.Node, SiteInfo], context: Context) -> tuple[Layouts, str]:
    """The layout of each sequence, and why. Raises OptionError where the one that is asked for cannot be."""
    ranks, asked = context.mesh.size, context.options.layout
    spread = [node for node, info in sites.items() if not info.whole]
    cut = (max(lengths(node, context)) if info.whole else min(lengths(node, context)) for node, info in sites.items())
    shortest = min(cut, default=0)
    enough = shortest >= 2 * ranks
    if asked == "zigzag" and sites and not enough:
        raise OptionError(
            f'option layout="zigzag": the shortest sequence has {at_hand(shortest)} rows, and zigzag over {ranks} '
            f'ranks needs {2 * ranks}. Use layout="contiguous" or "auto"'
        )
    if asked != "auto":
        return Layouts(asked), ""
    given = {where.layout for where in context.given.values()}
    if len(given) == 1 and (enough or not sites) and context.options.strategy != "halo":
        return Layouts(given.pop()), ""
    thinned = [node for node in spread if is_dilated(AttentionCall.of(node).pattern)]
    rates, dilated = rates_for(context, *sites) if spread else None, bool(thinned)
    if rates is None or (dilated and not enough):
        return Layouts(), ""
    if len(thinned) == len(spread):
        name, why = dilated_layout(spread, context, looked_at(context), rates)
        return Layouts(name), why
    cases = [case_of(node, context) for node in spread if node not in thinned]
    name, why = "contiguous", ""
    if enough:
        name, why = choose_layout(cases, looked_at(context), asked_strategy(context), tuple(LAYOUTS), rates)
    if dilated or context.mesh.name == ANY:
        return Layouts(name), why
    return layouts_of_axes(Layouts(name), why, spread, context, rates)


def layouts_of_axes(
    one: Layouts, why: str, spread: Sequence[fx.Node], context: Context, rates: Rates
) -> tuple[Layouts, str]:
    """Of sequences of several lengths, each its own; `one` and `why` are those of all of them together."""
    every = [length for node in spread for length in lengths(node, context)]
    decided = [bool(length >= 2 * context.mesh.size) for length in every]  # before formulas: it may fix a length
    axes = {formula(length): length for length in every}
    if len(axes) == 1:
        return one, why
    enough = {formula(length): long for length, long in zip(every, decided, strict=True)}
    sites = [(case_of(node, context), *map(formula, lengths(node, context))) for node in spread]
    chosen, said = choose_layouts(one.name, sites, enough, looked_at(context), asked_strategy(context), rates)
    return Layouts(one.name, tuple((axes[axis], layout) for axis, layout in chosen.items())), said or why


def choose_for(node: fx.Node, info: SiteInfo, context: Context) -> None:
    q, k, v = AttentionCall.of(node).values
    info.layout = text_of(*map(context.layouts.of, lengths(node, context)))
    info.strategy = asked_strategy(context)
    if info.whole:
        info.strategy = "merge" if info.whole == "queries" else "local"
        few = at_hand(min(lengths(node, context)))
        info.notes.append(f"{few} rows of {info.whole} for {context.mesh.size} ranks: all on every rank")
    elif info.strategy == "auto":
        fixed = context.mesh.name != ANY and not any(map(is_open, lengths(node, context)))
        choice = choose(case_of(node, context), looked_at(context), info.layout, rates_for(context, node), fixed)
        info.strategy = choice.strategy
        info.reason = choice.reason
        info.notes.append(info.reason)
    kernel, reason = choose_kernel(context.options.kernel, q.dtype, q.device, k.shape[-1], v.shape[-1])
    info.kernel = kernel.name
    info.notes.append(reason)
    case = replace(case_of(node, context), whole=info.whole)
    try:
        plan = case.plan(context.mesh.size, info.layout, info.strategy)
    except OptionError as error:
        raise OptionError(f"site {info.module or node.name}: {error}") from error
    info.bytes_sent = bytes_sent(plan, case.heads, context.mesh.rank)
    if isinstance(plan, HeadExchange) and plan.nodes > 1:
        info.notes.append(over_nodes(plan, case.heads, context.mesh.rank))


def over_nodes(plan: HeadExchange, heads: Heads, rank: int) -> str:
    """What goes within a node and what leaves it, in the forward."""
    sent, away = bytes_sent(plan, heads, rank), bytes_between(plan, heads, rank, plan.node)
    told = f"nodes of {plan.node} ranks: of {readable(sent)} sent, {readable(away)} leave the node"
    if plan.kv_heads >= plan.node:
        return told
    return f"{told}; {plan.kv_heads} KV heads for the {plan.node} ranks of a node: each goes to all that read it"


def case_of(node: fx.Node, context: Context) -> Case:
    """What the prediction looks at: where lengths are open, those at hand. Scores that a function changes, and dropped
    weights, are computed in products."""
    call = AttentionCall.of(node)
    q, k, v = call.values
    kernel, _reason = choose_kernel(context.options.kernel, q.dtype, q.device, k.shape[-1], v.shape[-1])
    by = "math" if call.dropout_p > 0 or call.mask_term.score is not None else kernel.name
    training = torch.is_grad_enabled() and context.carries[node]
    q_length, kv_length = map(at_hand, lengths(node, context))
    return Case(call.pattern, q_length, kv_length, Heads.of(q, k, v, by), training, call.mask)


def looked_at(context: Context) -> int:
    """The number of ranks that is predicted for: of a program for any number, the least that there can be."""
    return LEAST if context.mesh.name == ANY else context.mesh.size


def rates_for(context: Context, *sites: fx.Node) -> Rates:
    """Those that the ranks agreed on; a program for any machine is made for none in particular."""
    query, mesh = value_of(named(sites[0], "q")), context.mesh
    if mesh.name == ANY:
        return cautious()
    if isinstance(mesh, PretendedMesh) and mesh.hardware is not None:
        return rates_of(mesh.hardware, str(query.dtype).removeprefix("torch."))
    return agreed_rates(mesh, query.device.type)
