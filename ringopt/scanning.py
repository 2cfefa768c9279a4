"""A recurrence by hand, in eager code, whose steps are spread over ranks.

def step(state, x):                                       # as for torch's scan: (carry, x) -> (carry, y)
    key, value, gate = x
    state = gate * state + key.mT @ value
    return state, state.sum(0)

keys, values, gates = (ringopt.shard(x, dim=0) for x in (keys, values, gates))      # a row a step
last, ys = ringopt.scan(step, state, (keys, values, gates))
ys = ringopt.unshard(ys, dim=0, length=STEPS)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringopt.arguments import check_layout
from ringopt.context_parallel.geometry.layouts import chunks_per_rank, layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.handshake import agree
from ringopt.distributed.mesh import Mesh
from ringopt.errors import OptionError, RingMismatchError, first_line
from ringopt.functional import ranks_of
from ringopt.ops import operators
from ringopt.ops.kernel_scan import AffineState, KernelScan, OverRanks, Run
from ringopt.scans.affine import in_levels
from ringopt.scans.body import NoBody, to_text
from ringopt.scans.real_parts import in_real_numbers
from ringopt.scans.trace import Kinds, OperandKind, in_own_thread, kinds_of, kinds_out
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AffineState", "scan", "scan_kernel"]

Tensors = Tensor | Sequence[Tensor]
Step = Callable[..., tuple[Any, Any]]


def scan(
    step: Step,
    init: Tensors,
    xs: Tensors,
    consts: Sequence[Tensor] = (),
    *,
    mesh: DeviceMesh | Mesh | None = None,
    layout: str = "contiguous",
) -> tuple[Any, Any]:
    """`carry, y = step(carry, x, *consts)` for each row x of `xs`, over all rows, of which every rank passes its own.
    Returns the last carry and the ys, stacked along dim 0. Differentiable.

    `init`, `xs` and what `step` returns are a tensor or several. `xs` have a row a step along dim 0, this rank's, cut
    as `layout` says ("contiguous", "zigzag"), and so have the ys; `init`, `consts`, which all steps share, and the last
    carry are whole, and the same on all ranks, and so are their gradients. `step` is traced at every call: it computes
    with operators of ATen from what it is given, tensors of the outside are `consts`. Ranks exchange what has the size
    of the carry, whatever the number of steps: they run at once where it is affine in the carry, else one after the
    other.

    Raises OptionError for a step that is no such, RingMismatchError where the rows of the ranks are not those of a
    sequence, or not all ranks need a gradient.
    """
    carried, stacked = several(init), several(xs)
    check_layout(layout)
    if not stacked or not carried or any(not x.dim() or x.shape[0] != stacked[0].shape[0] for x in stacked):
        shapes = [list(x.shape) for x in stacked]
        raise OptionError(f"scan: init and xs are a tensor or several, and xs have equally many rows, not {shapes}")
    ranks, traced = ranks_of(mesh, stacked[0]), TracedStep.of(step, init, xs, consts)
    carried, stacked, shared = ([pairs_of(x) for x in some] for some in (carried, stacked, consts))
    if ranks is None or ranks.size == 1:
        found = operators.scan(carried, stacked, shared, traced.text)
    else:
        if any(not x.is_floating_point() for x in carried) and not in_levels(traced.text, traced.kinds).levels:
            dtypes = [str(x.dtype).removeprefix("torch.") for x in carried]
            raise OptionError(f"scan: over ranks a carry is of floating numbers, and init is of {', '.join(dtypes)}")
        steps = steps_of(ranks, layout, stacked[0].shape[0], [*carried, *stacked, *shared])
        first, shared = (
            [operators.copy_to_group(x, ranks.name) if x.requires_grad else x for x in some]
            for some in (carried, shared)
        )
        segments = chunks_per_rank(layout) * ranks.size
        found = operators.sharded_scan(first, stacked, shared, traced.text, steps, segments, layout, True, ranks.name)
    found = [as_given(x, kind) for x, kind in zip(found, traced.results, strict=False)]  # (more is for the backward)
    last, ys = found[: len(carried)], found[len(carried) :]
    return (last[0] if isinstance(init, Tensor) else tuple(last)), (ys[0] if traced.single else tuple(ys))


def scan_kernel(
    run: Run,
    state: Tensor,
    xs: Sequence[Tensor],
    *,
    affine: AffineState | None = None,
    dim: int = 1,
    mesh: DeviceMesh | Mesh | None = None,
    layout: str = "contiguous",
) -> tuple[Any, Tensor]:
    """`outputs, last = run(state, *xs)` over a whole sequence, of which every rank passes its tokens along `dim`: a
    recurrence that a kernel computes. Returns this rank's outputs and the last state. Differentiable.

    `run` gives a tensor or several with tokens along `dim`, and the state behind the last of them. What learns is among
    `xs`; `state` is whole, the same on all ranks, and so are its gradient and the last state. Where the state is
    affine in that before, `affine` says how, and ranks exchange maps of the size of the state; each is held against the
    kernel's own last state. Else the ranks run one after the other.

        def run(state, q, k, v, g, beta):                                                          # fla's kernel
            return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)

        affine = ringopt.AffineState(axes=("point", "point", "mixed", "free"), additive=(2,))      # v is added, k mixes
        out, last = ringopt.scan_kernel(run, state, (q, k, v, g, beta), affine=affine)

    Raises OptionError where the kernel is not as `affine` says or learns something else, RingMismatchError where the
    tokens of the ranks are not those of a sequence, or not all ranks need a gradient.
    """
    check_layout(layout)
    ranks = ranks_of(mesh, state)
    if affine is not None and len(affine.axes) != state.dim():
        raise OptionError(f"scan_kernel: {len(affine.axes)} axes for a state of {state.dim()} dims")
    if not xs or len({x.shape[dim] for x in xs}) > 1:
        found = [list(x.shape) for x in xs]
        raise OptionError(f"scan_kernel: xs have equally many tokens along dim {dim}, not {found}")
    if ranks is None or ranks.size == 1:
        return run(state, *xs)
    steps = steps_of(ranks, layout, xs[0].shape[dim], [state, *xs])
    if steps < ranks.size * chunks_per_rank(layout):
        raise OptionError(f"scan_kernel: {steps} tokens for {ranks.size} ranks; every rank needs one in each segment")
    shapes = [[size for at, size in enumerate(x.shape) if at != dim % x.dim()] for x in xs]
    agree(ranks, (("state", str([list(state.shape), state.dtype])), ("xs", str(shapes)), ("affine", str(affine))))
    scan = KernelScan(run, affine, dim, layout_of(layout, steps, ranks.size), ranks)
    *outputs, last = OverRanks.apply(scan, state, *xs)  # type: ignore[no-untyped-call]
    return (outputs[0] if scan.single else tuple(outputs)), last


def several(given: Tensors) -> list[Tensor]:
    """One tensor or more."""
    return [given] if isinstance(given, Tensor) else list(given)


def pairs_of(x: Tensor) -> Tensor:
    """Complex numbers as pairs, which scans take."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_given(x: Tensor, kind: OperandKind) -> Tensor:
    """The complex numbers that pairs are, where the step gives such."""
    return torch.view_as_complex(x) if kind.dtype.is_complex else x


@dataclass(frozen=True)
class TracedStep:
    """The text of a body in real numbers and the kinds of its operands; what the step itself gives, and whether y is a
    single tensor."""

    text: str
    kinds: Kinds
    results: Kinds
    single: bool

    @classmethod
    def of(cls, step: Step, init: Tensors, xs: Tensors, consts: Sequence[Tensor]) -> TracedStep:
        """Raises OptionError."""
        kinds, carries, rows = kinds_of(several(init), several(xs), consts), len(several(init)), len(several(xs))
        single = False

        def body(*given: Tensor) -> list[Tensor]:
            nonlocal single
            both = zip((init, xs), (given[:carries], given[carries : carries + rows]), strict=True)
            carry, x = (part[0] if isinstance(one, Tensor) else part for one, part in both)
            new, y = step(carry, x, *given[carries + rows :])
            single = isinstance(y, Tensor)
            if len(several(new)) != carries:
                raise ValueError(f"it is given {carries} carries and returns {len(several(new))}")
            return [*several(new), *several(y)]

        def graph() -> torch.fx.GraphModule:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                operands = [kind.empty() for kind in kinds]
                return make_fx(body, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*operands)

        try:
            text = to_text(in_own_thread(graph), carries, rows, len(kinds) - carries - rows)
            return cls(*in_real_numbers(text, kinds), kinds_out(text, kinds), single)
        except NoBody as error:
            raise OptionError(f"scan: {error}. Tensors from outside of the step are `consts`") from error
        except Exception as error:  # of whatever kind: it is the user's function
            why = f"{type(error).__name__}: {first_line(error)}"
            raise OptionError(f"scan: the step cannot be traced: {why}") from error


def steps_of(ranks: Mesh, layout: str, rows: int, given: Sequence[Tensor]) -> int:
    """Of the whole sequence; asked at every call. Raises RingMismatchError, on all ranks alike."""
    learns = int(torch.is_grad_enabled() and any(x.requires_grad for x in given))
    message = torch.tensor([rows, learns], device=ranks.device)
    held = [[int(number) for number in part] for part in ranks.all_gather(message, "lengths")]
    counts, total = [of_rank[0] for of_rank in held], sum(of_rank[0] for of_rank in held)
    expected = [count(layout_of(layout, max(total, 1), ranks.size).ranges(rank)) for rank in range(ranks.size)]
    if counts != expected:
        raise RingMismatchError(
            f"scan: the ranks hold {counts} rows of xs, and a {layout} sequence of {total} is cut into {expected}. Cut "
            "it with ringopt.shard, or pass the layout it was cut with"
        )
    if len({of_rank[1] for of_rank in held}) > 1:  # a backward that some ranks never enter is a hang
        without = [rank for rank, of_rank in enumerate(held) if not of_rank[1]]
        raise RingMismatchError(
            f"scan: ranks {without} need no gradient and the others do. The backward exchanges states too, so "
            "requires_grad and no_grad have to be alike on all ranks"
        )
    return total
