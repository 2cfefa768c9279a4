"""For every attention site: how its rows travel, which layout, which kernel; or why it stays replicated.

One layout serves all sites, because values flow between them: zigzag when a causal site is there to gain from it
(contiguous shards give the last rank about twice the mean work), contiguous otherwise. Zigzag needs 2p rows on every
axis.

Before: mask classified. After: `strategy`, `layout`, `kernel`, `bytes_sent` of each site that can be sharded.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.attention.bytes import Sizes, bytes_sent
from ringopt.attention.exchange import Exchange, exchange_of
from ringopt.attention.patterns import Window
from ringopt.attention.plans import Plan, plan_of
from ringopt.attention.rows import count
from ringopt.errors import OptionError
from ringopt.graph.mask import Mask
from ringopt.graph.nodes import shape_of, value_of
from ringopt.kernels.choose import choose
from ringopt.pipeline import Context, Pass, SiteInfo


class ChooseStrategy(Pass):
    name = "choose_strategy"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node, info in context.sites.items():
            if info.refusal is None:
                info.refusal = refusal_of(node, info, context)
        sites = {node: info for node, info in context.sites.items() if info.refusal is None}
        context.layout = layout_for(sites, context)
        for node, info in sites.items():
            choose_for(node, info, context)


def lengths(node: fx.Node) -> tuple[int, int]:
    return shape_of(node.args[0])[2], shape_of(node.args[1])[2]


def refusal_of(node: fx.Node, info: SiteInfo, context: Context) -> str | None:
    options, ranks = context.options, context.mesh.size
    far = Mask.parse(node.args[8]).far
    if far is not None:
        return f"its scores go through a function that holds {far:g}; beside such a number partial sums are not exact"
    shortest = min(lengths(node))
    if shortest >= ranks:
        return None
    said = f"{shortest} rows for {ranks} ranks"
    if options.strategy != "auto":
        raise OptionError(
            f"option strategy={options.strategy!r}: site {info.module or node.name} has {said}; every rank needs a "
            'row. Use fewer ranks, longer inputs, or strategy="auto", which leaves such a site replicated'
        )
    return f"{said}: every rank needs a row"


def layout_for(sites: dict[fx.Node, SiteInfo], context: Context) -> str:
    ranks, asked = context.mesh.size, context.options.layout
    shortest = min((min(lengths(node)) for node in sites), default=0)
    enough = shortest >= 2 * ranks
    if asked == "zigzag" and sites and not enough:
        raise OptionError(
            f'option layout="zigzag": the shortest sequence has {shortest} rows, and zigzag over {ranks} ranks needs '
            f'{2 * ranks}. Use layout="contiguous" or "auto"'
        )
    if asked != "auto":
        return asked
    if context.options.strategy == "halo":
        return "contiguous"  # the only one that it can do
    return "zigzag" if enough and any(node.args[7] == "causal" for node in sites) else "contiguous"


def choose_for(node: fx.Node, info: SiteInfo, context: Context) -> None:
    q, k, v = (value_of(operand) for operand in node.args[:3])
    info.layout = context.layout
    info.strategy = context.options.strategy
    if info.strategy == "auto":
        info.strategy = cheapest(node, info, context)
    kernel, reason = choose(context.options.kernel, q.dtype, q.device, k.shape[-1], v.shape[-1])
    info.kernel = kernel.name
    info.notes.append(reason)
    info.bytes_sent = bytes_sent(asked_plan(node, info, context), Sizes.of(q, k, v), context.mesh.rank)


def asked_plan(node: fx.Node, info: SiteInfo, context: Context) -> Plan:
    """By `info.strategy`. Raises OptionError, which names the site, where that cannot be done."""
    try:
        return plan_for(node, context, info.strategy)
    except OptionError as error:
        raise OptionError(f"site {info.module or node.name}: {error}") from error


def plan_for(node: fx.Node, context: Context, strategy: str) -> Plan:
    q, k = (shape_of(operand) for operand in node.args[:2])
    layouts = (context.layout, context.layout)
    where = (node.args[7], q[2], k[2], context.mesh.size, *layouts, strategy)
    return plan_of(*where, (q[1], k[1]), Mask.parse(node.args[8]))


def cheapest(node: fx.Node, info: SiteInfo, context: Context) -> str:
    """The ring, which holds two shards at most; for windows a gather, which takes each row straight to its few users.
    The choice looks at all ranks, so that all make the same."""
    ring, gather = (rows_plan(node, context, strategy) for strategy in ("ring", "gather"))
    if not isinstance(ring.pattern, Window):
        return "ring"
    held = max(count(gather.needs(rank)) for rank in range(context.mesh.size))
    if held > 3 * gather.shard or gather.volume >= ring.volume:
        return "ring"
    info.notes.append(f"gather: a ring would send {ring.volume} rows in all for the {gather.volume} that are needed")
    return "gather"


def rows_plan(node: fx.Node, context: Context, strategy: str) -> Exchange:
    return exchange_of(node.args[7], *lengths(node), context.mesh.size, context.layout, context.layout, strategy)
