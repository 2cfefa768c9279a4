"""`ringopt::ring_attention` and its backward: attention over rows that are spread over the ranks of a mesh.

    ring_attention(q [B, Hq, Sq_local, D], k [B, Hkv, Sk_local, D], v [B, Hkv, Sk_local, Dv], ...) -> out, lse

Two opaque operators, the same on every rank: which rank this is, and of how many, is asked of the mesh named `group`
when they run. The backward is an operator of its own, and not a formula, because compiled code is cached by the text of
a graph and a formula would be cached with it; `version` is an argument, and nothing more, so that this text changes
with the code behind it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringopt import __version__
from ringopt.attention.check import prove
from ringopt.attention.exchange import exchange_of
from ringopt.attention.execute import Attention, Saved, attend, attend_backward
from ringopt.attention.layouts import Layout
from ringopt.attention.rows import count
from ringopt.distributed.handshake import agree
from ringopt.distributed.mesh import Mesh, mesh_of
from ringopt.errors import RingMismatchError
from ringopt.graph.mask import Mask
from ringopt.kernels.base import accumulator
from ringopt.kernels.choose import choose

CONFIG = (
    "SymInt q_length, SymInt kv_length, str pattern, str mask, int[] learned, float scale, str q_layout, "
    "str kv_layout, str strategy, str kernel, str group, str version"
)


class Config(NamedTuple):
    """The arguments that are no tensors; both operators end in them.

    q_length, kv_length   rows of the whole sequence
    pattern, mask         who sees whom: structure (attention/patterns.py) and the text of a Mask over `sources`
    learned               numbers of the sources that need a gradient
    q_layout, kv_layout   which rows a rank holds
    strategy, kernel      how rows travel; what computes a tile ("auto": the fastest that can)
    group                 name of the mesh
    version               VERSION
    """

    q_length: int
    kv_length: int
    pattern: str
    mask: str
    learned: list[int]
    scale: float
    q_layout: str
    kv_layout: str
    strategy: str
    kernel: str
    group: str
    version: str


def _version() -> str:
    """The version of ringopt and a hash of the sources that the operators run."""
    digest = hashlib.blake2b(digest_size=4)
    for room in ("ops", "attention", "kernels"):
        folder = files("ringopt") / room
        for path in sorted(folder.iterdir(), key=lambda path: path.name):
            if path.name.endswith(".py"):
                digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"


VERSION = _version()


# ---- forward ---------------------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "ringopt::ring_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor[] sources, {CONFIG}) -> (Tensor out, Tensor lse)",
)
def ring_attention(q: Tensor, k: Tensor, v: Tensor, sources: list[Tensor], *config: Any) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq_local, Dv] in q's dtype, 0 for a row that sees nothing; lse [B, Hq, Sq_local] in natural log, -inf
    there, not differentiable. Raises RingMismatchError, RingCommError, OptionError, PlanError."""
    site = prepare("ring_attention", q, k, v, sources, Config(*config))
    with torch.autocast(q.device.type, enabled=False):
        return attend(site.attention, site.mesh, q, k, v, sources)


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sources: list[Tensor], *config: Any) -> tuple[Tensor, Tensor]:
    sizes = q.shape[:3]
    return q.new_empty(*sizes, v.shape[3]), q.new_empty(sizes, dtype=accumulator(q.dtype))


# ---- backward --------------------------------------------------------------------------------------------------------
@torch.library.custom_op(
    "ringopt::ring_attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] sources, {CONFIG}) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dsources)"
    ),
)
def ring_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sources: list[Tensor], *config: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rank's own rows; of each learned source this rank's part: the caller sums it over the ranks."""
    site = prepare("ring_attention_backward", q, k, v, sources, Config(*config))
    with torch.autocast(q.device.type, enabled=False):
        return attend_backward(site.attention, site.mesh, dout, Saved(q, k, v, out, lse, sources))


@ring_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sources: list[Tensor], *config: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    parts = [sources[i].new_empty(sources[i].shape) for i in Config(*config).learned]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), parts


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sources, *ctx.config = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *sources)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *sources = ctx.saved_tensors
    dq, dk, dv, parts = torch.ops.ringopt.ring_attention_backward(dout, q, k, v, out, lse, sources, *ctx.config)
    dsources: list[Tensor | None] = [None] * len(sources)
    for number, part in zip(Config(*ctx.config).learned, parts, strict=True):
        dsources[number] = part
    # One None per argument; torch.library takes an empty list for a list of tensors, and wants one back.
    return dq, dk, dv, dsources, *([] if isinstance(x, (list, tuple)) and not x else None for x in ctx.config)


ring_attention.register_autograd(_backward, setup_context=_setup_context)


# ---- what both do before their first message -------------------------------------------------------------------------
@dataclass(frozen=True)
class Site:
    mesh: Mesh
    attention: Attention


def prepare(op: str, q: Tensor, k: Tensor, v: Tensor, sources: list[Tensor], config: Config) -> Site:
    """The mesh and the plan, proved on this rank and compared with what the other ranks are about to run."""
    mesh = mesh_of(config.group)
    plan = exchange_of(
        config.pattern, config.q_length, config.kv_length, mesh.size, config.q_layout, config.kv_layout, config.strategy
    )
    misfit = misfit_of(q, k, v, plan.q_layout, plan.kv_layout, mesh.rank)
    agree(mesh, key_of(op, misfit, q, k, v, sources, config, mesh.size))
    if misfit:
        raise RingMismatchError(f"{op}: {misfit}")
    kernel, _reason = choose(config.kernel, q.dtype, q.device, k.shape[3], v.shape[3])
    prove(plan, mesh.rank)
    return Site(mesh, Attention(plan, Mask.parse(config.mask), kernel, config.scale, tuple(config.learned)))


def misfit_of(q: Tensor, k: Tensor, v: Tensor, q_layout: Layout, kv_layout: Layout, rank: int) -> str:
    """What is wrong with the shards, or "". A value, because all ranks must hear of it before they stop."""
    for name, shard, layout in (("q", q, q_layout), ("k", k, kv_layout), ("v", v, kv_layout)):
        rows = count(layout.ranges(rank))
        if shard.dim() != 4 or shard.shape[2] != rows:
            return (
                f"{name} is {list(shard.shape)}, and rank {rank} of {layout.ranks} holds {rows} rows (dim 2) of a "
                f"{layout.name} sequence of {layout.length}; cut it with ringopt.shard, or pass its layout"
            )
    grouped = k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if not grouped or k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return f"q, k, v are {list(q.shape)}, {list(k.shape)}, {list(v.shape)}, which is no attention"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must be of one dtype"
    return ""


def key_of(
    op: str, misfit: str, q: Tensor, k: Tensor, v: Tensor, sources: list[Tensor], config: Config, size: int
) -> tuple[tuple[str, int | float | str | bool], ...]:
    """All that shapes messages, or that would give wrong numbers where ranks differ in it."""
    lengths_and_layouts = config._asdict()
    for local in ("mask", "learned", "group"):
        del lengths_and_layouts[local]
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
        ("mask", hashlib.blake2b(config.mask.encode(), digest_size=8).hexdigest()),
        ("sources", str([list(source.shape) for source in sources])),
        ("learned", str(list(config.learned))),
        *lengths_and_layouts.items(),
    )
