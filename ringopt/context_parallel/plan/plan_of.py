"""The plan of an attention by the name of its strategy."""

from __future__ import annotations

import re
from functools import lru_cache

from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.head_exchange import HeadExchange, head_exchange_of
from ringopt.context_parallel.plan.strategies import MERGE, QUERIES_MOVE, STRATEGIES, strategy_of
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.distributed.nodes import nodes_of
from ringopt.errors import OptionError
from ringopt.expr.mask import Mask

Plan = Exchange | HeadExchange
HYBRID = re.compile(r"hybrid\((\d+)\)")
NAMES = (*STRATEGIES, "ulysses")  # and the hybrids


def hybrid(node: int) -> str:
    """The name of the hybrid over nodes of `node` ranks."""
    return f"hybrid({node})"


def trading(strategy: str) -> int:
    """Of a hybrid the ranks of a node, of others 1."""
    nodes = HYBRID.fullmatch(strategy)
    return int(nodes[1]) if nodes is not None else 1


def on_nodes(strategy: str, mesh: Mesh) -> str:
    """Of an option: "hybrid" over the nodes of `mesh`, others as they are. Raises OptionError where it has no nodes, on
    all ranks alike; they ask each other, so all come here or none."""
    if strategy != "hybrid":
        return strategy
    if mesh.name == ANY:
        raise OptionError("strategy 'hybrid' is over nodes, and a program for any number of ranks knows none")
    nodes = nodes_of(mesh)
    if nodes.size == 0:
        raise OptionError(f"strategy 'hybrid' is over nodes of equally many ranks: {nodes.why}")
    if not 1 < nodes.size < mesh.size:
        sentence = f"{nodes.source} has nodes of {nodes.size}, of the {mesh.size} ranks of this mesh"
        raise OptionError(
            f"strategy 'hybrid' trades heads within nodes and sends keys between them, so it takes several nodes of "
            f"several ranks each: {sentence}. Take 'ulysses' within one node, 'ring' between single ranks, or 'auto'"
        )
    return hybrid(nodes.size)


@lru_cache(maxsize=1024)
def exchange_of(sharded: ShardedPattern, strategy: str) -> Exchange:
    """See `strategy_of` for the names. Raises as that and `sharded.parsed` do, and OptionError where the strategy is
    none for this pattern and these layouts."""
    pattern, q_layout, kv_layout = sharded.parsed()
    plan = Exchange(pattern, q_layout, kv_layout, strategy_of(strategy), strategy in (*QUERIES_MOVE, MERGE))
    if refusal := plan.strategy.refusal(plan):
        raise OptionError(
            f"strategy {strategy!r} cannot do {sharded.pattern} of {sharded.q_length} queries over {sharded.kv_length} "
            f"keys on {sharded.ranks} ranks: {refusal}. Take another strategy, or 'auto'"
        )
    return plan


def plan_of(sharded: ShardedPattern, strategy: str, heads: tuple[int, int], mask: Mask | None = None) -> Plan:
    """For `heads` = (query heads, KV heads).

    Raises OptionError for a name that is none, and where the strategy cannot do what is asked; PlanError for lengths
    below 1.
    """
    nodes = HYBRID.fullmatch(strategy)
    if nodes is None and strategy not in NAMES:
        known = ", ".join(map(repr, NAMES))
        raise OptionError(
            f"strategy {strategy!r} is unknown; the strategies are {known}, and 'hybrid(g)' over nodes of g ranks"
        )
    trades = nodes is not None or strategy == "ulysses"
    if (trades or strategy in QUERIES_MOVE) and mask is not None and mask.row_dims:
        raise OptionError(
            f"strategy {strategy!r} computes rows of queries on other ranks than the one that holds them, and the mask "
            "(or bias) is a tensor of which each rank holds its own rows. Take another strategy, or 'auto'"
        )
    if trades:
        return head_exchange_of(sharded, heads, int(nodes[1]) if nodes is not None else None)
    return exchange_of(sharded, strategy)
