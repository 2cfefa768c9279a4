"""Layout, exchange and kernel of dilated sites, and what dilation spares them.

Contiguous shards keep neighbours together, so that most segments lie within one; under a long causal pattern zigzag
shares the work better. Each pattern's rows are gathered, which sends what is needed and no more, unless a rank would
hold more rows of others than it has of its own: those go round a ring (context_parallel/plan/dilated.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.layouts import LAYOUTS
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.dilated import DilatedPlan, dilated_plan_of
from ringopt.context_parallel.plan.exchange import Cargo
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.cost.choose import CLOSE, duration
from ringopt.cost.site import kernel_of
from ringopt.distributed.mesh import Mesh
from ringopt.errors import OptionError
from ringopt.hardware.rates import Rates
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.kernels.choose import choose_kernel
from ringopt.options import SiteOptions
from ringopt.report import bytes_text


def dilated_layout(
    sites: Mapping[fx.Node, SiteInfo], options: SiteOptions, ranks: int, rates: Rates
) -> tuple[str, str]:
    """The layout in which the forward of all `sites` takes least time on `ranks` ranks, and why; of close ones the
    first."""
    totals = {
        layout: sum(seconds(node, info, options, layout, ranks, rates) for node, info in sites.items())
        for layout in LAYOUTS
    }
    fastest = min(totals.values())
    best = next(layout for layout, total in totals.items() if total <= fastest * (1 + CLOSE))
    text = " and ".join(f"{duration(total)} {layout}" for layout, total in totals.items())
    return best, f"layout {best}: all sites take {text}, predicted; {rates.source}"


def seconds(node: fx.Node, info: SiteInfo, options: SiteOptions, layout: str, ranks: int, rates: Rates) -> float:
    """Of the slowest rank: what it computes, with what it sends hidden behind that as far as may be."""
    call = AttentionCall.of(node)
    q, k, v = call.values
    plan, shape = plan_of(node, info, options.strategy, layout, ranks), "causal" if "causal" in call.pattern else "full"
    kernel, _reason = choose_kernel(options.kernel, q.dtype, q.device, k.shape[-1], v.shape[-1])
    speed = rates.tile(kernel.name, str(q.dtype).removeprefix("torch."), False, shape)
    return max(
        rates.step_seconds(
            speed.seconds(2 * at_hand(q.shape[0]) * plan.pairs(rank) * (q.shape[-1] + v.shape[-1])),
            rates.exchange_seconds(plan.sent_rows(rank, Cargo.OUT) * row_bytes(node), ranks - 1),
        )
        for rank in range(ranks)
    )


def choose_dilated(node: fx.Node, info: SiteInfo, options: SiteOptions, mesh: Mesh, layout: str) -> None:
    """Fills in `info`."""
    call = AttentionCall.of(node)
    plan = plan_of(node, info, options.strategy, layout, mesh.size)
    kernel = kernel_of(call.values, options.kernel, mesh)
    info.layout, info.strategy, info.kernel, info.kernel_there = layout, plan.strategies, kernel.here, kernel.there
    info.bytes_sent = plan.sent_rows(mesh.rank, Cargo.OUT) * row_bytes(node)
    info.notes += [kernel.reason, spared(node, plan, layout, mesh.size)]


def plan_of(node: fx.Node, info: SiteInfo, strategy: str, layout: str, ranks: int) -> DilatedPlan:
    """Of the length at hand. Raises OptionError, which names the site, for a strategy that dilated attention has
    not."""
    call = AttentionCall.of(node)
    try:
        return dilated_plan_of(call.pattern, at_hand(call.rows[0]), call.heads, ranks, layout, strategy)
    except OptionError as error:
        raise OptionError(f"site {info.module or node.name}: {error}") from error


def row_bytes(node: fx.Node) -> int:
    """Of one row of one KV head, with its value."""
    _q, k, v = AttentionCall.of(node).values
    return int(at_hand(k.shape[0]) * (k.shape[-1] + v.shape[-1]) * k.element_size())


def spared(node: fx.Node, plan: DilatedPlan, layout: str, ranks: int) -> str:
    """Of all ranks together."""
    call = AttentionCall.of(node)
    length, row = at_hand(call.rows[0]), row_bytes(node)
    pattern = "causal" if plan.dilation.causal else "full"
    ring = exchange_of(ShardedPattern.of_self_attention(pattern, length, ranks, layout), "ring")
    sent = sum(plan.sent_rows(rank, Cargo.OUT) for rank in range(ranks)) * row
    return (
        f"all ranks together send {bytes_text(sent)} a forward, where a ring of {pattern} attention would send "
        f"{bytes_text(ring.volume * call.heads[1] * row)}"
    )
