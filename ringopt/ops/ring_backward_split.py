"""`ring_attention_backward` in two, so that the last sums of dK and dV come home behind other work.

    dq, ticket, dsources = ring_backward_begin(...)    all is computed, and the last messages are under way
    dk, dv = ring_backward_finish(ticket, k, v, group)

The arguments of the first are those of the whole, and so are its messages: ranks that run the one can meet ranks that
run the other. ringopt/overlap/start_early.py puts them into graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import backward_until_home
from ringopt.context_parallel.executor.keys_move import PendingKVGrads
from ringopt.context_parallel.executor.operands import rounded_parts
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import program_until_here
from ringopt.distributed.tickets import issue, redeem
from ringopt.distributed.traffic import working_for
from ringopt.ops.mask_facts import with_facts
from ringopt.ops.ring import (
    CONFIG,
    EARLY,
    EXTRAS,
    FACTS,
    OPERANDS,
    TAIL,
    arguments_of_backward,
    begun,
    empty_extras,
    prepare,
)
from ringopt.ops.tags import ON_HOST


@torch.library.custom_op(
    "ringopt::ring_backward_begin",
    mutates_args=(),
    tags=ON_HOST,
    schema=(
        f"(Tensor dout, {OPERANDS}, Tensor out, Tensor lse, {EXTRAS}, {CONFIG}, {EARLY}, {TAIL}, {FACTS}) "
        "-> (Tensor dq, Tensor ticket, Tensor[] dsources)"
    ),
)
def ring_backward_begin(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See `ring_attention_backward`; a ticket in place of dK and dV."""
    dout, saved, config = arguments_of_backward(arguments)
    given = with_facts(saved.given, config.facts)
    site, saved = prepare("ring_attention_backward", given, config), replace(saved, given=given)
    with site.mesh.unbroken(), working_for(config.site), torch.autocast(dout.device.type, enabled=False):
        found = backward_until_home(site.attention, site.mesh, dout, saved, begun(given, True, config))
    ticket = issue(site.mesh, about(given.k, given.v), found.kv, found.kv.pending)
    extras = rounded_parts(found.dsources, found.dsinks, given, site.attention.learned)
    return found.dq.to(given.q.dtype), ticket, extras


@ring_backward_begin.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    _dout, saved, config = arguments_of_backward(arguments)
    q, k = saved.given.q, saved.given.k
    return q.new_empty(q.shape), k.new_empty((), dtype=torch.int64, device="cpu"), empty_extras(saved.given, config)


@torch.library.custom_op("ringopt::ring_backward_finish", mutates_args=(), tags=ON_HOST)
def ring_backward_finish(ticket: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """dK and dV. Raises RingCommError, RingMismatchError."""
    program_until_here(mesh_of(group))
    grads: PendingKVGrads = redeem(ticket, about(k, v))
    dk, dv = grads.wait()
    return dk.to(k.dtype), dv.to(v.dtype)


@ring_backward_finish.register_fake
def _(ticket: Tensor, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


def about(k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """The identity of the last message of dK and dV, which both halves compare (distributed/tickets.py)."""
    return "home", tuple(k.shape), tuple(v.shape), k.dtype
