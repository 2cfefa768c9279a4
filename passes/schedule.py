"""Which attentions start their exchange early, and behind what.

    y = ring_attention(q, k, v, ...)   ->   y = ring_attention(q, k, v, ..., early="forward backward home")

"forward": something that takes time stands between K and V and the attention, and needs neither: the projection of the
queries, a branch beside it. "backward": something stands between this attention and the next, whose gradients are
computed while this one's keys and values travel again. "home": what stood before the attention and needed neither has
gradients, which are computed while the last sums of dK and dV come home. Where nothing does, or less than it costs to
start apart (a step, by the rates that all ranks agreed on), the exchange starts with the attention, whose own first
step hides it, and ends with its backward. The graphs themselves are ordered when autograd has made them
(ringopt/early.py).

Before: a lowered graph. After: each attention says in which directions it starts early, and its site in the report
says behind what, or why not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.attention.choose import duration
from ringopt.attention.heads import HeadExchange
from ringopt.attention.plans import plan_of
from ringopt.cost.rates import Rates
from ringopt.distributed.mesh import ANY
from ringopt.early import EXCHANGES, gap_before, is_product
from ringopt.graph.mask import Mask
from ringopt.graph.nodes import module_path, named, op_name, shape_of, value_of
from ringopt.graph.sizes import at_hand
from ringopt.ops.ring import Config
from ringopt.passes.choose_strategy import rates_for
from ringopt.pipeline import Context, Pass

TOLD = 3  # names in a sentence


class Schedule(Pass):
    name = "schedule"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        by_name = {node.name: info for node, info in context.sites.items()}
        for node in list(gm.graph.nodes):
            if op_name(node) != "ring_attention":
                continue
            why, rates = why_not(node, context), rates_for(context, node)
            ranks = context.mesh.size
            # The gradients of a product are two more of its size.
            ahead = Meanwhile.of(gap_before(node).products, 1, ranks, rates)
            behind = Meanwhile.of(products_after(node, context), 2, ranks, rates)
            aside = Meanwhile.of(gap_before(node).products, 2, ranks, rates)
            work = {"forward": ahead, "backward": behind, "home": aside}
            ways = [way for way in work if work[way].pays and not why]
            if ways:
                node.kwargs = {**node.kwargs, "early": " ".join(ways)}
            info = by_name.get(node.name.removesuffix("_ring_attention"))
            if info is not None:
                info.notes.append(told(ahead, behind, aside, why))


def why_not(node: fx.Node, context: Context) -> str:
    """Why the exchange of an attention cannot start before it, or ""."""
    if context.mesh.name == ANY:
        return "a program for any number of ranks runs in the order in which it is written"
    if context.options.inner_backend == "eager":
        return "inner_backend='eager' has no graphs behind autograd to be ordered"
    config = Config(*(named(node, name) for name in Config._fields))
    q_length, kv_length = length_of(config.q_length), length_of(config.kv_length)
    heads = (shape_of(node.args[0])[1], shape_of(node.args[1])[1])
    where = (config.pattern, q_length, kv_length, context.mesh.size, config.q_layout, config.kv_layout)
    plan = plan_of(*where, config.strategy, heads, Mask.parse(config.mask))
    if isinstance(plan, HeadExchange) or plan.queries_move:
        return f"strategy {config.strategy} sends queries too"
    return "" if plan.length else "it sends nothing"


def length_of(size: Any) -> int:
    """Of a length that may be open, that at hand."""
    return at_hand(value_of(size) if isinstance(size, fx.Node) else size)


def products_after(node: fx.Node, context: Context) -> Iterator[fx.Node]:
    """Up to the next exchange, those that pass a gradient on."""
    after = False
    for other in node.graph.nodes:
        if other is node:
            after = True
        elif after and op_name(other) in EXCHANGES:
            return
        elif after and is_product(other) and context.carries.get(other, True):
            yield other


@dataclass(frozen=True)
class Meanwhile:
    """What is computed while the first messages travel: its products, the seconds that they take, and those that it
    costs to start apart."""

    products: Sequence[fx.Node]
    seconds: float
    cost: float

    @classmethod
    def of(cls, products: Iterable[fx.Node], times: int, ranks: int, rates: Rates) -> Meanwhile:
        found = list(products)
        flops = times * sum(flops_of(node, ranks) for node in found)
        return cls(found, flops / rates.default.rate, rates.step)

    @property
    def pays(self) -> bool:
        return bool(self.products) and self.seconds >= self.cost

    def __str__(self) -> str:
        names = dict.fromkeys((module_path(node) or op_name(node)).rsplit(".", 1)[-1] for node in self.products)
        more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
        return f"{', '.join(list(names)[:TOLD])}{more} ({duration(self.seconds)})"


def flops_of(node: fx.Node, ranks: int) -> int:
    """2 a multiplication of a product, on each of `ranks` with as many rows: the same number on all of them, whatever
    rows each has. Of a convolution or a fused attention, at least so many."""
    whole = node.meta.get("whole")
    out = whole if isinstance(whole, torch.Tensor) else value_of(node)
    out = out[0] if isinstance(out, (tuple, list)) else out
    operand = value_of(node.args[1 if op_name(node).startswith(("add", "badd")) else 0])
    total = 2 * prod(map(at_hand, out.shape)) * at_hand(operand.shape[-1])
    return total // (ranks if node.meta.get("placement") is not None else 1)


def told(ahead: Meanwhile, behind: Meanwhile, aside: Meanwhile, why: str) -> str:
    if why:
        return f"its exchange starts with it: {why}"
    first, then = f"behind {ahead}", f"behind the gradients of {behind}"
    if not ahead.pays:
        first = "with it, for " + (brief(ahead) if ahead.products else "nothing stands between that needs no K and V")
    if not behind.pays:
        then = "with it, for " + (brief(behind) if behind.products else "it is the last")
    home = f", and ends behind those of {aside}" if aside.pays else ""
    return f"its exchange starts {first}; in the backward {then}{home}"


def brief(work: Meanwhile) -> str:
    return f"{work} is less than the {duration(work.cost)} that it costs to start apart"
