"""`ringopt::scan`: a recurrence, one step after the other, on one device.

    scan(init, xs, consts, body, keeps) -> [*last carries, *ys, *kept]     # xs and ys are stacked along dim 0
    carry_t, y_t = body(carry_{t-1}, x_t, consts)

`body` is the text of a graph (ringopt/scans/body.py). No step is fine: the carries come back as they went in, and the
ys are empty. The backward is an operator of its own, which walks back over the steps. `kept` are the carries before
each step, for the backward; unless the scan `keeps` them there are none, and they are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.scans.body import from_text
from ringopt.scans.steps import Recurrence, ResultGradients
from ringopt.torch_compat.autograd import never_compiled

OPERANDS = "Tensor[] init, Tensor[] xs, Tensor[] consts, str body"


@torch.library.custom_op("ringopt::scan", mutates_args=(), schema=f"({OPERANDS}, bool keeps=False) -> Tensor[]")
def scan(init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str, keeps: bool = False) -> list[Tensor]:
    """The last carries, then the ys stacked along dim 0, then what is kept. Raises NoBody."""
    steps = Recurrence(body, xs, consts)
    with torch.autocast(xs[0].device.type, enabled=False):
        finals, ys, kept = steps.run_keeping(init, steps.room(init) if keeps else ())
    return [*finals, *ys, *kept]


@scan.register_fake
def _(init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str, keeps: bool = False) -> list[Tensor]:
    kept = [x.new_empty((xs[0].shape[0], *x.shape)) for x in init] if keeps else []
    return [*fake_results(init, xs, consts, body), *kept]


def fake_results(init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str) -> list[Tensor]:
    """A step is run on fakes, for sizes may be open."""
    step, rows = from_text(body), [x.new_empty(x.shape[1:]) for x in xs]
    found = step.module(*init, *rows, *consts)
    finals = [x.new_empty(x.shape) for x in init]
    return [*finals, *(y.new_empty((xs[0].shape[0], *y.shape)) for y in found[step.carries :])]


@torch.library.custom_op(
    "ringopt::scan_backward",
    mutates_args=(),
    schema=f"(Tensor[] grads, {OPERANDS}, int[] wanted, Tensor[]? kept=None) -> Tensor[]",
)
def scan_backward(
    grads: list[Tensor],
    init: list[Tensor],
    xs: list[Tensor],
    consts: list[Tensor],
    body: str,
    wanted: list[int],
    kept: list[Tensor] | None = None,
) -> list[Tensor]:
    """Gradients of the operands `wanted`, places among (init, xs, consts); `grads` are those of the floating results,
    in their order."""
    steps = Recurrence(body, xs, consts)
    carried = floating(init)
    given = ResultGradients(grads[: len(carried)], grads[len(carried) :], init)
    with torch.autocast(xs[0].device.type, enabled=False):
        found = steps.gradients(kept or steps.states(init), given, [place for place in wanted if place >= len(init)])
    of_init = dict(zip(carried, found.init, strict=True))
    return [{**of_init, **found.others}[place] for place in wanted]


@scan_backward.register_fake
def _(
    grads: Any, init: list[Tensor], xs: list[Tensor], consts: list[Tensor], body: str, wanted: Any, kept: Any = None
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in ([*init, *xs, *consts][place] for place in wanted)]


def floating(tensors: Sequence[Tensor]) -> list[int]:
    """Places of those that can have a gradient."""
    return [place for place, x in enumerate(tensors) if x.is_floating_point()]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    init, xs, consts, ctx.body, *ctx.keeps = inputs
    kept = output[-len(init) :] if any(ctx.keeps) else []
    ctx.mark_non_differentiable(*kept)
    ctx.counts, ctx.results = (len(init), len(xs), len(kept)), floating(output[: len(output) - len(kept)])
    ctx.save_for_backward(*init, *xs, *consts, *kept)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    carries, xs, many = ctx.counts
    parts = slice(0, carries), slice(carries, carries + xs), slice(carries + xs, None)
    everything = list(ctx.saved_tensors)
    saved, kept = everything[: len(everything) - many], everything[len(everything) - many :]
    needed = [need for part in ctx.needs_input_grad[:3] for need in part]
    wanted = [place for place in floating(saved) if needed[place]]
    given = [grads[place] for place in ctx.results]
    found = scan_backward(given, *(saved[part] for part in parts), ctx.body, wanted, kept or None)
    of_wanted = dict(zip(wanted, found, strict=True))
    gradients = [of_wanted.get(place) for place in range(len(saved))]
    return *(gradients[part] for part in parts), *(None for _ in range(1 + any(ctx.keeps)))


scan.register_autograd(never_compiled(_backward), setup_context=_setup)
