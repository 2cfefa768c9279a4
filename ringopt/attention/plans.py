"""The plan of an attention by the name of its strategy."""

from __future__ import annotations

from ringopt.attention.exchange import Exchange, exchange_of
from ringopt.attention.heads import HeadExchange, head_exchange_of
from ringopt.attention.routes import QUERIES_MOVE, STRATEGIES
from ringopt.errors import OptionError
from ringopt.graph.mask import Mask

Plan = Exchange | HeadExchange
NAMES = (*STRATEGIES, "ulysses")


def plan_of(
    pattern: str,
    q_length: int,
    kv_length: int,
    ranks: int,
    q_layout: str,
    kv_layout: str,
    strategy: str,
    heads: tuple[int, int],
    mask: Mask | None = None,
) -> Plan:
    """For `heads` = (query heads, KV heads).

    Raises OptionError for a name that is none, and where the strategy cannot do what is asked; PlanError for lengths
    below 1.
    """
    if strategy not in NAMES:
        raise OptionError(f"strategy {strategy!r} is unknown; the strategies are {', '.join(map(repr, NAMES))}")
    where = (pattern, q_length, kv_length, ranks, q_layout, kv_layout)
    if strategy in ("ulysses", *QUERIES_MOVE) and mask is not None and mask.row_dims:
        raise OptionError(
            f"strategy {strategy!r} computes rows of queries on other ranks than the one that holds them, and the mask "
            "(or bias) is a tensor of which each rank holds its own rows. Take another strategy, or 'auto'"
        )
    return head_exchange_of(*where, heads) if strategy == "ulysses" else exchange_of(*where, strategy)
