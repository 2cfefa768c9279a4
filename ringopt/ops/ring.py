"""`ringopt::ring_attention` and its backward: attention over rows that are spread over the ranks of a mesh.

    ring_attention(q [B, Hq, Sq_local, D], k [B, Hkv, Sk_local, D], v [B, Hkv, Sk_local, Dv], sources, sinks? [1|B, Hq],
                   seed? [], ...) -> out, lse

Two opaque operators, the same on every rank: which rank this is, and of how many, is asked of the mesh named `group`
when they run. The backward is an operator of its own, and not a formula, because compiled code is cached by the text of
a graph and a formula would be cached with it; `version` is an argument, and nothing more, so that this text changes
with the code behind it.

A third, `ring_start`, posts the first messages of either as soon as K and V exist; what it returns is the `ticket` that
the other is given (ringopt/overlap/start_early.py puts it into graphs).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward, begin
from ringopt.context_parallel.executor.loop import Posted
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved, kv_sizes
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.concurrency import prove_plan
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import Plan, plan_of
from ringopt.distributed.handshake import agree
from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh, program_until_here
from ringopt.distributed.tickets import issue, redeem, settle
from ringopt.distributed.traffic import working_for
from ringopt.errors import RingMismatchError
from ringopt.expr.mask import Mask
from ringopt.kernels.base import accumulator
from ringopt.kernels.choose import choose_kernel
from ringopt.ops.expansion import expansion_of
from ringopt.ops.mask_facts import with_facts
from ringopt.ops.ring_misfits import (
    agree_on_seeds,
    misfit_of,
    misfit_of_expansion,
    misfit_of_extras,
    misfit_of_rows,
    misfit_of_sources,
    settle_seeds,
)
from ringopt.ops.tags import ON_HOST
from ringopt.torch_compat.autograd import never_compiled
from ringopt.version import engine_version

CONFIG = (
    "SymInt q_length, SymInt kv_length, str pattern, str mask, int[] learned, float dropout_p, "
    "float scale, str q_layout, str kv_layout, str strategy, str kernel, str group, str version"
)


class Config(NamedTuple):
    """The arguments that shape no operand; both operators end in them.

    q_length, kv_length   rows of the whole sequence
    pattern, mask         who sees whom: structure (context_parallel/geometry/pattern.py) and the text of a Mask
                          over `sources`
    learned               numbers of the sources that need a gradient
    dropout_p             probability with which a weight is dropped, as `seed` says
                          (context_parallel/executor/dropout.py)
    q_layout, kv_layout   which rows a rank holds
    strategy, kernel      how rows travel; what computes a tile ("auto": the fastest that can)
    group                 name of the mesh
    version               VERSION
    early                 which ends of the exchange are moved away from the operator, apart by spaces: "forward" and
                          "backward" start before it, "home" ends behind its backward
    ticket                what `ring_start` gave for it
    expand                where k and v are what K and V are made of, how (ops/expansion.py)
    site                  what the report calls it; for traces, and nothing more
    facts                 what `mask_facts` gave for the sources of the mask
    """

    q_length: int
    kv_length: int
    pattern: str
    mask: str
    learned: list[int]
    dropout_p: float
    scale: float
    q_layout: str
    kv_layout: str
    strategy: str
    kernel: str
    group: str
    version: str
    early: str = ""
    ticket: Tensor | None = None
    expand: str = ""
    site: str = ""
    facts: Tensor | None = None

    @property
    def plain(self) -> tuple[Any, ...]:
        """By position, as a call has them: defaults at its end are no arguments, and have no gradient."""
        rest = [self[i] is not None and self[i] != "" for i in range(FIELDS, len(self))]
        return self[: FIELDS + max((place for place, given in enumerate(rest, 1) if given), default=0)]

    def of_mask(self, sources: int) -> tuple[int, ...]:
        """Of the learned sources those of the mask, which are so many."""
        return tuple(number for number in self.learned if number < sources)

    def sharded(self, ranks: int) -> ShardedPattern:
        return ShardedPattern(self.pattern, self.q_length, self.kv_length, ranks, self.q_layout, self.kv_layout)


VERSION = engine_version()
FIELDS = len(Config._fields) - len(Config._field_defaults)


OPERANDS = "Tensor q, Tensor k, Tensor v"
EXTRAS = "Tensor[] sources, Tensor? sinks, Tensor? seed"
EARLY = 'str early="", Tensor? ticket=None'
TAIL = 'str expand="", str site=""'
FACTS = "Tensor? facts=None"


# ---- forward ---------------------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "ringopt::ring_attention",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"({OPERANDS}, {EXTRAS}, {CONFIG}, {EARLY}, {TAIL}, {FACTS}) -> (Tensor out, Tensor lse)",
)
def ring_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq_local, Dv] in q's dtype; lse [B, Hq, Sq_local] in natural log, not differentiable. A row that sees
    nothing is 0 (NaN where the mask says so) with lse -inf. Raises RingMismatchError, RingCommError, OptionError,
    PlanError."""
    given, config = arguments_of_forward(arguments)
    site = prepare("ring_attention", given, config)
    given = with_facts(given, config.facts)
    if given.seed is not None:
        given = replace(given, seed=agree_on_seeds(site.mesh, given.seed))
    with site.mesh.unbroken(), working_for(config.site), torch.autocast(given.q.device.type, enabled=False):
        return attend(site.attention, site.mesh, given, begun(given, False, config))


@ring_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    given, _config = arguments_of_forward(arguments)
    q, sizes = given.q, given.q.shape[:3]
    return q.new_empty(*sizes, given.value_dim), q.new_empty(sizes, dtype=accumulator(q.dtype))


# ---- backward --------------------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "ringopt::ring_attention_backward",
    mutates_args=(),
    tags=ON_HOST,
    schema=(
        f"(Tensor dout, {OPERANDS}, Tensor out, Tensor lse, {EXTRAS}, {CONFIG}, {EARLY}, {TAIL}, {FACTS}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dsources)"
    ),
)
def ring_attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rank's own rows; of each learned source, then of the sinks, this rank's part: the caller sums it
    over the ranks, unless the source holds the rank's rows only. So it is with queries or keys in the layout
    "replicated". Constants of an expansion are sources."""
    dout, saved, config = arguments_of_backward(arguments)
    site = prepare("ring_attention_backward", saved.given, config)
    saved = replace(saved, given=with_facts(saved.given, config.facts))
    with site.mesh.unbroken(), working_for(config.site), torch.autocast(dout.device.type, enabled=False):
        return attend_backward(site.attention, site.mesh, dout, saved, begun(saved.given, True, config))


@ring_attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    _dout, saved, config = arguments_of_backward(arguments)
    dq, dk, dv = (x.new_empty(x.shape) for x in (saved.given.q, saved.given.k, saved.given.v))
    return dq, dk, dv, empty_extras(saved.given, config)


def arguments_of_forward(arguments: Sequence[Any]) -> tuple[Operands, Config]:
    """Of `ringopt::ring_attention`: the tensors, and the rest."""
    q, k, v, sources, sinks, seed, *config = arguments
    return operands_of(q, k, v, sources, sinks, seed, Config(*config)), Config(*config)


def arguments_of_backward(arguments: Sequence[Any]) -> tuple[Tensor, Saved, Config]:
    """Of its backward operators: dout, what the forward left, and the rest."""
    dout, q, k, v, out, lse, sources, sinks, seed, *config = arguments
    return dout, Saved(operands_of(q, k, v, sources, sinks, seed, Config(*config)), out, lse), Config(*config)


def operands_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sources: Sequence[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    config: Config,
) -> Operands:
    """Sources of the mask apart from the constants of an expansion."""
    if not config.expand:
        return Operands(q, k, v, sources, sinks, seed)
    how = expansion_of(config.expand)
    return Operands(q, k, v, sources[: how.sources], sinks, seed, how.of(sources, config.learned))


def empty_extras(given: Operands, config: Config) -> list[Tensor]:
    """For the gradients of the learned sources, then of the sinks."""
    read = [*given.read(config.of_mask(len(given.sources))), *([] if given.sinks is None else [given.sinks])]
    return [x.new_empty(x.shape) for x in read]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sources, sinks, seed, *rest = inputs
    config = Config(*rest)._replace(ticket=None)
    ctx.config, ctx.given = config._replace(facts=None), len(config.plain)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, sinks, seed, config.facts, *sources)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, seed, facts, *sources = ctx.saved_tensors
    config: Config = ctx.config._replace(facts=facts)
    dq, dk, dv, parts = ring_attention_backward(dout, q, k, v, out, lse, sources, sinks, seed, *config.plain)
    dsinks = parts.pop() if sinks is not None else None
    dsources: list[Tensor | None] = [None] * len(sources)
    for number, part in zip(config.learned, parts, strict=True):
        dsources[number] = part
    # One None per argument; torch.library takes an empty list for a list of tensors, and wants one back.
    rest: Any = ([] if isinstance(x, (list, tuple)) and not x else None for x in config[: ctx.given])
    return dq, dk, dv, dsources, dsinks, None, *rest


ring_attention.register_autograd(never_compiled(_backward), setup_context=_setup_context)


# ---- before either ---------------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "ringopt::ring_start",
    mutates_args=(),
    tags=ON_HOST,
    schema=f"(Tensor k, Tensor v, int q_heads, bool backward, int number, {CONFIG}, {TAIL}) -> Tensor",
)
def ring_start(k: Tensor, v: Tensor, q_heads: int, backward: bool, number: int, *config: Any) -> Tensor:
    """A ticket for the first messages of `ring_attention`, or of its backward, of these K and V. Of two starts in a
    graph no two have one `number`, so that no compiler takes them for one. Raises as `ring_attention` does."""
    expand, site, *_ = *config[FIELDS:], "", ""
    chosen = Config(*config[:FIELDS])._replace(expand=expand, site=site)
    mesh, mask = mesh_of(chosen.group), Mask.parse(chosen.mask)
    program_until_here(mesh)
    mesh.meet_on(k.device)
    plan = plan_for(chosen, (q_heads, k.shape[1]), mesh, mask)
    misfit = misfit_of_rows({"k": k, "v": v}, plan.kv_layout, mesh.rank)
    agree(
        mesh,
        (("op", f"ring_start {backward}"), ("shards", misfit or "as laid out"), *key_of_kv(k, v, chosen, mesh.size)),
    )
    if misfit:
        raise RingMismatchError(f"ring_start: {misfit}")
    settle(mesh)
    with working_for(chosen.site):
        posted = begin(attention_of(plan, chosen, mask, Operands(k, k, v), mesh.rank), mesh, k, v, backward)
    return issue(mesh, about(k, v, backward, chosen), posted, [one.pending for one in posted])


@ring_start.register_fake
def _(k: Tensor, v: Tensor, q_heads: int, backward: bool, number: int, *config: Any) -> Tensor:
    return k.new_empty((), dtype=torch.int64, device="cpu")


def begun(given: Operands, backward: bool, config: Config) -> Sequence[Posted]:
    """What `ring_start` posted for these K and V."""
    return redeem(config.ticket, about(given.k, given.v, backward, config)) if config.ticket is not None else ()


def about(k: Tensor, v: Tensor, backward: bool, config: Config) -> tuple[Any, ...]:
    """The identity of an exchange of keys, which its two halves compare (distributed/tickets.py)."""
    plain = config._replace(early="", ticket=None, facts=None)
    return ("backward" if backward else "forward", tuple(k.shape), tuple(v.shape), k.dtype, *map(str, plain))


# ---- what both do before their first message -------------------------------------------------------------------------
@dataclass(frozen=True)
class Site:
    """What a call resolves to: its mesh, and its attention with a proved plan."""

    mesh: Mesh
    attention: Attention


def prepare(op: str, given: Operands, config: Config) -> Site:
    """The mesh and the plan, proved on this rank and compared with what the other ranks are about to run."""
    mesh, mask = mesh_of(config.group), Mask.parse(config.mask)
    program_until_here(mesh)
    mesh.meet_on(given.q.device)
    settle_seeds(mesh)
    plan = plan_for(config, (given.q.shape[1], given.k.shape[1]), mesh, mask)
    misfit = (
        misfit_of_expansion(given, mask, plan)
        or misfit_of(given, plan.q_layout, plan.kv_layout, mesh.rank)
        or misfit_of_sources(given.sources, mask, count(plan.q_layout.ranges(mesh.rank)))
        or misfit_of_extras(given, config.dropout_p)
    )
    agree(mesh, key_of(op, misfit, given, config, mesh.size))
    if misfit:
        raise RingMismatchError(f"{op}: {misfit}")
    return Site(mesh, attention_of(plan, config, mask, given, mesh.rank))


def plan_for(config: Config, heads: tuple[int, int], mesh: Mesh, mask: Mask) -> Plan:
    """The plan of a call with (query heads, KV heads)."""
    return plan_of(config.sharded(mesh.size), config.strategy, heads, mask)


def attention_of(plan: Plan, config: Config, mask: Mask, given: Operands, rank: int) -> Attention:
    """What is computed, its plan proved for `rank`."""
    k, v, learned = given.k, given.v, tuple(config.learned)
    key_dim, value_dim = k.shape[3], v.shape[3]
    if config.expand:
        how = expansion_of(config.expand)
        key_dim, value_dim, learned = how.key_dim, how.value_dim, config.of_mask(how.sources)
    kernel, _reason = choose_kernel(config.kernel, k.dtype, k.device, key_dim, value_dim)
    exchange, heads = (plan.whole, plan) if isinstance(plan, HeadExchange) else (plan, None)
    prove_plan(plan, kv_sizes(k, v, mask), rank)
    return Attention(exchange, mask, kernel, config.scale, learned, config.dropout_p, heads=heads)


def key_of(
    op: str, misfit: str, given: Operands, config: Config, size: int
) -> tuple[tuple[str, int | float | str | bool], ...]:
    """All that shapes messages, or that would give wrong numbers where ranks differ in it."""
    return (
        ("op", op),
        ("shards", misfit or "as laid out"),
        ("heads", given.q.shape[1]),
        *key_of_kv(given.k, given.v, config, size),
        ("sources", str(shapes_of(given.sources, Mask.parse(config.mask)))),
        ("sinks", "none" if given.sinks is None else str(list(given.sinks.shape))),
        ("seed", "none" if given.seed is None else "given"),
        ("learned", str(list(config.learned))),
        ("constants", str([list(x.shape) for x in given.expansion.consts] if given.expansion is not None else [])),
    )


def key_of_kv(k: Tensor, v: Tensor, config: Config, size: int) -> tuple[tuple[str, int | float | str | bool], ...]:
    """Of that, what shapes the messages of K and V."""
    lengths_and_layouts = config._asdict()
    for local in ("mask", "learned", "group", "early", "ticket", "expand", "site", "facts"):
        del lengths_and_layouts[local]
    return (
        ("ranks", size),
        ("batch", k.shape[0]),
        ("kv_heads", k.shape[1]),
        ("key_dim", k.shape[3]),
        ("value_dim", v.shape[3]),
        ("dtype", str(k.dtype)),
        ("mask", digest(config.mask)),
        ("expand", digest(config.expand)),
        *lengths_and_layouts.items(),
    )


def digest(text: str) -> str:
    """Of a text that is too long to be compared over the ranks."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def shapes_of(sources: Sequence[Tensor], mask: Mask) -> list[list[int | str]]:
    """Sizes of the sources; the rows of a rank, of which others have more or fewer, are no number."""
    return [
        ["rows" if mask.row_dims.get(number) == dim else size for dim, size in enumerate(source.shape)]
        for number, source in enumerate(sources)
    ]
