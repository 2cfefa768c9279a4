"""The first exchange of a recurrence over ranks, started before the operator itself, behind work that needs none of it.

    ticket = scan_start(init, xs, consts, ..., number)                  posts the maps of this rank's segments
    S, y, ... = sharded_scan(init, xs, consts, ..., ticket=ticket)      waits for those of all

    ticket = scan_backward_start(grads, kept, init, xs, ..., number)    posts the gradients of the states between them
    gradients = sharded_scan_backward(grads, kept, ..., ticket=ticket)

    ticket = kernel_scan_start(state, xs, shared, kernel, ..., number)  the maps of what a kernel computes
    y, ..., S = sharded_kernel_scan(state, xs, shared, kernel, ..., ticket=ticket)

ringopt/overlap/start_early.py puts them into graphs. Of two starts in a graph no two have one `number`, so that no
compiler takes them for one. A start raises what its operator raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.mesh import Pending
from ringopt.distributed.tickets import issue, settle
from ringopt.ops import sharded_kernel_scan
from ringopt.ops.scan import OPERANDS
from ringopt.ops.segment_messages import PostedSegments
from ringopt.ops.sharded_scan import GIVEN, WHERE, ScanPlace, gradients_of_results, prepared_scan, with_states
from ringopt.ops.tags import ON_HOST


@torch.library.custom_op(
    "ringopt::scan_start",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({OPERANDS}, int number, {WHERE}) -> Tensor",
)
def scan_start(
    init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str, number: int, *where: Any
) -> Tensor:
    """A ticket for the first maps of `sharded_scan` of these operands."""
    place = ScanPlace(body, *where)
    scan = prepared_scan("scan_start", init, xs, consts, place)
    settle(scan.mesh)
    with torch.autocast(xs[0].device.type, enabled=False):
        posted = scan.posted_first(init)
    return issue(scan.mesh, place.about("forward", xs), posted, under_way(posted))


@torch.library.custom_op(
    "ringopt::scan_backward_start",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({GIVEN}, int number, {WHERE}) -> Tensor",
)
def scan_backward_start(
    grads: list[Tensor],
    kept: list[Tensor],
    init: list[Tensor],
    xs: list[Tensor],
    consts: list[Tensor],
    body: str,
    number: int,
    *where: Any,
) -> Tensor:
    """A ticket for the first gradients of states of `sharded_scan_backward` of these operands."""
    place = ScanPlace(body, *where)
    scan = prepared_scan("scan_backward_start", init, xs, consts, place)
    settle(scan.mesh)
    with torch.autocast(xs[0].device.type, enabled=False):
        back = with_states(scan, kept).walk_back(kept, gradients_of_results(grads, init))
        posted = back.posted_gradients(scan.affine.levels[-1])
    return issue(scan.mesh, place.about("backward", xs), (back, posted), under_way(posted))


@torch.library.custom_op(
    "ringopt::kernel_scan_start",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({sharded_kernel_scan.OPERANDS}, int number, {sharded_kernel_scan.WHERE}) -> Tensor",
)
def kernel_scan_start(
    state: Tensor, xs: list[Tensor], shared: list[Tensor], kernel: str, number: int, *where: Any
) -> Tensor:
    """A ticket for the maps of `sharded_kernel_scan` of these operands, whose state is affine."""
    place = sharded_kernel_scan.KernelPlace(kernel, *where)
    scan = sharded_kernel_scan.prepared_kernel_scan("kernel_scan_start", state, xs, shared, place)
    settle(scan.mesh)
    with torch.autocast(state.device.type, enabled=False):
        posted = scan.posted_maps(state, xs)
    return issue(scan.mesh, place.about(xs), posted, under_way(posted))


@kernel_scan_start.register_fake
def _(state: Tensor, *rest: Any) -> Tensor:
    return ticket_like(state)


@scan_start.register_fake
def _(init: Any, xs: list[Tensor], *rest: Any) -> Tensor:
    return ticket_like(xs[0])


@scan_backward_start.register_fake
def _(grads: Any, kept: Any, init: Any, xs: list[Tensor], *rest: Any) -> Tensor:
    return ticket_like(xs[0])


def ticket_like(x: Tensor) -> Tensor:
    """A fake one."""
    return x.new_empty((), dtype=torch.int64, device="cpu")


def under_way(posted: PostedSegments | None) -> list[Pending]:
    """Nothing is where there is one segment."""
    return [posted.pending] if posted is not None else []
