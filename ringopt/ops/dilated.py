"""`ringopt::dilated_attention` and its backward: dilated self attention, on one device or over rows that are spread
over the ranks of a mesh.

    dilated_attention(q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local, Dv], seen? [1|B, 1, 1, S],
                      sinks? [1|B, Hq], seed? [], ...) -> out, lse

Opaque, and for the same reasons, as `ringopt::ring_attention` (ops/ring.py). What is computed alone and what is
exchanged: attention/dilated_plan.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringopt.attention.dilated_execute import (
    DilatedAttention,
    Operands,
    Saved,
    attend_dilated,
    attend_dilated_backward,
)
from ringopt.attention.dilated_plan import dilated_plan_of, prove_dilated
from ringopt.attention.dilation import dilation_of
from ringopt.attention.execute import Operands as Shards
from ringopt.attention.layouts import layout_of
from ringopt.distributed.handshake import agree
from ringopt.distributed.mesh import Mesh, mesh_of
from ringopt.errors import RingMismatchError
from ringopt.kernels.base import accumulator
from ringopt.kernels.choose import choose
from ringopt.ops.ring import agree_on_seed, misfit_of, misfit_of_extras

CONFIG = (
    "SymInt length, str pattern, float dropout_p, float scale, str layout, str strategy, str kernel, str group, "
    "str version"
)
OPERANDS, BESIDE = "Tensor q, Tensor k, Tensor v", "Tensor? seen, Tensor? sinks, Tensor? seed"


class Config(NamedTuple):
    """The arguments that are no tensors; both operators end in them.

    length     rows of the whole sequence
    pattern    text of a Dilation (attention/dilation.py)
    dropout_p  with which a weight is dropped, as `seed` says
    layout     which rows a rank holds
    strategy   how rows travel: "gather", "ring", or for each pattern what "auto" says
    kernel     what computes a tile ("auto": the fastest that can)
    group      name of the mesh
    version    that of ops/ring.py
    """

    length: int
    pattern: str
    dropout_p: float
    scale: float
    layout: str
    strategy: str
    kernel: str
    group: str
    version: str


@torch.library.custom_op(
    "ringopt::dilated_attention",
    mutates_args=(),
    schema=f"({OPERANDS}, {BESIDE}, {CONFIG}) -> (Tensor out, Tensor lse)",
)
def dilated_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S_local, Dv] in q's dtype; lse [B, Hq, S_local] in natural log, not differentiable. `seen`: bool,
    False for keys that are padding, of the whole sequence. Where no pattern keeps a row of a head, or it sees padding
    only, out is 0 and lse -inf, or the sink's logit. Raises RingMismatchError, RingCommError, OptionError,
    PlanError."""
    beside, config = rest[:3], Config(*rest[3:])
    given = operands_of(q, k, v, *beside)
    attention, mesh = prepare("dilated_attention", given, beside[0], config)
    if given.seed is not None:
        agree_on_seed(mesh, given.seed)
    with torch.autocast(q.device.type, enabled=False):
        return attend_dilated(attention, mesh, given)


@dilated_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sizes = q.shape[:3]
    return q.new_empty(*sizes, v.shape[3]), q.new_empty(sizes, dtype=accumulator(q.dtype))


@torch.library.custom_op(
    "ringopt::dilated_attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dout, {OPERANDS}, Tensor out, Tensor lse, {BESIDE}, {CONFIG}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dsinks)"
    ),
)
def dilated_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rank's own rows; of the sinks, this rank's part: the caller sums it over the ranks."""
    beside, config = rest[:3], Config(*rest[3:])
    given = operands_of(q, k, v, *beside)
    attention, mesh = prepare("dilated_attention_backward", given, beside[0], config)
    with torch.autocast(q.device.type, enabled=False):
        return attend_dilated_backward(attention, mesh, dout, Saved(given, out, lse))


@dilated_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    sinks = [] if rest[1] is None else [rest[1].new_empty(rest[1].shape)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, seen, sinks, seed, *ctx.config = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, seen, sinks, seed)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    dq, dk, dv, dsinks = torch.ops.ringopt.dilated_attention_backward(dout, *ctx.saved_tensors, *ctx.config)
    return dq, dk, dv, None, dsinks[0] if dsinks else None, None, *(None for _ in ctx.config)


dilated_attention.register_autograd(_backward, setup_context=_setup_context)


def operands_of(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor | None, seed: Tensor | None
) -> Operands:
    return Operands(q, k, v, seen if seen is None else seen.flatten(1).expand(q.shape[0], -1), sinks, seed)


def prepare(op: str, given: Operands, seen: Tensor | None, config: Config) -> tuple[DilatedAttention, Mesh]:
    """The plan, proved on this rank and compared with what the other ranks are about to run; and the mesh."""
    mesh, (q, k, v) = mesh_of(config.group), (given.q, given.k, given.v)
    layout = layout_of(config.layout, config.length, mesh.size)
    shards = Shards(q, k, v, (), given.sinks, given.seed)
    misfit = (
        misfit_of(shards, layout, layout, mesh.rank)
        or misfit_of_seen(seen, q.shape[0], config.length)
        or misfit_of_extras(shards, config.dropout_p)
        or misfit_of_mixing(given, config)
    )
    agree(mesh, key_of(op, misfit, given, config, mesh.size))
    if misfit:
        raise RingMismatchError(f"{op}: {misfit}")
    sizes = (config.length, q.shape[1], k.shape[1], mesh.size)
    plan = dilated_plan_of(config.pattern, *sizes, config.layout, config.strategy)
    prove_dilated(plan, mesh.rank)
    kernel, _reason = choose(config.kernel, q.dtype, q.device, k.shape[3], v.shape[3])
    return DilatedAttention(plan, kernel, config.scale, config.dropout_p), mesh


def misfit_of_mixing(given: Operands, config: Config) -> str:
    if given.sinks is None or not dilation_of(config.pattern).torchscale_mixing:
        return ""
    return "torchscale's mixing has no sinks"


def misfit_of_seen(seen: Tensor | None, batch: int, length: int) -> str:
    if seen is None or (seen.dtype == torch.bool and list(seen.shape) in ([1, 1, 1, length], [batch, 1, 1, length])):
        return ""
    return (
        f"the mask is {list(seen.shape)} {seen.dtype}; dilated attention takes one of keys alone, [1 or {batch}, 1, 1, "
        f"{length}] torch.bool (True is seen), with all keys of the sequence"
    )


def key_of(
    op: str, misfit: str, given: Operands, config: Config, size: int
) -> tuple[tuple[str, int | float | str | bool], ...]:
    """All that shapes messages, or that would give wrong numbers where ranks differ in it."""
    q, k, v = given.q, given.k, given.v
    named = config._asdict()
    del named["group"]
    return (
        ("op", op),
        ("shards", misfit or "as laid out"),
        ("ranks", size),
        ("batch", q.shape[0]),
        ("heads", q.shape[1]),
        ("kv_heads", k.shape[1]),
        ("key_dim", k.shape[3]),
        ("value_dim", v.shape[3]),
        ("dtype", str(q.dtype)),
        ("seen", "none" if given.seen is None else "given"),
        ("sinks", "none" if given.sinks is None else str(list(given.sinks.shape))),
        ("seed", "none" if given.seed is None else "given"),
        *named.items(),
    )
