"""`ringopt::sharded_scan`: a recurrence over ranks that hold consecutive steps each.

    sharded_scan(init, xs, consts, body, steps, segments, layout, ends, group, early, ticket, keeps)
        -> [*last carries, *ys, *kept]

`xs` and `ys` have the steps of this rank; `init`, `consts` and the last carries are the same on all. Where the body is
affine in what it carries (ringopt/scans/affine.py) the ranks run at once, else one after the other; what travels
follows from the sizes of the state alone (scan_segments.py). `kept`, for the backward: for each carry the states before
this rank's segments (with `keeps` those before and behind each of their steps), then for each the matrices of the
segments between the first and the last (`segments` 0: of none, in a program for any number of ranks). Without `ends`
nobody reads the last carries, and they are NaN. The gradients of `init` and `consts` are this rank's parts. `early`,
`ticket`: its first exchange may have been started before (scan_start.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import chunks_per_rank, layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.handshake import agree
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import program_until_here
from ringopt.distributed.tickets import redeem
from ringopt.errors import RingMismatchError
from ringopt.ops.scan import OPERANDS, fake_results, floating
from ringopt.ops.scan_segments import SegmentedScan
from ringopt.ops.tags import ON_HOST
from ringopt.scans.affine import in_levels
from ringopt.scans.segment_map import Frame, wide
from ringopt.scans.steps import ResultGradients
from ringopt.scans.trace import kinds_of
from ringopt.torch_compat.autograd import never_compiled

WHERE = "SymInt steps, int segments, str layout, bool ends, str group"
GIVEN = f"Tensor[] grads, Tensor[] kept, {OPERANDS}"
EARLY = "str early='', Tensor? ticket=None"


@dataclass(frozen=True)
class ScanPlace:
    """The arguments behind the operands: `steps` of the whole scan, `segments` of all ranks, 0 where no matrices are
    kept; `ends`: whether the last carries are read; `early`: in which directions it starts before the operator,
    "forward" and "backward", apart by a space, and `ticket` that of what was started."""

    body: str
    steps: int
    segments: int
    layout: str
    ends: bool
    group: str
    early: str = ""
    ticket: Tensor | None = None
    keeps: bool = False

    def about(self, direction: str, xs: Sequence[Tensor]) -> tuple[object, ...]:
        """The identity of an exchange, which its two halves compare (distributed/tickets.py)."""
        shapes = tuple(tuple(x.shape) for x in xs)
        return direction, shapes, self.body, str(self.steps), self.segments, self.layout, self.ends


@torch.library.custom_op(
    "ringopt::sharded_scan",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({OPERANDS}, {WHERE}, {EARLY}, bool keeps=False) -> Tensor[]",
)
def sharded_scan(init: list[Tensor], xs: list[Tensor], consts: list[Tensor], *where: Any) -> list[Tensor]:
    """Raises RingMismatchError, RingCommError."""
    place = ScanPlace(*where)
    scan = replace(prepared_scan("sharded_scan", init, xs, consts, place), states=place.keeps)
    posted = redeem(place.ticket, place.about("forward", xs)) if place.ticket is not None else None
    with scan.mesh.unbroken(), torch.autocast(xs[0].device.type, enabled=False):
        finals, ys, kept = scan.forward(init, posted)
    return [*finals, *ys, *kept]


@sharded_scan.register_fake
def _(init: list[Tensor], xs: list[Tensor], consts: list[Tensor], *where: Any) -> list[Tensor]:
    place = ScanPlace(*where)
    here = chunks_per_rank(place.layout)
    before = [x.new_empty((here + xs[0].shape[0] if place.keeps else here, *x.shape)) for x in init]
    matrices = [x.new_empty(0) for x in init]
    for level in in_levels(place.body, kinds_of(init, xs, consts)).levels:
        for stage in level:
            x, many = init[stage.place], max(0, place.segments - 2) if stage.form == "linear" else 0
            size = (many, *Frame(stage).parts_at(x.shape)[0])
            matrices[stage.place] = x.new_empty(size, dtype=wide(x.dtype))
    return [*fake_results(init, xs, consts, place.body), *before, *matrices]


@torch.library.custom_op(
    "ringopt::sharded_scan_backward",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({GIVEN}, int[] wanted, {WHERE}, {EARLY}) -> Tensor[]",
)
def sharded_scan_backward(
    grads: list[Tensor], kept: list[Tensor], init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str,
    wanted: list[int], *where: Any,
) -> list[Tensor]:
    """Gradients of the operands `wanted`, places among (init, xs, consts); `grads` are those of the last carries and of
    the floating ys, in their order."""
    place = ScanPlace(body, *where)
    scan = prepared_scan("sharded_scan_backward", init, xs, consts, place)
    begun = redeem(place.ticket, place.about("backward", xs)) if place.ticket is not None else None
    with scan.mesh.unbroken(), torch.autocast(xs[0].device.type, enabled=False):
        back, posted = begun or (with_states(scan, kept).walk_back(kept, gradients_of_results(grads, init)), None)
        of_init, others = back.scan.backward(back, kept, [at for at in wanted if at >= len(init)], posted)
    found = {**dict(enumerate(of_init)), **others}
    return [found[at] for at in wanted]


@sharded_scan_backward.register_fake
def _(
    grads: Any, kept: Any, init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str, wanted: list[int],
    *where: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in ([*init, *xs, *consts][place] for place in wanted)]


def with_states(scan: SegmentedScan, kept: Sequence[Tensor]) -> SegmentedScan:
    """The scan as its forward has left it."""
    return replace(scan, states=bool(kept) and kept[0].shape[0] > len(scan.mine))


def gradients_of_results(grads: Sequence[Tensor], init: Sequence[Tensor]) -> ResultGradients:
    """Those of the last carries come first."""
    return ResultGradients(grads[: len(init)], grads[len(init) :], init)


# ---- before either ---------------------------------------------------------------------------------------------------
def prepared_scan(
    op: str, init: Sequence[Tensor], xs: Sequence[Tensor], consts: Sequence[Tensor], place: ScanPlace
) -> SegmentedScan:
    """The scan of this rank, compared with what the others are about to run."""
    mesh = mesh_of(place.group)
    program_until_here(mesh)
    affine = in_levels(place.body, kinds_of(init, xs, consts))
    layout = layout_of(place.layout, place.steps, mesh.size)
    rows = count(layout.ranges(mesh.rank))
    wrong = [list(x.shape) for x in xs if x.shape[0] != rows]
    segments = layout.chunks_per_rank * mesh.size
    misfit = ""
    if wrong:
        misfit = (
            f"an operand is {wrong[0]}, and rank {mesh.rank} of {mesh.size} holds {rows} rows (dim 0) of a "
            f"{place.layout} scan of {place.steps} steps; cut it with ringopt.shard"
        )
    elif place.segments not in (0, segments):
        misfit = f"{place.segments} segments, where {mesh.size} ranks of a {place.layout} layout have {segments}"
    agree(
        mesh,
        (
            ("op", op),
            ("shards", misfit or "as laid out"),
            ("body", hashlib.blake2b(place.body.encode(), digest_size=8).hexdigest()),
            ("operands", str([(kind.shape, str(kind.dtype)) for kind in affine.kinds])),
            ("steps", place.steps),
            ("segments", place.segments),
            ("layout", place.layout),
            ("last carries", "read" if place.ends else "not read"),
            ("ranks", mesh.size),
        ),
    )
    if misfit:
        raise RingMismatchError(f"{op}: {misfit}")
    return SegmentedScan(affine, xs, consts, layout, mesh, place.segments > 0, place.ends)


# ---- gradient --------------------------------------------------------------------------------------------------------
def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    init, xs, consts, ctx.body, *where = inputs
    # A gradient is asked of each argument up to the last that is no default, and there is no ticket yet.
    place = ScanPlace(ctx.body, *where)
    ctx.where = where[: -2 if place.early else -3]
    ctx.asked = len(where) if place.keeps else len(ctx.where)
    carries = len(init)
    results = len(output) - 2 * carries
    kept = output[results:]
    ctx.mark_non_differentiable(*kept)
    ctx.counts = carries, len(xs)
    ctx.results = floating(output[:results])
    ctx.save_for_backward(*init, *xs, *consts, *kept)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    carries, xs = ctx.counts
    parts = slice(0, carries), slice(carries, carries + xs), slice(carries + xs, None)
    saved, kept = list(ctx.saved_tensors[: -2 * carries]), list(ctx.saved_tensors[-2 * carries :])
    needed = [need for part in ctx.needs_input_grad[:3] for need in part]
    wanted = [place for place in floating(saved) if needed[place]]
    operands = [saved[part] for part in parts]
    found = sharded_scan_backward([grads[at] for at in ctx.results], kept, *operands, ctx.body, wanted, *ctx.where)
    everything = dict(zip(wanted, found, strict=True))
    gradients = [everything.get(place) for place in range(len(saved))]
    return *(gradients[part] for part in parts), *(None for _ in range(1 + ctx.asked))


sharded_scan.register_autograd(never_compiled(_backward), setup_context=_setup)
