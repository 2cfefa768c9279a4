"""All K and V under way before an attention: as an all-gather, where the cost model was free to choose.

Its predictions are of attentions by themselves. What stands before one in a graph hides all of an all-gather, of a ring
the first hop only, and nothing of what sends queries too. So where an all-gather is faster with that taken off, it is
taken. Decided by facts and rates that all ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.fx as fx

from ringopt.calls import call_over_ranks
from ringopt.cost.choose import CLOSE, MOST_RANKS, duration, keys_travel
from ringopt.cost.message_bytes import bytes_sent
from ringopt.cost.simulate import Heads, simulate
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.hardware.rates import Rates
from ringopt.ir.nodes import op_name
from ringopt.ir.site import SiteInfo
from ringopt.overlap.in_flight import first_bytes, home_bytes, plan_at
from ringopt.overlap.meanwhile import Meanwhile

ALL = "gather"


@dataclass(frozen=True)
class Overlap:
    """What overlaps with the ends of an exchange of `heads`: "forward", "backward", "home" (passes/schedule.py); of
    inference "forward" alone."""

    work: Mapping[str, Meanwhile]
    heads: Heads
    ranks: int
    rates: Rates

    def bytes_of(self, node: fx.Node) -> dict[str, int]:
        """Under way at each end, with the strategy that `node` has."""
        first = first_bytes(node, self.ranks)
        return {end: home_bytes(node, self.ranks) if end == "home" else first for end in self.work}

    def hidden(self, node: fx.Node) -> float:
        """Seconds that `work` hides of the exchange, with the strategy that `node` has, beside what the attention
        does."""
        plan, found, exposed = plan_at(node, self.ranks), 0.0, {}
        if not keys_travel(plan):
            return 0.0
        for end, size in self.bytes_of(node).items():
            backward, work = end != "forward", self.work[end]
            if backward not in exposed:
                exposed[backward] = simulate(plan, self.heads, self.rates, backward).exposed
            if work.pays:
                less = min(work.seconds, self.rates.exchange_seconds(size, 1), exposed[backward])
                exposed[backward] -= less
                found += less
        return found

    def fits(self, node: fx.Node) -> bool:
        """Whether so much may be under way, with the strategy that `node` has."""
        return all(replace(self.work[end], held=size).fits for end, size in self.bytes_of(node).items())


def all_at_once(node: fx.Node, info: SiteInfo, mesh: Mesh, rates: Rates, work: Mapping[str, Meanwhile]) -> None:
    """Makes an attention an all-gather, in place, where the cost model chose another strategy by itself and that is
    slower. Says so in the report."""
    call, predicted = call_over_ranks(node), {one.strategy: one for one in info.predictions}
    free = op_name(node) == "ring_attention" and info.latents is None and ALL in predicted and predicted[ALL].fits
    if not free or call.strategy not in predicted or mesh.name == ANY or mesh.size > MOST_RANKS or call.strategy == ALL:
        return
    ends = work if info.training else {"forward": work["forward"]}
    overlap = Overlap(ends, Heads.of(*call.values, kernel=info.kernel), mesh.size, rates)
    before = predicted[call.strategy].seconds - overlap.hidden(node)
    gathered = call.replace(strategy=ALL)
    gathered.write(node)
    after = predicted[ALL].seconds - overlap.hidden(node)
    if after > before * (1 - CLOSE) or not overlap.fits(node):
        call.write(node)
        return
    info.strategy, info.bytes_sent = ALL, bytes_sent(plan_at(node, mesh.size), overlap.heads, mesh.rank)
    info.notes.append(
        f"strategy {ALL} in place of {call.strategy}: all keys are under way behind {work['forward']}; "
        f"{duration(after)} beside that, and {duration(before)}, predicted"
    )
