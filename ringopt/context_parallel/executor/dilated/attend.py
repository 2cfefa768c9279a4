"""Runs dilated attention on one rank, forward and backward.

Segments that are whole on this rank are computed under the first messages (whole.py); of segments that are cut
all terms run their plans together, a step of each at a time (cut.py). Each term gives a partial softmax of the
rows it keeps. They merge by log-sum-exp, and backward each needs nothing but the output and the log-sum-exp of all.

Weights are dropped by the place of query and key in the sequence (dropout.py), so a pair of two patterns is dropped in
both or in none. A sink is one more logit in the softmax of all terms.

torchscale's mixing, which is for models trained with it, holds the weights of the terms constant: the backward of a
term then sees its own output in place of that of all. That output is computed anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.context_parallel.executor.dilated.cut import CutBackward, CutForward, TermKeys
from ringopt.context_parallel.executor.dilated.operands import DilatedAttention, Operands, Saved
from ringopt.context_parallel.executor.dilated.whole import wholes
from ringopt.context_parallel.executor.interleave import run_alone
from ringopt.context_parallel.executor.loop import Posted, Run, post
from ringopt.context_parallel.executor.merge_lse import add_logits_
from ringopt.context_parallel.plan.dilated import DilatedPlan
from ringopt.context_parallel.plan.exchange import Cargo, Step
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.traffic import log_event
from ringopt.kernels.base import HIDDEN, accumulator


def begin_dilated(plan: DilatedPlan, mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> Posted:
    """Posts the first messages of `attend_dilated` or of its backward, which are to be handed on to it: K and V are all
    that they carry."""
    again = backward and plan.dilation.torchscale_mixing  # then a backward begins with the forward
    label = "forward again" if again else "backward" if backward else "forward"
    parts = [part for part in plan.terms if part.exchange is not None]
    terms = [TermKeys(part, mesh.rank, k, v, backward and not again) for part in parts]
    firsts = [(next(iter(term.steps), Step()), {Cargo.OUT: term.held}) for term in terms]
    return post(mesh, firsts, f"{label} 0")


def attend_dilated(
    attention: DilatedAttention, mesh: Mesh, given: Operands, begun: Posted | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S_local, Dv] in q's dtype and lse [B, Hq, S_local], both contiguous. A place that no term keeps, and
    a row that sees padding only, is 0 with lse -inf. Raises RingCommError."""
    q, wide = given.q, accumulator(given.q.dtype)
    out = q.new_zeros(*q.shape[:3], given.v.shape[3], dtype=wide)
    lse = q.new_full(q.shape[:3], HIDDEN, dtype=wide)
    cuts = [CutForward(attention, part, mesh, given) for part in attention.plan.terms if part.exchange is not None]
    run = Run(mesh, cuts, "forward", joined=True)
    first = begun or run.post_rows(0)
    for whole in wholes(attention, mesh.rank, given):
        whole.merge_into(out, lse)
        mesh.attend()
    log_event("computed", "forward 0", mesh.logging_rank)
    run_alone(run, first)
    for cut in cuts:
        cut.merge_into(out, lse)
    if given.sinks is not None:
        add_logits_(out, lse, given.sinks.unsqueeze(-1))
    return out.to(q.dtype), lse


def attend_dilated_backward(
    attention: DilatedAttention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Posted | None = None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv of the rank's rows, complete, and this rank's part of the gradient of the sinks, if there are some. K
    and V travel again, and sums of dK and dV travel home in the accumulator's dtype. Raises RingCommError."""
    given, parts = saved.given, [part for part in attention.plan.terms if part.exchange is not None]
    operands = (given.q, given.k, given.v)
    totals = tuple(torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in operands)
    outs: list[Tensor | None] = [None] * len(parts)
    if attention.plan.dilation.torchscale_mixing:
        again = [CutForward(attention, part, mesh, given) for part in parts]
        run_alone(Run(mesh, again, "forward again", joined=True), begun)
        outs, begun = [cut.result()[0] for cut in again], None
    cuts = [CutBackward(attention, part, mesh, dout, saved, out) for part, out in zip(parts, outs, strict=True)]
    run = Run(mesh, cuts, "backward", joined=True)
    first = begun or run.post_rows(0)
    for whole in wholes(attention, mesh.rank, given):
        whole.add_gradients(dout, saved, totals)
        mesh.attend()
    log_event("computed", "backward 0", mesh.logging_rank)
    run_alone(run, first)
    for cut in cuts:
        cut.add_gradients(totals)
    dq, dk, dv = (total.to(x.dtype) for total, x in zip(totals, operands, strict=True))
    return dq, dk, dv, [] if given.sinks is None else [gradient_of_sinks(dout, saved, given.sinks)]


def gradient_of_sinks(dout: Tensor, saved: Saved, sinks: Tensor) -> Tensor:
    """In the shape of `sinks`: the weight of a sink leads to 0, not to the row's output."""
    weights = (sinks.to(saved.lse.dtype).unsqueeze(-1) - saved.lse).exp_().masked_fill_(saved.lse == HIDDEN, 0.0)
    found: Tensor = -(weights * (dout.to(weights.dtype) * saved.out).sum(-1)).sum(-1)
    return found.sum_to_size(sinks.shape).to(sinks.dtype)
