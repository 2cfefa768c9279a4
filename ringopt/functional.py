"""What the compiler inserts, for use by hand in eager code: attention over a sequence that is spread over ranks.

q, k, v = (ringopt.shard(x, dim=2) for x in (q, k, v))          # [B, H, S, D] -> [B, H, S_local, D]
out = ringopt.attention(q, k, v, is_causal=True)
out = ringopt.unshard(out, dim=2, length=S)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringopt.arguments import (
    MASK_DIMS,
    check_causal,
    check_layout,
    check_mask,
    check_names,
    check_numbers,
    check_operands,
    check_whole,
    dim_of,
    logits_of,
    padding_of,
    pattern_text_of,
    window_rates,
)
from ringopt.context_parallel.geometry.dilation import Dilation, shared_heads
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.plan_of import on_nodes
from ringopt.cost.choose import Case, choose_strategy
from ringopt.cost.simulate import Heads
from ringopt.distributed.agreed_rates import agreed_rates
from ringopt.distributed.lookup import mesh_of, process_mesh
from ringopt.distributed.mesh import Mesh, register
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, RingMismatchError
from ringopt.expr.mask import Mask
from ringopt.expr.terms import affine, axis, load
from ringopt.kernels.choose import choose_kernel
from ringopt.ops import dilated, operators, ring
from ringopt.ops.dropout import SEEDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["attention", "record_traffic", "shard", "unshard"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | None = None,
    sinks: int | Tensor | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    dilation_rates: tuple[int, ...] | None = None,
    dilation_offsets: str = "paper",
    mesh: DeviceMesh | Mesh | None = None,
    layout: str = "contiguous",
    strategy: str = "auto",
    kernel: str = "auto",
) -> Tensor:
    """`F.scaled_dot_product_attention` over the whole sequence, of which every rank passes its rows. Differentiable.

    query [B, Hq, Sq_local, D], key [B, Hkv, Sk_local, D], value [B, Hkv, Sk_local, Dv] are this rank's rows, cut as
    `layout` says ("contiguous", "zigzag"); Hq may be a multiple of Hkv with `enable_gqa`. Returns [B, Hq, Sq_local,
    Dv].

    `attn_mask` [1|B, 1|Hq, Sq_local, Sk], or without the first dims, has this rank's rows and all keys: bool (True is
    seen) or added to the scores; ringopt.shard(mask, -2) cuts one that every rank has whole. Differentiable.
    `dropout_p`: which weights are dropped follows from a number that the default generator draws (on rank 0, for all),
    and not from how many ranks there are.

    `is_causal` and `window` speak of positions in the whole sequence: window=w lets query t see keys t-w+1 .. t when
    causal, else all keys s with |t - s| < w. `sinks`=s beside it: and the first s keys (Xiao et al., StreamingLLM,
    2023). `dilation_rates` beside it, one r or one for each query head: w keys, r rows apart (Beltagy et al.,
    Longformer, 2020). No [Sq, Sk] is held for them, and only rows that a head needs travel. `sinks` as a tensor, [Hq]
    or [1|B, Hq], the same on all ranks: one more logit in the softmax of every row of a head, which leads to no value
    (gpt-oss); differentiable, its gradient complete on every rank.

    `mesh`: the ranks that share the sequence (default: all). `strategy`: how rows travel, "local", "halo", "gather",
    "ring", "ring2" (both ways round), "ulysses" or "hybrid" (heads are traded within nodes, a ring goes between them);
    "auto" is the one that is predicted to be fastest. `kernel`: "auto", or by name as in the options. Without a process
    group, or on a mesh of one rank, this is the single-device operator.

    `segment_lengths` (w) and `dilation_rates` (r), as many of one as of the other: dilated self-attention (Ding et al.,
    LongNet, 2023). Of each segment of w positions, head j takes every r-th one from its offset on, and these attend to
    each other; all patterns are one softmax. `dilation_offsets`: "paper" (j mod r) or "torchscale" (j // ceil(Hq / r)).
    Any lengths; a (token, head) that no pattern takes is 0, with a warning. `attn_mask` is then of keys alone, [B, 1,
    1, S] of bool, the same on all ranks; rows travel by "gather" or "ring", for each pattern as "auto" finds best.

    Raises OptionError for what is not built; RingMismatchError where shards or masks are not those of one sequence;
    RingCommError.
    """
    check_operands(query, key, value, enable_gqa)
    check_mask(attn_mask)
    check_causal(is_causal)
    check_numbers(dropout_p, scale)
    check_names(layout, strategy, kernel)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    ranks = ranks_of(mesh, query)
    dilates = dilation_rates is not None and window is None
    if segment_lengths is not None or dilates or dilation_offsets != "paper":
        also = {"window": window is not None, "sinks": isinstance(sinks, int)}
        _refuse(also, "not possible in dilated attention of segments (segment_lengths)")
        dilation = Dilation.asked(segment_lengths, dilation_rates, is_causal, dilation_offsets)
        logits = logits_of(sinks, query) if isinstance(sinks, Tensor) else None
        asked = _Asked(query, key, value, attn_mask, logits, dropout_p, scale)
        return _dilated(asked, dilation, ranks, _Way(layout, strategy, kernel))
    rates = window_rates(dilation_rates, query.shape[1])
    if len(set(rates)) > 1:
        how: dict[str, Any] = {"window": window, "scale": scale, "is_causal": is_causal}
        how |= {"dropout_p": dropout_p, "mesh": mesh, "layout": layout, "strategy": strategy, "kernel": kernel}
        return _by_rate(query, key, value, attn_mask, sinks, rates, how)
    first, logits = (None, logits_of(sinks, query)) if isinstance(sinks, Tensor) else (sinks, None)
    pattern = pattern_text_of(is_causal, window, first, rates[0])
    asked = _Asked(query, key, value, attn_mask, logits, dropout_p, scale)
    if (ranks is None or ranks.size == 1) and window is None:
        return _alone(asked, pattern)
    if ranks is None or ranks.size == 1:
        return _spread(asked, pattern, mesh_of("pretend:0/1"), _Way("contiguous", "local", kernel))
    return _spread(asked, pattern, ranks, _Way(layout, strategy, kernel))


@dataclass(frozen=True)
class _Asked:
    """What is attended to, with a number for the scale; `sinks` as logits."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    scale: float

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


@dataclass(frozen=True)
class _Way:
    """How rows are cut and travel, and what computes a tile."""

    layout: str
    strategy: str
    kernel: str


def _alone(asked: _Asked, pattern: str) -> Tensor:
    check_whole(asked.query, asked.key, asked.value, asked.attn_mask)
    out: Tensor = operators.attention(
        asked.query,
        asked.key,
        asked.value,
        asked.attn_mask,
        [],
        asked.sinks,
        _seed(asked.query, asked.dropout_p),
        pattern,
        "",
        asked.dropout_p,
        asked.scale,
    )
    return out


def _spread(asked: _Asked, pattern: str, ranks: Mesh, way: _Way) -> Tensor:
    """Over the tokens of all `ranks`, once they have exchanged which ones they hold."""
    (query, key, value), sinks, layout = asked.operands, asked.sinks, way.layout
    seed, (mask, sources) = _seed(query, asked.dropout_p), _mask(asked.attn_mask)
    given = [query, key, value, *sources, *([] if sinks is None else [sinks])]
    held = _held(ranks, query, key, sources, seed, given)
    q_length, kv_length = (_length(ranks, layout, name, held[name]) for name in ("query", "key"))
    _check_masks(query, kv_length, held)
    if seed is not None:
        seed = torch.full_like(seed, held["seed"][0])
    if sinks is not None and ranks.size > 1:  # each rank finds the part of their gradient that its rows make
        sinks = operators.copy_to_group(sinks, ranks.name)
    strategy = on_nodes(way.strategy, ranks)
    if strategy == "auto":
        by = "math" if asked.dropout_p > 0 else choose_kernel(way.kernel, *_sizes(query, key, value))[0].name
        case = Case(pattern, q_length, kv_length, Heads.of(query, key, value, by), any(held["training"]), mask.text)
        strategy = choose_strategy(case, ranks.size, layout, agreed_rates(ranks, query.device.type)).strategy
    learned = [0] if mask.differentiable and sources[0].requires_grad else []
    config = ring.Config(
        q_length,
        kv_length,
        pattern,
        mask.text,
        learned,
        asked.dropout_p,
        asked.scale,
        q_layout=layout,
        kv_layout=layout,
        strategy=strategy,
        kernel=way.kernel,
        group=ranks.name,
        version=ring.VERSION,
    )
    out: Tensor
    out, _lse = operators.ring_attention(query, key, value, sources, sinks, seed, *config.plain)
    return out


def _seed(query: Tensor, dropout_p: float) -> Tensor | None:
    return torch.randint(SEEDS, (), dtype=torch.int64, device=query.device) if dropout_p > 0 else None


def _by_rate(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: int | Tensor | None,
    rates: tuple[int, ...], how: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The heads of each rate alone, with the KV heads that they attend with: so no row travels farther for a head than
    its own window reaches."""
    groups, outs = query.shape[1] // key.shape[1], []
    found = {rate: [head for head, its in enumerate(rates) if its == rate] for rate in sorted(set(rates))}
    for rate, heads in found.items():
        shared, spread = shared_heads(heads, groups)
        kv_heads = list(shared) if spread is None else [head // groups for head in heads]
        of_heads = mask
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            of_heads = mask.index_select(-3, torch.tensor(heads, device=mask.device))
        of_sinks = sinks[..., heads] if isinstance(sinks, Tensor) else sinks
        own = {**how, "sinks": of_sinks, "dilation_rates": (rate,)}
        q, k, v = query[:, heads], key[:, kv_heads], value[:, kv_heads]
        outs.append(attention(q, k, v, of_heads, enable_gqa=True, **own))
    order = sorted(range(len(rates)), key=[head for heads in found.values() for head in heads].__getitem__)
    return torch.cat(outs, 1)[:, order]


def _dilated(asked: _Asked, dilation: Dilation, mesh: Mesh | None, way: _Way) -> Tensor:
    mesh = mesh_of("pretend:0/1") if mesh is None else mesh
    (query, key, value), sinks, layout = asked.operands, asked.sinks, way.layout
    alone, seed = mesh.size == 1, _seed(query, asked.dropout_p)
    held = _held(mesh, query, key, [], seed, [query, key, value, *([] if sinks is None else [sinks])])
    if held["query"] != held["key"]:
        raise OptionError(
            f"dilated attention is self attention; the ranks hold {held['query']} rows of query and {held['key']} of "
            "key"
        )
    length = held["query"][0] if alone else _length(mesh, layout, "query", held["query"])
    seen = padding_of(asked.attn_mask, query.shape[0], length)
    if sentence := dilation.sentence_of_left_out(length, query.shape[1]):
        warnings.warn(sentence, stacklevel=3)
    if seed is not None:
        seed = torch.full_like(seed, held["seed"][0])
    if sinks is not None and not alone:  # each rank finds the part of their gradient that its rows make
        sinks = operators.copy_to_group(sinks, mesh.name)
    if alone:
        check_whole(query, key, value, None)
    config = dilated.Config(
        length,
        dilation.text,
        asked.dropout_p,
        asked.scale,
        layout="contiguous" if alone else layout,
        strategy=way.strategy,
        kernel=way.kernel,
        group=mesh.name,
        version=ring.VERSION,
    )
    out: Tensor
    out, _lse = operators.dilated_attention(query, key, value, seen, sinks, seed, *config.plain)
    return out


def shard(x: Tensor, dim: int, *, mesh: DeviceMesh | Mesh | None = None, layout: str = "contiguous") -> Tensor:
    """This rank's rows of `x` along `dim`. `x` is whole, and the same on all ranks; so is its gradient.

    Raises OptionError for a dim or layout that is none.
    """
    dim, ranks = dim_of("shard", x, dim), ranks_of(mesh, x)
    check_layout(layout)
    if ranks is None or ranks.size == 1:
        return x
    length = x.shape[dim]
    local = count(layout_of(layout, length, ranks.size).ranges(ranks.rank))
    return operators.scatter(x, dim, 1, length, 1, local, layout, ranks.name)  # type: ignore[no-any-return]


def unshard(
    x: Tensor, dim: int, *, length: int, mesh: DeviceMesh | Mesh | None = None, layout: str = "contiguous"
) -> Tensor:
    """The whole tensor, in sequence order, of which every rank passes its rows: `length` along `dim` in all.

    What is computed from it has to be the same on all ranks, as is the gradient that comes back: each rank takes its
    rows. Raises OptionError for a dim or layout that is none, RingMismatchError where rows are not those of `length`.
    """
    dim, ranks = dim_of("unshard", x, dim), ranks_of(mesh, x)
    if not isinstance(length, int) or length < 0:
        raise OptionError(f"unshard(length={length!r}): expected how many rows the sequence has over all ranks")
    check_layout(layout)
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    expected = count(layout_of(layout, length, size).ranges(rank))
    if x.shape[dim] != expected:
        raise RingMismatchError(
            f"unshard: dim {dim} has {x.shape[dim]} rows, and rank {rank} of {size} holds {expected} rows of a "
            f"{layout} sequence of {length}"
        )
    if ranks is None or size == 1:
        return x
    return operators.gather(x, dim, 1, length, 1, layout, ranks.name)  # type: ignore[no-any-return]


def ranks_of(mesh: DeviceMesh | Mesh | None, x: Tensor) -> Mesh | None:
    """The ranks, which have met on the device of `x`; None in a process alone."""
    if isinstance(mesh, Mesh):
        register(mesh)
        found = mesh
    elif mesh is None and not (dist.is_available() and dist.is_initialized()):
        return None
    else:
        found = process_mesh(mesh)
    found.meet_on(x.device)
    return found


def _refuse(asked: dict[str, bool], why: str) -> None:
    for name, present in asked.items():
        if present:
            raise OptionError(f"attention({name}=...) is {why}")


def _mask(given: Tensor | None) -> tuple[Mask, list[Tensor]]:
    """`attn_mask` as a term that reads one source, which has four dims and this rank's rows."""
    if given is None:
        return Mask(), []
    source = given.reshape((1,) * (4 - given.dim()) + given.shape)
    index = [
        axis(name) if size > 1 or name in "rk" else affine({}, 0)
        for name, size in zip("bhrk", source.shape, strict=True)
    ]
    term = load(0, index, given.dtype)
    return (Mask(visible=term) if given.dtype == torch.bool else Mask(bias=term)), [source]


def _sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[torch.dtype, torch.device, int, int]:
    return query.dtype, query.device, key.shape[3], value.shape[3]


def _held(
    mesh: Mesh, query: Tensor, key: Tensor, sources: list[Tensor], seed: Tensor | None, given: list[Tensor]
) -> dict[str, list[int]]:
    """What each rank has: rows of query and key, the sizes of its mask, its seed, whether it will go backward with what
    was `given`. Asked at every call, for a rank's own rows may be the same in sequences of different lengths."""
    mine = {"query": query.shape[2], "key": key.shape[2], "seed": int(seed) if seed is not None else -1}
    mine["training"] = int(torch.is_grad_enabled() and any(x.requires_grad for x in given))
    mine |= dict(zip(MASK_DIMS, sources[0].shape if sources else (-1,) * 4, strict=True))
    if mesh.size == 1:
        return {name: [count] for name, count in mine.items()}
    parts: Any = mesh.all_gather(torch.tensor(list(mine.values()), device=mesh.device), "lengths")
    held = {name: [int(count) for count in counts] for name, counts in zip(mine, torch.stack(parts).T, strict=True)}
    if len(set(held["training"])) > 1:  # a backward that some ranks never enter is a hang
        without = [rank for rank, its in enumerate(held["training"]) if not its]
        raise RingMismatchError(
            f"attention: ranks {without} need no gradient and the others do. The backward exchanges rows too, so "
            "requires_grad and no_grad have to be alike on all ranks"
        )
    return held


def _length(mesh: Mesh, layout: str, name: str, counts: list[int]) -> int:
    """Rows of the whole sequence, of which the ranks hold `counts`."""
    total = sum(counts)
    expected = [count(layout_of(layout, total, mesh.size).ranges(rank)) for rank in range(mesh.size)]
    if counts != expected:
        raise RingMismatchError(
            f"attention: the ranks hold {counts} rows of {name}, and a {layout} sequence of {total} is cut "
            f"into {expected}. Cut it with ringopt.shard, or pass the layout it was cut with"
        )
    return total


def _check_masks(query: Tensor, keys: int, held: dict[str, list[int]]) -> None:
    """Of all ranks, on every rank: none may go on alone."""
    batch, heads, *_ = query.shape
    for rank, found in enumerate(zip(*(held[name] for name in MASK_DIMS), strict=True)):
        rows = held["query"][rank]
        if found != (-1,) * 4 and (
            found[0] not in (1, batch) or found[1] not in (1, heads) or found[2:] != (rows, keys)
        ):
            raise RingMismatchError(
                f"attention: the attn_mask of rank {rank} is {list(found)}; expected [1 or {batch}, 1 or {heads}, "
                f"{rows}, {keys}], its own rows of queries and all keys. Cut it with ringopt.shard(mask, -2)"
            )
