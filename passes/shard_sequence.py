"""Shard everything between the attention sites along the sequence.

    x = linear(embedding(ids))              x = linear(embedding(scatter(ids, n)))               # n / p tokens
    y = attention(q, k, v, "causal")   ->   y = ring_attention(q, k, v, n, n, "causal", ...)
    return y                                return gather(y, n)

Everything starts replicated. An attention site demands q, k, v sharded along their rows; its output is sharded; rules
(ringopt/dims/rules.py) push that forward, and demands climb back to the inputs (ringopt/sharding/sharder.py). What
mixes rows in a known way (a slice, a loss, a convolution) is computed on shards with what little the ranks need of each
other (ringopt/sharding), also above the first site (ringopt/sharding/handlers/demands.py); all else is computed on
gathered operands and reported.

Before: sites chosen. After: every value replicated (same bits, same complete gradient on every rank) or sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.ir.autograd_function import CustomGradient, calls_of_graphs
from ringopt.ir.nodes import draws, eliminate_dead_code, tensor_args
from ringopt.ops import operators
from ringopt.options import Outputs, Shard, Strategy
from ringopt.pipeline import Context, Pass
from ringopt.sharding.composite import in_parts
from ringopt.sharding.filled import fill_in_rows
from ringopt.sharding.handlers.autograd_function import Functions, Places
from ringopt.sharding.handlers.batched_attention import batch_rows_differ
from ringopt.sharding.handlers.by_columns import MIXED
from ringopt.sharding.handlers.conv_padding import cut_convolutions
from ringopt.sharding.handlers.demands import Demand, sources, worked_on
from ringopt.sharding.handlers.higher_order import again_in_rows, note_of_graphs
from ringopt.sharding.handlers.norms import refuse_mixed_statistics
from ringopt.sharding.handlers.pairs import spread_pairs, wanted_by
from ringopt.sharding.handlers.random import place_seeds
from ringopt.sharding.handlers.registry import HANDLERS, across
from ringopt.sharding.handlers.windows import windows
from ringopt.sharding.outputs import gathered_outputs, gathers_of, leave, unknown_operators
from ringopt.sharding.ranks import Ranks
from ringopt.sharding.recurrences.scans import begin_scans
from ringopt.sharding.sharder import Sharder
from ringopt.sharding.sites import demands, note_no_exchange, operands, place_attention


@dataclass(frozen=True)
class ShardSequence(Pass):
    """Propagates sharding from attention over the graph, and inserts the communication where placements change."""

    name = "shard_sequence"
    reads = ("mesh", "layouts", "given", "cuts", "mixed", "pairs", "order", "scans")
    writes = ("sites", "gathers", "notes", "replicated_random", "left", "gathered")

    shard: Shard = "model"
    strategy: Strategy = "auto"
    outputs: Outputs = "gather"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if not context.shards:
            return
        cut_convolutions(gm.graph)
        ranks, decided = Ranks(context.mesh, context.layouts.of), dict[fx.Node, Places]()
        while True:
            sharder = Sharder(gm.graph, ranks)
            sharder.climbs = self.shard == "model"
            fill_in_rows(sharder, gm.graph)
            functions = Functions(sharder, decided)
            handled, worked = frozenset(HANDLERS), worked_on(gm.graph)
            whole = windows(sharder, self.in_windows(context), handled, worked)
            wanted = [*self.demanded(context), *begin_scans(sharder, context.scans), *whole]
            pairs = spread_pairs(sharder, context.pairs, context.sites) | dict(context.cuts) | dict(context.mixed)
            sharder.sources = sources(sharder, wanted, handled | MIXED, worked) | pairs | dict(whole)
            random = self.walk(sharder, functions, gm.graph, context)
            eliminate_dead_code(sharder.graph)
            if not (twice := functions.twice()):
                break
            decided |= twice
        context.replicated_random += random + functions.random()
        context.notes += [*functions.notes(), *sharder.relaid, *unknown_operators(sharder, gm.graph)]
        gm.graph = sharder.finished()
        refuse_mixed_statistics(gm.graph)
        context.gathers += gathers_of(sharder)
        context.notes += map(note_of_graphs, calls_of_graphs(gm.graph))

    def walk(self, sharder: Sharder, functions: Functions, graph: fx.Graph, context: Context) -> list[str]:
        """Places every node; returns the names of those that draw the same random numbers on every rank."""
        random = []
        for node in graph.nodes:
            if node in context.given:
                sharder.hold(node, context.given[node].placement)
            elif node.op in ("placeholder", "get_attr"):
                sharder.keep(node)
            elif node.op == "output":
                places = context.order.outputs if context.order is not None else None
                context.left = leave(sharder, node, self.outputs, context.given, places)
                context.gathered = gathered_outputs(sharder, node, context.left)
            elif isinstance(node.target, CustomGradient):
                functions.place(node)
            elif node.target is operators.seeds.default:
                place_seeds(sharder, node)
            elif node not in sharder.values and not self.spread(sharder, node, context):
                # (A handler of a tuple places its elements with it.)
                sharder.whole(node)
                random += [node.name] if draws(node) else []
                again_in_rows(sharder, node)
            if node in sharder.sources and sharder.placements[node] is None:
                sharder.begin(node)
        return random

    def demanded(self, context: Context) -> Iterator[Demand]:
        """What the attention sites, and pairs that are none, want to have in rows."""
        yield from (*wanted_by(context.pairs.values()), *context.mixed.items())
        for node in self.sharded_sites(context):
            yield from demands(node, context.sites[node])

    def in_windows(self, context: Context) -> Iterator[tuple[bool, Iterator[Demand]]]:
        """The same of q, k and v, for each site; and whether it may be spread over the batch instead."""
        for node in self.sharded_sites(context):
            parts = not is_dilated(AttentionCall.of(node).pattern) and not batch_rows_differ(node)
            yield parts, operands(node, context.sites[node])

    def sharded_sites(self, context: Context) -> Iterator[fx.Node]:
        """The attentions that will be sharded, from which propagation starts."""
        if self.shard == "model":
            yield from (node for node, info in context.sites.items() if info.refusal is None)

    def spread(self, sharder: Sharder, node: fx.Node, context: Context) -> bool:
        """Computes a node on shards; False where its operands have to be gathered for it."""
        site = context.sites.get(node)
        if site is not None and site.refusal is None and place_attention(sharder, node, site, self.strategy):
            return True
        if self.shard == "attention":
            return False  # whoever reads what attention gives has it gathered
        if node in sharder.understood:
            sharder.understood[node]()
            return True
        cut = any(map(sharder.placements.get, tensor_args(node)))
        done = sharder.along(node) or across(sharder, node)
        done = done or (cut and site is None and self.apart(sharder, node, context))
        if site is not None and site.refusal is None:
            note_no_exchange(site, done)
        return done

    def apart(self, sharder: Sharder, node: fx.Node, context: Context) -> bool:
        """Computes a composite operator on shards, one operator of its decomposition after the other."""
        return in_parts(sharder, node, frozenset(HANDLERS), lambda part: self.spread(sharder, part, context))
