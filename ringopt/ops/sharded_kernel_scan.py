"""`ringopt::sharded_kernel_scan`: a recurrence that an operator of another library computes, over ranks that hold
consecutive tokens each.

    sharded_kernel_scan(state, xs, shared, kernel, steps, segments, layout, group, early, ticket)
        -> [*outputs, last state, states before, matrices]

`kernel` is a text (ringopt/scans/kernel.py), `xs` and the outputs have the tokens of this rank; `state`, `shared` and
the last state are the same on all. For the backward are the states before this rank's segments, and the matrices of all
segments: not finite where the ranks ran one after the other, none where the state is not affine. The backward computes
the forward of its segments again. The gradient of `state` is complete on every rank, that of `shared` is this rank's
part. `early`, `ticket`: the all-gather of the maps may have been started before (scan_start.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import chunks_per_rank, layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.handshake import agree
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh, program_until_here
from ringopt.distributed.tickets import redeem
from ringopt.errors import RingMismatchError
from ringopt.ops.kernel_scan import AffineState, KernelScan
from ringopt.ops.scan import floating
from ringopt.ops.tags import ON_HOST
from ringopt.scans.kernel import ScanKernel, frame_of
from ringopt.scans.segment_map import wide
from ringopt.scans.trace import OperandKind
from ringopt.torch_compat.autograd import never_compiled

OPERANDS = "Tensor state, Tensor[] xs, Tensor[] shared, str kernel"
WHERE = "SymInt steps, int segments, str layout, str group"
EARLY = "str early='', Tensor? ticket=None"
PLACES = 4  # of them
KEPT = 2  # results behind the last state


@dataclass(frozen=True)
class KernelPlace:
    """The arguments behind the operands: `steps` tokens of the whole sequence, `segments` of all ranks."""

    kernel: str
    steps: int
    segments: int
    layout: str
    group: str
    early: str = ""
    ticket: Tensor | None = None

    def about(self, xs: Sequence[Tensor]) -> tuple[object, ...]:
        """The identity of an exchange, which its two halves compare (distributed/tickets.py)."""
        return tuple(tuple(x.shape) for x in xs), self.kernel, str(self.steps), self.segments, self.layout


@torch.library.custom_op(
    "ringopt::sharded_kernel_scan", mutates_args=(), tags=ON_HOST, schema=f"({OPERANDS}, {WHERE}, {EARLY}) -> Tensor[]"
)
def sharded_kernel_scan(state: Tensor, xs: list[Tensor], shared: list[Tensor], *where: Any) -> list[Tensor]:
    """Raises OptionError where the kernel is not as its rule says, RingMismatchError, RingCommError."""
    place = KernelPlace(*where)
    scan = prepared_kernel_scan("sharded_kernel_scan", state, xs, shared, place)
    posted = redeem(place.ticket, place.about(xs)) if place.ticket is not None else None
    with scan.mesh.unbroken(), torch.autocast(state.device.type, enabled=False):
        segments, (last, found) = scan.forward(state, xs, [False] * (1 + len(xs) + len(shared)), posted)
    outputs = [torch.cat(parts, scan.dim) for parts in zip(*(each.outputs for each in segments), strict=True)]
    matrices = torch.stack(found) if found else matrices_like(state, place).fill_(torch.nan)
    return [*outputs, last.clone(), torch.stack([each.state for each in segments]), matrices]


@sharded_kernel_scan.register_fake
def _(state: Tensor, xs: list[Tensor], shared: list[Tensor], *where: Any) -> list[Tensor]:
    place = KernelPlace(*where)
    outputs, last = ScanKernel.read(place.kernel).fake(state, *xs, *shared)
    before = state.new_empty((chunks_per_rank(place.layout), *state.shape))
    last = last.new_empty(state.shape)  # of packed sequences, one
    return [*(x.new_empty(x.shape) for x in outputs), last, before, matrices_like(state, place)]


@torch.library.custom_op(
    "ringopt::sharded_kernel_scan_backward",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"(Tensor[] grads, Tensor[] kept, {OPERANDS}, int[] wanted, {WHERE}) -> Tensor[]",
)
def sharded_kernel_scan_backward(
    grads: list[Tensor], kept: list[Tensor], state: Tensor, xs: list[Tensor], shared: list[Tensor], kernel: str,
    wanted: list[int], *where: Any,
) -> list[Tensor]:
    """Gradients of the operands `wanted`, places among (state, *xs, *shared); `grads` are those of the outputs and of
    the last state."""
    scan = prepared_kernel_scan("sharded_kernel_scan_backward", state, xs, shared, KernelPlace(kernel, *where))
    operands, before, matrices = [state, *xs, *shared], *kept
    learned = [place == 0 or place in wanted for place in range(len(operands))]
    with scan.mesh.unbroken(), torch.autocast(state.device.type, enabled=False):
        cut, turns = scan.cut(xs), not matrices.shape[0] or not bool(matrices.isfinite().all())
        segments = [scan.segment(at, start, cut[at], learned) for at, start in zip(scan.mine, before, strict=True)]
        found, parts = scan.backward(segments, [] if turns else list(matrices), grads[:-1], grads[-1])
    columns = list(zip(*parts, strict=True))
    of_xs = [torch.cat(column, scan.dim) for column in columns[: len(xs)]]
    of_shared = [torch.stack(column).sum(0) for column in columns[len(xs) :]]
    return [[found, *of_xs, *of_shared][place].to(operands[place].dtype).contiguous() for place in wanted]


@sharded_kernel_scan_backward.register_fake
def _(
    grads: Any, kept: Any, state: Tensor, xs: list[Tensor], shared: list[Tensor], kernel: str, wanted: list[int],
    *where: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in ([state, *xs, *shared][place] for place in wanted)]


# ---- before either ---------------------------------------------------------------------------------------------------
def matrices_like(state: Tensor, place: KernelPlace) -> Tensor:
    """Of all segments, made of nothing; of none where the state is not affine."""
    axes = ScanKernel.read(place.kernel).axes
    if axes is None:
        return state.new_empty(0)
    matrix, _offset = frame_of(axes, OperandKind.of(state)).parts
    return state.new_empty((place.segments, *matrix), dtype=wide(state.dtype))


def prepared_kernel_scan(
    op: str, state: Tensor, xs: list[Tensor], shared: list[Tensor], place: KernelPlace
) -> KernelScan:
    """The scan of this rank, compared with what the others are about to run."""
    mesh, kernel = mesh_of(place.group), ScanKernel.read(place.kernel)
    program_until_here(mesh)
    layout = layout_of(place.layout, place.steps, mesh.size)
    misfit = misfit_of(mesh, xs, kernel.dim, place)
    sizes = [[size for at, size in enumerate(x.shape) if at != kernel.dim] for x in xs]
    new = agree(
        mesh,
        (
            ("op", op),
            ("shards", misfit or "as laid out"),
            ("kernel", hashlib.blake2b(place.kernel.encode(), digest_size=8).hexdigest()),
            ("state", str([list(state.shape), str(state.dtype)])),
            ("operands", str([sizes, [list(x.shape) for x in shared]])),
            ("steps", place.steps),
            ("layout", place.layout),
            ("ranks", mesh.size),
        ),
    )
    if misfit:
        raise RingMismatchError(f"{op}: {misfit}")
    affine = AffineState(kernel.axes, kernel.additive) if kernel.axes is not None else None
    return KernelScan(kernel.run, affine, kernel.dim, layout, mesh, shared, not new, kernel.segments is not None)


def misfit_of(mesh: Mesh, xs: Sequence[Tensor], dim: int, place: KernelPlace) -> str:
    """What this rank holds that is no part of such a sequence; "" where all is."""
    layout = layout_of(place.layout, place.steps, mesh.size)
    tokens, segments = count(layout.ranges(mesh.rank)), layout.chunks_per_rank * mesh.size
    wrong = [list(x.shape) for x in xs if x.shape[dim] != tokens]
    if wrong:
        return (
            f"an operand is {wrong[0]}, and rank {mesh.rank} of {mesh.size} holds {tokens} tokens (dim {dim}) of a "
            f"{place.layout} sequence of {place.steps}; cut it with ringopt.shard"
        )
    if place.segments != segments:
        return f"{place.segments} segments, where {mesh.size} ranks of a {place.layout} layout have {segments}"
    return ""


# ---- gradient --------------------------------------------------------------------------------------------------------
def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    state, xs, shared, ctx.kernel, *where = inputs
    # A gradient is asked of each argument up to the last that is no default; the backward starts nothing early.
    place = KernelPlace(ctx.kernel, *where)
    ctx.where, ctx.defaults = where[:PLACES], int(bool(place.early))
    ctx.mark_non_differentiable(*output[-KEPT:], *(x for x in output[:-KEPT] if not x.is_floating_point()))
    ctx.counts = len(xs), len(shared)
    ctx.save_for_backward(state, *xs, *shared, *output[-KEPT:])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved, kept = list(ctx.saved_tensors[:-KEPT]), list(ctx.saved_tensors[-KEPT:])
    of_state, *lists = ctx.needs_input_grad[:3]
    needed, xs = [of_state, *(need for part in lists for need in part)], ctx.counts[0]
    wanted = [place for place in floating(saved) if needed[place]]
    operands = saved[0], saved[1 : 1 + xs], saved[1 + xs :]
    found = sharded_kernel_scan_backward(list(grads[:-KEPT]), kept, *operands, ctx.kernel, wanted, *ctx.where)
    everything = dict(zip(wanted, found, strict=True))
    first, *others = [everything.get(place) for place in range(len(saved))]
    return first, others[:xs], others[xs:], *(None for _ in range(1 + len(ctx.where) + ctx.defaults))


sharded_kernel_scan.register_autograd(never_compiled(_backward), setup_context=_setup)
