"""What the compiler inserts, for use by hand in eager code: attention over a sequence that is spread over ranks.

q, k, v = (ringopt.shard(x, dim=2) for x in (q, k, v))          # [B, H, S, D] -> [B, H, S_local, D]
out = ringopt.attention(q, k, v, is_causal=True)
out = ringopt.unshard(out, dim=2, length=S)
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringopt.ops.attention
import ringopt.ops.convert
import ringopt.ops.dilated  # noqa: F401  (registers the operators)
from ringopt.attention.choose import Case, choose
from ringopt.attention.dilation import Dilation, shared_heads
from ringopt.attention.layouts import layout_of
from ringopt.attention.predict import Heads
from ringopt.attention.rows import count
from ringopt.distributed.decide import agreed_rates
from ringopt.distributed.mesh import Mesh, mesh_of, register
from ringopt.distributed.process import process_mesh
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, RingMismatchError
from ringopt.graph.mask import Mask
from ringopt.graph.terms import affine, axis, load
from ringopt.kernels.choose import choose as choose_kernel
from ringopt.ops.dropout import SEEDS
from ringopt.ops.ring import VERSION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["attention", "record_traffic", "shard", "unshard"]

MASK_DIMS = ("mask batch", "mask heads", "mask rows", "mask keys")


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
    "ring", "ring2" (both ways round) or "ulysses"; "auto" is the one that is predicted to be fastest. `kernel`: "auto",
    or by name as in the options. Without a process group, or on a mesh of one rank, this is the single-device operator.

    `segment_lengths` (w) and `dilation_rates` (r), as many of one as of the other: dilated self-attention (Ding et al.,
    LongNet, 2023). Of each segment of w positions, head j takes every r-th one from its offset on, and these attend to
    each other; all patterns are one softmax. `dilation_offsets`: "paper" (j mod r) or "torchscale" (j // ceil(Hq / r)).
    Any lengths; a (token, head) that no pattern takes is 0, with a warning. `attn_mask` is then of keys alone, [B, 1,
    1, S] of bool, the same on all ranks; rows travel by "gather" or "ring", for each pattern as "auto" finds best.

    Raises OptionError for what is not built; RingMismatchError where shards or masks are not those of one sequence;
    RingCommError.
    """
    _check_operands(query, key, value, enable_gqa)
    if not 0.0 <= dropout_p <= 1.0:
        raise OptionError(f"attention(dropout_p={dropout_p}): a probability is from 0 to 1")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    ranks = _mesh_of(mesh)
    dilates = dilation_rates is not None and window is None
    if segment_lengths is not None or dilates or dilation_offsets != "paper":
        beside = {"window": window is not None, "sinks": isinstance(sinks, int)}
        _refuse(beside, "not possible in dilated attention of segments (segment_lengths)")
        dilation = Dilation.asked(segment_lengths, dilation_rates, is_causal, dilation_offsets)
        logits = _logits(sinks, query) if isinstance(sinks, Tensor) else None
        where = (ranks, layout, strategy, kernel)
        return _dilated(query, key, value, attn_mask, logits, dilation, dropout_p, scale, *where)
    rates = _rates(dilation_rates, query.shape[1])
    if len(set(rates)) > 1:
        how: dict[str, Any] = {"window": window, "scale": scale, "is_causal": is_causal}
        how |= {"dropout_p": dropout_p, "mesh": mesh, "layout": layout, "strategy": strategy, "kernel": kernel}
        return _by_rate(query, key, value, attn_mask, sinks, rates, how)
    first, logits = (None, _logits(sinks, query)) if isinstance(sinks, Tensor) else (sinks, None)
    what = (_pattern(is_causal, window, first, rates[0]), dropout_p, scale)
    if (ranks is None or ranks.size == 1) and window is None:
        return _alone(query, key, value, attn_mask, logits, *what)
    if ranks is None or ranks.size == 1:
        ranks, layout, strategy = mesh_of("pretend:0/1"), "contiguous", "local"
    return _spread(query, key, value, attn_mask, logits, *what, ranks, layout, strategy, kernel)


def _alone(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, pattern: str,
    dropout_p: float, scale: float,
) -> Tensor:  # fmt: skip
    out: Tensor = torch.ops.ringopt.attention(
        *(query, key, value, mask, [], sinks, _seed(query, dropout_p), pattern, "", dropout_p, scale)
    )
    return out


def _spread(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, pattern: str,
    dropout_p: float, scale: float, ranks: Mesh, layout: str, strategy: str, kernel: str,
) -> Tensor:  # fmt: skip
    """Over the rows of all `ranks`, once they have told each other what they hold."""
    seed, (mask, sources) = _seed(query, dropout_p), _mask(attn_mask)
    given = [query, key, value, *sources, *([] if sinks is None else [sinks])]
    training = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    held = _held(ranks, query, key, sources, seed, training)
    q_length, kv_length = (_length(ranks, layout, name, held[name]) for name in ("query", "key"))
    _check_masks(query, kv_length, held)
    if seed is not None:
        seed = torch.full_like(seed, held["seed"][0])
    if sinks is not None and ranks.size > 1:  # each rank finds the part of their gradient that its rows make
        sinks = torch.ops.ringopt.copy_to_group(sinks, ranks.name)
    if strategy == "auto":
        by = "math" if dropout_p > 0 else choose_kernel(kernel, *_sizes(query, key, value))[0].name
        case = Case(pattern, q_length, kv_length, Heads.of(query, key, value, by), any(held["training"]), mask.text)
        strategy = choose(case, ranks.size, layout, agreed_rates(ranks, query.device.type)).strategy
    learned = [0] if mask.differentiable and sources[0].requires_grad else []
    out: Tensor
    out, _lse = torch.ops.ringopt.ring_attention(
        *(query, key, value, sources, sinks, seed, q_length, kv_length, pattern, mask.text, learned, dropout_p, scale),
        *(layout, layout, strategy, kernel, ranks.name, VERSION),
    )
    return out


def _seed(query: Tensor, dropout_p: float) -> Tensor | None:
    return torch.randint(SEEDS, (), dtype=torch.int64, device=query.device) if dropout_p > 0 else None


def _logits(sinks: Tensor, query: Tensor) -> Tensor:
    """Of sinks, [1|B, Hq]."""
    batch, heads = query.shape[:2]
    if list(sinks.shape) not in ([heads], [1, heads], [batch, heads]) or not sinks.is_floating_point():
        raise OptionError(
            f"attention(sinks=...) takes one logit for each head, [{heads}] or [1 or {batch}, {heads}] of a floating "
            f"dtype, or how many first keys are seen beside a window; found {list(sinks.shape)} {sinks.dtype}"
        )
    return sinks.reshape(-1, heads)


def _rates(asked: Any, heads: int) -> tuple[int, ...]:
    """Of a window: one of each query head."""
    if asked is None:
        return (1,) * heads
    whole = isinstance(asked, (tuple, list)) and all(type(rate) is int and rate >= 1 for rate in asked)
    if not whole or len(asked) not in (1, heads):
        raise OptionError(
            f"attention(dilation_rates={asked!r}) beside a window: a tuple of one whole number, 1 or more, or of one "
            f"for each of {heads} query heads"
        )
    return tuple(asked) * (heads // len(asked))


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
        parts = (query[:, heads], key[:, kv_heads], value[:, kv_heads], of_heads)
        of_sinks = sinks[..., heads] if isinstance(sinks, Tensor) else sinks
        outs.append(attention(*parts, enable_gqa=True, dilation_rates=(rate,), sinks=of_sinks, **how))
    order = sorted(range(len(rates)), key=[head for heads in found.values() for head in heads].__getitem__)
    return torch.cat(outs, 1)[:, order]


def _dilated(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None, dilation: Dilation,
    dropout_p: float, scale: float, mesh: Mesh | None, layout: str, strategy: str, kernel: str,
) -> Tensor:  # fmt: skip
    mesh = mesh_of("pretend:0/1") if mesh is None else mesh
    alone, seed = mesh.size == 1, _seed(query, dropout_p)
    held = _held(mesh, query, key, [], seed, False)
    if held["query"] != held["key"]:
        raise OptionError(
            f"dilated attention is self attention; the ranks hold {held['query']} rows of query and {held['key']} of "
            "key"
        )
    length = held["query"][0] if alone else _length(mesh, layout, "query", held["query"])
    seen = _seen(attn_mask, query.shape[0], length)
    if told := dilation.told_left_out(length, query.shape[1]):
        warnings.warn(told, stacklevel=3)
    if seed is not None:
        seed = torch.full_like(seed, held["seed"][0])
    if sinks is not None and not alone:  # each rank finds the part of their gradient that its rows make
        sinks = torch.ops.ringopt.copy_to_group(sinks, mesh.name)
    where = ("contiguous" if alone else layout, strategy, kernel, mesh.name, VERSION)
    out: Tensor
    out, _lse = torch.ops.ringopt.dilated_attention(
        *(query, key, value, seen, sinks, seed, length, dilation.text, dropout_p, scale, *where)
    )
    return out


def _seen(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """A key padding mask as [1|B, 1, 1, keys]."""
    if mask is None:
        return None
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dtype != torch.bool or len(sizes) > 4 or sizes[0] not in (1, batch) or sizes[1:] != (1, 1, keys):
        raise OptionError(
            f"dilated attention takes an attn_mask of keys alone, [{batch}, 1, 1, {keys}] of bool with all keys of the "
            f"sequence (True is seen); found {list(mask.shape)} {mask.dtype}"
        )
    return mask.reshape(sizes)


def shard(x: Tensor, dim: int, *, mesh: DeviceMesh | Mesh | None = None, layout: str = "contiguous") -> Tensor:
    """This rank's rows of `x` along `dim`. `x` is whole, and the same on all ranks; so is its gradient."""
    ranks = _mesh_of(mesh)
    if ranks is None or ranks.size == 1:
        return x
    dim, length = dim % x.dim(), x.shape[dim]
    local = count(layout_of(layout, length, ranks.size).ranges(ranks.rank))
    return torch.ops.ringopt.scatter(x, dim, 1, length, 1, local, layout, ranks.name)  # type: ignore[no-any-return]


def unshard(
    x: Tensor, dim: int, *, length: int, mesh: DeviceMesh | Mesh | None = None, layout: str = "contiguous"
) -> Tensor:
    """The whole tensor, in sequence order, of which every rank passes its rows: `length` along `dim` in all.

    What is computed from it has to be the same on all ranks, as is the gradient that comes back: each rank takes its
    rows.
    """
    ranks = _mesh_of(mesh)
    if ranks is None or ranks.size == 1:
        return x
    dim = dim % x.dim()
    expected = count(layout_of(layout, length, ranks.size).ranges(ranks.rank))
    if x.shape[dim] != expected:
        raise RingMismatchError(
            f"unshard: dim {dim} has {x.shape[dim]} rows, and rank {ranks.rank} of {ranks.size} holds {expected} rows "
            f"of a {layout} sequence of {length}"
        )
    return torch.ops.ringopt.gather(x, dim, 1, length, 1, layout, ranks.name)  # type: ignore[no-any-return]


def _mesh_of(mesh: DeviceMesh | Mesh | None) -> Mesh | None:
    if isinstance(mesh, Mesh):
        register(mesh)
        return mesh
    if mesh is None and not (dist.is_available() and dist.is_initialized()):
        return None
    return process_mesh(mesh)


def _pattern(is_causal: bool, window: int | None, sinks: int | None, rate: int) -> str:
    if window is not None and window < 1:
        raise OptionError(f"attention(window={window}): a query sees at least 1 key, itself")
    if sinks is not None and (window is None or sinks < 0):
        raise OptionError(f"attention(sinks={sinks}): how many first keys are seen beside a window; window={window}")
    if window is None:
        return "causal" if is_causal else "full"
    more = ((not is_causal, "both"), (sinks, f"sinks={sinks}"), (rate > 1, f"rate={rate}"))
    return f"window({','.join([str(window), *(said for given, said in more if given)])})"


def _check_operands(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise OptionError(f"attention takes [B, H, S, D] tensors; found {shapes}")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise OptionError(f"{query.shape[1]} query heads over {key.shape[1]} KV heads need enable_gqa=True")


def _refuse(asked: dict[str, bool], why: str) -> None:
    for name, present in asked.items():
        if present:
            raise OptionError(f"attention({name}=...) is {why}")


def _mask(given: Tensor | None) -> tuple[Mask, list[Tensor]]:
    """`attn_mask` as a term that reads one source, which has four dims and this rank's rows."""
    if given is None:
        return Mask(), []
    if not 2 <= given.dim() <= 4:
        raise OptionError(f"attention takes an attn_mask of 2 to 4 dims; found {list(given.shape)}")
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
    mesh: Mesh, query: Tensor, key: Tensor, sources: list[Tensor], seed: Tensor | None, training: bool
) -> dict[str, list[int]]:
    """What each rank has: rows of query and key, the sizes of its mask, its seed, whether it will go backward. Asked at
    every call, for a rank's own rows may be the same in sequences of different lengths."""
    mine = {"query": query.shape[2], "key": key.shape[2], "seed": int(seed) if seed is not None else -1}
    mine["training"] = int(training)
    mine |= dict(zip(MASK_DIMS, sources[0].shape if sources else (-1,) * 4, strict=True))
    if mesh.size == 1:
        return {name: [count] for name, count in mine.items()}
    parts: Any = mesh.all_gather(torch.tensor(list(mine.values()), device=mesh.device), "lengths")
    return {name: [int(count) for count in counts] for name, counts in zip(mine, torch.stack(parts).T, strict=True)}


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
