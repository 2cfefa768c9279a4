"""Runs any plan on one rank: attention forward, and its backward.

Each of the three executors reads a plan of another kind: keys travel (keys_move.py), queries do (queries_move.py), or
rows are traded for heads (heads_move.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringopt.context_parallel.executor.heads_move import attend_heads, backward_heads
from ringopt.context_parallel.executor.interleave import Homeward, attend_shares, backward_shares, begin_shares
from ringopt.context_parallel.executor.keys_move import Attention, Operands, Saved, without_nan
from ringopt.context_parallel.executor.messages import Posted
from ringopt.context_parallel.executor.queries_move import attend_queries, backward_queries
from ringopt.distributed.mesh import Mesh
from ringopt.errors import PlanError


def begin(attention: Attention, mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> list[Posted]:
    """The first messages of `attend` or `attend_backward`, posted: for where K and V exist before the rest does. Each
    is to be handed on as `begun`. Of plans in which only keys travel."""
    if attention.heads is not None or attention.exchange.queries_move:
        raise PlanError("what travels first is more than K and V, so it cannot begin with them alone")
    return begin_shares(attention, mesh, k, v, backward)


def attend(attention: Attention, mesh: Mesh, given: Operands, begun: Sequence[Posted] = ()) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq_local, Dv] in q's dtype and lse [B, Hq, Sq_local], both contiguous. Raises RingCommError."""
    if attention.heads is not None:
        return attend_heads(attention.heads, attention, mesh, given)
    if attention.exchange.queries_move:
        return attend_queries(attention, mesh, given)
    return attend_shares(attention, mesh, given, begun)


def backward_until_home(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Sequence[Posted] = ()
) -> Homeward:
    """`attend_backward`, but for the last sums of dK and dV, which are on their way here. Of plans in which only keys
    travel."""
    if attention.heads is not None or attention.exchange.queries_move:
        raise PlanError("what comes home last is more than dK and dV, so they cannot be waited for alone")
    return backward_shares(attention, mesh, *without_nan(attention, dout, saved), begun)


def attend_backward(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Sequence[Posted] = ()
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv of the rank's rows, complete; and of each learned source, then of the sinks, this rank's part of the
    gradient. Of a source that holds the rank's rows only, that part is complete.

    What travelled in the forward travels again, and sums of gradients come home in the accumulator's dtype. Where a row
    is NaN because it sees no key, so are its gradients, those of all keys and values of its head, and those of the
    learned sources; of the values alone, where the mask `stops` gradients. Raises RingCommError.
    """
    dout, saved = without_nan(attention, dout, saved)
    if attention.heads is not None:
        found = backward_heads(attention.heads, attention, mesh, dout, saved)
    elif attention.exchange.queries_move:
        found = backward_queries(attention, mesh, dout, saved)
    else:
        found = backward_shares(attention, mesh, dout, saved, begun).found()
    return found.rounded(saved.given, attention.learned)
