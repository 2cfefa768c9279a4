"""Attention on one rank by its plan, forward and backward: which tasks it is made of, in which order these compute what
needs no message, and what is left when the last one has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import wide_zeros
from ringopt.context_parallel.executor.heads_move import attend_heads, backward_heads
from ringopt.context_parallel.executor.interleave import by_turns, kv_heads_of, part_of, queries_of, to_the_end
from ringopt.context_parallel.executor.keys_move import (
    KeysBackward,
    KeysForward,
    PendingGrads,
    PendingKVGrads,
    post_first,
)
from ringopt.context_parallel.executor.loop import Posted, Run, run_plan
from ringopt.context_parallel.executor.merge_lse import merged_of
from ringopt.context_parallel.executor.operands import (
    Attention,
    AttentionGrads,
    HomeKVGrads,
    Operands,
    Saved,
    Totals,
    kv_sizes,
    spread_nan,
    without_nan,
)
from ringopt.context_parallel.executor.queries_move import attend_queries, backward_queries
from ringopt.context_parallel.plan.concurrency import SubExchange, home_halves, sub_exchanges
from ringopt.distributed.mesh import Mesh
from ringopt.errors import PlanError
from ringopt.kernels.base import HIDDEN
from ringopt.kernels.cuda import tokens_first


def begin(attention: Attention, mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> list[Posted]:
    """The first messages of `attend` or `attend_backward`, posted: for where K and V exist before the rest does. Each
    is to be handed on as `begun`. Of plans in which only keys travel."""
    if attention.heads is not None or attention.exchange.queries_move:
        raise PlanError("what travels first is more than K and V, so it cannot begin with them alone")
    return post_all_first(sub_exchanges(attention.exchange, kv_sizes(k, v, attention.mask)), mesh, k, v, backward)


def attend(attention: Attention, mesh: Mesh, given: Operands, begun: Sequence[Posted] = ()) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq_local, Dv] in q's dtype and lse [B, Hq, Sq_local], both contiguous. Raises RingCommError."""
    if attention.heads is not None:
        return attend_heads(attention.heads, attention, mesh, given, attend_keys)
    if attention.exchange.queries_move:
        return attend_queries(attention, mesh, given)
    return attend_keys(attention, mesh, given, begun)


def backward_until_home(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Sequence[Posted] = ()
) -> PendingGrads:
    """`attend_backward`, but for the last sums of dK and dV, which are on their way here. Of plans in which only keys
    travel."""
    if attention.heads is not None or attention.exchange.queries_move:
        raise PlanError("what comes home last is more than dK and dV, so they cannot be waited for alone")
    return backward_keys(attention, mesh, *without_nan(attention, dout, saved), begun)


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
    found: AttentionGrads
    if attention.heads is not None:
        found = backward_heads(attention.heads, attention, mesh, dout, saved, backward_keys)
    elif attention.exchange.queries_move:
        found = backward_queries(attention, mesh, dout, saved)
    else:
        found = backward_keys(attention, mesh, dout, saved, begun).wait()
    return found.rounded(saved.given, attention.learned)


# ---- K and V travel, in as many exchanges as pay ---------------------------------------------------------------------
def attend_keys(
    attention: Attention, mesh: Mesh, given: Operands, begun: Sequence[Posted] = ()
) -> tuple[Tensor, Tensor]:
    """See `attend`. The rank's own keys hide the first messages of all exchanges."""
    cut = sub_exchanges(attention.exchange, kv_sizes(given.k, given.v, attention.mask))
    firsts = begun or post_all_first(cut, mesh, given.k, given.v, backward=False)
    merged = merged_of(given.q, given.value_dim)
    whole = KeysForward(attention, mesh, given, merged)
    whole.at_home()

    def task(sub: SubExchange) -> KeysForward:
        if len(cut) == 1:
            return whole
        own, part = part_of(attention, given, sub)
        return KeysForward(own, mesh, part, merged.of(queries_of(given, sub.heads)))

    runs = (Run(mesh, [task(sub)], "forward", sub.name) for sub in cut)
    by_turns([to_the_end(run, first) for run, first in zip(runs, firsts, strict=True)])
    return whole.tiles.completed(merged, given.sinks)


def backward_keys(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Sequence[Posted] = ()
) -> PendingGrads:
    """See `backward_until_home`. Half of the rank's own keys hide the first hop of K and V, the others the last hop of
    dK and dV."""
    given, mask = saved.given, attention.mask
    cut = sub_exchanges(attention.exchange, kv_sizes(given.k, given.v, mask))
    firsts = begun or post_all_first(cut, mesh, given.k, given.v, backward=True)
    if given.q.device.type == "cuda":  # its kernels would copy what lies otherwise, for each tile
        dout, saved = tokens_first(dout), replace(saved, out=tokens_first(saved.out))
    dq, home = wide_zeros(given.q), HomeKVGrads(given.k, given.v)
    dsources = [wide_zeros(given.sources[i]) for i in attention.learned]
    dconsts = [wide_zeros(x) for x in given.read(())]

    def task(sub: SubExchange) -> KeysBackward:
        (own, part), heads = part_of(attention, given, sub), queries_of(given, sub.heads)
        left = Saved(part, saved.out[:, heads], saved.lse[:, heads])
        totals = Totals(dq[:, heads], dsources, partial(home.of, sub.heads), dconsts)
        return KeysBackward(own, mesh, dout[:, heads], left, totals)

    early, late = home_halves(attention.exchange, cut)
    tasks = {sub: task(sub) for sub in dict.fromkeys((*cut, *early, *late))}
    for sub in early:
        tasks[sub].at_home("backward 0")
    runs = [Run(mesh, [tasks[sub]], "backward", sub.name) for sub in cut]
    last = by_turns([run_plan(run, first) for run, first in zip(runs, firsts, strict=True)])
    for sub in late:
        tasks[sub].at_home("backward home")

    hidden = saved.lse == HIDDEN if attention.nan_rows else None
    if hidden is not None and not mask.stops:
        spread_nan(dq, dsources, hidden)
    by_heads = {sub.heads: tasks[sub] for sub in cut}
    dsinks = [part for one in by_heads.values() if (part := one.dsinks()) is not None]
    pending = PendingKVGrads(mesh, home, last, hidden, mask.stops)
    return PendingGrads(dq, [*dsources, *dconsts], torch.cat(dsinks, 1) if dsinks else None, pending)


def post_all_first(cut: Sequence[SubExchange], mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> list[Posted]:
    """The first messages of each exchange, in the order in which they take turns."""
    return [
        post_first(sub.exchange, mesh, (kv_heads_of(k, sub), kv_heads_of(v, sub)), backward, sub.name) for sub in cut
    ]
