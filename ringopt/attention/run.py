"""Runs any plan on one rank: attention forward, and its backward.

Each of the three executors reads a plan of another kind: keys travel (execute.py), queries do (execute_queries.py), or
rows are traded for heads (execute_heads.py).
"""

from __future__ import annotations

from torch import Tensor

from ringopt.attention.execute import Attention, Operands, Saved
from ringopt.attention.execute_heads import attend_heads, backward_heads
from ringopt.attention.execute_queries import attend_queries, backward_queries
from ringopt.attention.turns import attend_groups, backward_groups
from ringopt.distributed.mesh import Mesh


def attend(attention: Attention, mesh: Mesh, given: Operands) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq_local, Dv] in q's dtype and lse [B, Hq, Sq_local], both contiguous. Raises RingCommError."""
    if attention.heads is not None:
        return attend_heads(attention.heads, attention, mesh, given)
    return (attend_queries if attention.exchange.queries_move else attend_groups)(attention, mesh, given)


def attend_backward(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv of the rank's rows, complete; and of each learned source, then of the sinks, this rank's part of the
    gradient. Of a source that holds the rank's rows only, that part is complete.

    What travelled in the forward travels again, and sums of gradients come home in the accumulator's dtype. Where a row
    is NaN because it sees no key, so are its gradients, those of all keys and values of its head, and those of the
    learned sources. Raises RingCommError.
    """
    if attention.heads is not None:
        found = backward_heads(attention.heads, attention, mesh, dout, saved)
    else:
        found = (backward_queries if attention.exchange.queries_move else backward_groups)(attention, mesh, dout, saved)
    return found.rounded(saved.given, attention.learned)
