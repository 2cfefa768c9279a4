"""`ringopt::dilated_attention` and its backward: dilated self attention, on one device or over rows that are spread
over the ranks of a mesh.

    dilated_attention(q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local, Dv], seen? [1|B, 1, 1, S],
                      sinks? [1|B, Hq], seed? [], ...) -> out, lse

Opaque, and for the same reasons, as `ringopt::ring_attention` (ops/ring.py). What is computed alone and what is
exchanged: context_parallel/plan/dilated.py. `dilated_start` posts the first messages of either, as `ring_start` does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringopt.context_parallel.executor.dilated.attend import attend_dilated, attend_dilated_backward, begin_dilated
from ringopt.context_parallel.executor.dilated.operands import DilatedAttention, Operands, Saved
from ringopt.context_parallel.executor.loop import Posted
from ringopt.context_parallel.executor.operands import Operands as Shards
from ringopt.context_parallel.geometry.dilation import dilation_of
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.plan.dilated import DilatedPlan, dilated_plan_of, prove_dilated
from ringopt.distributed.handshake import agree
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh, program_until_here
from ringopt.distributed.tickets import issue, redeem, settle
from ringopt.distributed.traffic import working_for
from ringopt.errors import RingMismatchError
from ringopt.kernels.base import accumulator
from ringopt.kernels.choose import choose_kernel
from ringopt.ops.ring import EARLY
from ringopt.ops.ring_misfits import agree_on_seeds, misfit_of, misfit_of_extras, misfit_of_rows, settle_seeds
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled

CONFIG = (
    "SymInt length, str pattern, float dropout_p, float scale, str layout, str strategy, str kernel, str group, "
    "str version"
)
SITE = 'str site=""'
OPERANDS, EXTRAS = "Tensor q, Tensor k, Tensor v", "Tensor? seen, Tensor? sinks, Tensor? seed"


class Config(NamedTuple):
    """The arguments that are no tensors; both operators end in them.

    length     rows of the whole sequence
    pattern    text of a Dilation (context_parallel/geometry/dilation.py)
    dropout_p  with which a weight is dropped, as `seed` says
    layout     which rows a rank holds
    strategy   how rows travel: "gather", "ring", or for each pattern what "auto" says
    kernel     what computes a tile ("auto": the fastest that can)
    group      name of the mesh
    version    that of ops/ring.py
    early      which exchanges start before the operator, "forward" and "backward", apart by a space
    ticket     what `dilated_start` gave for it
    site       what the report calls it; for traces, and nothing more
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
    early: str = ""
    ticket: Tensor | None = None
    site: str = ""

    @property
    def plain(self) -> tuple[Any, ...]:
        """See ops/ring.py."""
        return self if self.site else self[:-3]


FIELDS = len(Config._fields) - 3  # without defaults


@torch.library.custom_op(
    "ringopt::dilated_attention",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({OPERANDS}, {EXTRAS}, {CONFIG}, {EARLY}, {SITE}) -> (Tensor out, Tensor lse)",
)
def dilated_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S_local, Dv] in q's dtype; lse [B, Hq, S_local] in natural log, not differentiable. `seen`: bool,
    False for keys that are padding, of the whole sequence. Where no pattern keeps a row of a head, or it sees padding
    only, out is 0 and lse -inf, or the sink's logit. Raises RingMismatchError, RingCommError, OptionError,
    PlanError."""
    q, k, v, seen, sinks, seed, *rest = arguments
    given, config = operands_of(q, k, v, seen, sinks, seed), Config(*rest)
    attention, mesh = prepare("dilated_attention", given, seen, config)
    if seed is not None:
        given = replace(given, seed=agree_on_seeds(mesh, seed))
    with mesh.unbroken(), working_for(config.site), torch.autocast(q.device.type, enabled=False):
        return attend_dilated(attention, mesh, given, begun(k, v, False, config))


@dilated_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sizes = q.shape[:3]
    return q.new_empty(*sizes, v.shape[3]), q.new_empty(sizes, dtype=accumulator(q.dtype))


@torch.library.custom_op(
    "ringopt::dilated_attention_backward",
    mutates_args=(),
    tags=ON_HOST,
    schema=(
        f"(Tensor dout, {OPERANDS}, Tensor out, Tensor lse, {EXTRAS}, {CONFIG}, {EARLY}, {SITE}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dsinks)"
    ),
)
def dilated_attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rank's own rows; of the sinks, this rank's part: the caller sums it over the ranks."""
    dout, q, k, v, out, lse, seen, sinks, seed, *rest = arguments
    given, config = operands_of(q, k, v, seen, sinks, seed), Config(*rest)
    attention, mesh = prepare("dilated_attention_backward", given, seen, config)
    with mesh.unbroken(), working_for(config.site), torch.autocast(q.device.type, enabled=False):
        return attend_dilated_backward(attention, mesh, dout, Saved(given, out, lse), begun(k, v, True, config))


@dilated_attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    _dout, q, k, v, _out, _lse, _seen, sinks, *_ = arguments
    dsinks = [] if sinks is None else [sinks.new_empty(sinks.shape)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, seen, sinks, seed, *config = inputs
    given = Config(*config)._replace(ticket=None)  # defaults are no arguments, so they have no gradient
    ctx.config = given if given.site else given[: -2 if given.early else -3]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, seen, sinks, seed)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    dq, dk, dv, dsinks = dilated_attention_backward(dout, *ctx.saved_tensors, *ctx.config)
    return dq, dk, dv, None, dsinks[0] if dsinks else None, None, *(None for _ in ctx.config)


dilated_attention.register_autograd(never_compiled(_backward), setup_context=_setup_context)


# ---- before either ---------------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "ringopt::dilated_start",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"(Tensor k, Tensor v, int q_heads, bool backward, int number, {CONFIG}, {SITE}) -> Tensor",
)
def dilated_start(k: Tensor, v: Tensor, q_heads: int, backward: bool, number: int, *config: Any) -> Tensor:
    """A ticket for the first messages of `dilated_attention`, or of its backward, of these K and V; see `ring_start`.
    Raises as `dilated_attention` does."""
    chosen = Config(*config[:FIELDS])._replace(site=config[-1] if len(config) > FIELDS else "")
    mesh = mesh_of(chosen.group)
    program_until_here(mesh)
    mesh.meet_on(k.device)
    misfit = misfit_of_rows({"k": k, "v": v}, layout_of(chosen.layout, chosen.length, mesh.size), mesh.rank)
    agree(mesh, (("op", f"dilated_start {backward}"), *key_of_kv(misfit, q_heads, k, v, chosen, mesh.size)))
    if misfit:
        raise RingMismatchError(f"dilated_start: {misfit}")
    settle(mesh)
    with working_for(chosen.site):
        posted = begin_dilated(proved_plan(chosen, (q_heads, k.shape[1]), mesh), mesh, k, v, backward)
    return issue(mesh, about(k, v, backward, chosen), posted, [posted.pending])


@dilated_start.register_fake
def _(k: Tensor, v: Tensor, q_heads: int, backward: bool, number: int, *config: Any) -> Tensor:
    return k.new_empty((), dtype=torch.int64, device="cpu")


def begun(k: Tensor, v: Tensor, backward: bool, config: Config) -> Posted | None:
    """What `dilated_start` posted for these K and V."""
    return redeem(config.ticket, about(k, v, backward, config)) if config.ticket is not None else None


def about(k: Tensor, v: Tensor, backward: bool, config: Config) -> tuple[Any, ...]:
    """The identity of an exchange of keys, which its two halves compare (distributed/tickets.py)."""
    plain = config._replace(early="", ticket=None)
    return ("dilated", backward, tuple(k.shape), tuple(v.shape), k.dtype, *map(str, plain))


# ---- what both do before their first message -------------------------------------------------------------------------


def operands_of(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor | None, seed: Tensor | None
) -> Operands:
    """The operands of the executor, the mask [1 or B, 1, 1, T] as [B, T]."""
    return Operands(q, k, v, seen if seen is None else seen.flatten(1).expand(q.shape[0], -1), sinks, seed)


def prepare(op: str, given: Operands, seen: Tensor | None, config: Config) -> tuple[DilatedAttention, Mesh]:
    """The plan, proved on this rank and compared with what the other ranks are about to run; and the mesh."""
    mesh, (q, k, v) = mesh_of(config.group), (given.q, given.k, given.v)
    program_until_here(mesh)
    mesh.meet_on(q.device)
    settle_seeds(mesh)
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
    plan = proved_plan(config, (q.shape[1], k.shape[1]), mesh)
    kernel, _reason = choose_kernel(config.kernel, q.dtype, q.device, k.shape[3], v.shape[3])
    return DilatedAttention(plan, kernel, config.scale, config.dropout_p), mesh


def proved_plan(config: Config, heads: tuple[int, int], mesh: Mesh) -> DilatedPlan:
    """The plan of a call with (query heads, KV heads), proved. Raises PlanError, OptionError."""
    plan = dilated_plan_of(config.pattern, config.length, heads, mesh.size, config.layout, config.strategy)
    prove_dilated(plan, mesh.rank)
    return plan


def misfit_of_mixing(given: Operands, config: Config) -> str:
    """Why torchscale's mixing cannot be applied, or ""."""
    if given.sinks is None or not dilation_of(config.pattern).torchscale_mixing:
        return ""
    return "torchscale's mixing has no sinks"


def misfit_of_seen(seen: Tensor | None, batch: int, length: int) -> str:
    """Why a mask is not one of keys, [1 or B, 1, 1, T] of bool, or ""."""
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
    return (
        ("op", op),
        *key_of_kv(misfit, given.q.shape[1], given.k, given.v, config, size),
        ("seen", "none" if given.seen is None else "given"),
        ("sinks", "none" if given.sinks is None else str(list(given.sinks.shape))),
        ("seed", "none" if given.seed is None else "given"),
    )


def key_of_kv(
    misfit: str, heads: int, k: Tensor, v: Tensor, config: Config, size: int
) -> tuple[tuple[str, int | float | str | bool], ...]:
    """Of that, what shapes the messages."""
    named = config._asdict()
    for local in ("group", "early", "ticket", "site"):
        del named[local]
    return (
        ("shards", misfit or "as laid out"),
        ("ranks", size),
        ("batch", k.shape[0]),
        ("heads", heads),
        ("kv_heads", k.shape[1]),
        ("key_dim", k.shape[3]),
        ("value_dim", v.shape[3]),
        ("dtype", str(k.dtype)),
        *named.items(),
    )
