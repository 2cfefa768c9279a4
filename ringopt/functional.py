"""What the compiler inserts, for use by hand in eager code: attention over a sequence that is spread over ranks.

q, k, v = (ringopt.shard(x, dim=2) for x in (q, k, v))          # [B, H, S, D] -> [B, H, S_local, D]
out = ringopt.attention(q, k, v, is_causal=True)
out = ringopt.unshard(out, dim=2, length=S)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringopt.ops.attention
import ringopt.ops.convert  # noqa: F401  (registers the operators)
from ringopt.attention.layouts import layout_of
from ringopt.attention.rows import count
from ringopt.distributed.mesh import Mesh, register
from ringopt.distributed.process import process_mesh
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, RingMismatchError
from ringopt.ops.ring import VERSION

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
    sinks: int | None = None,
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

    `is_causal` and `window` speak of positions in the whole sequence: window=w lets query t see keys t-w+1 .. t when
    causal, else all keys s with |t - s| < w. `mesh`: the ranks that share the sequence (default: all). `strategy`: how
    rows travel, "ring" or "gather"; "auto" is "ring". `kernel`: "auto", "flash_cpu" or "math". Without a process group,
    or on a mesh of one rank, this is the single-device operator.

    Raises OptionError for what is not built; RingMismatchError where shards are not those of one sequence;
    RingCommError.
    """
    unbuilt = {
        "sinks": sinks is not None,
        "segment_lengths": segment_lengths is not None,
        "dilation_rates": dilation_rates is not None,
        "dilation_offsets": dilation_offsets != "paper",
    }
    _refuse(unbuilt, "not built yet: leave it at its default")
    _check_operands(query, key, value, enable_gqa)
    pattern = _pattern(is_causal, window)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    ranks = _mesh_of(mesh)
    if ranks is None or ranks.size == 1:
        one = torch.ops.ringopt.attention(query, key, value, attn_mask, [], pattern, "", dropout_p, scale)
        return one  # type: ignore[no-any-return]
    across = {"attn_mask": attn_mask is not None, "dropout_p": dropout_p != 0.0}
    _refuse(across, f"not built across {ranks.size} ranks: use is_causal or window, and no dropout")
    q_length, kv_length = _lengths(ranks, layout, query, key)
    out: Tensor
    out, _lse = torch.ops.ringopt.ring_attention(
        *(query, key, value, [], q_length, kv_length, pattern, "", [], scale, layout, layout),
        *("ring" if strategy == "auto" else strategy, kernel, ranks.name, VERSION),
    )
    return out


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


def _pattern(is_causal: bool, window: int | None) -> str:
    if window is not None and window < 1:
        raise OptionError(f"attention(window={window}): a query sees at least 1 key, itself")
    if window is None:
        return "causal" if is_causal else "full"
    return f"window({window})" if is_causal else f"window({window},both)"


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


def _lengths(mesh: Mesh, layout: str, query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows of the whole sequences, from what each rank holds: asked at every call, for a rank's own rows may be the
    same in sequences of different lengths."""
    mine: Any = torch.tensor([query.shape[2], key.shape[2]], device=mesh.device)
    held = torch.stack(mesh.all_gather(mine, "lengths")).tolist()
    totals = [sum(counts) for counts in zip(*held, strict=True)]
    for name, total, counts in zip(("query", "key"), totals, zip(*held, strict=True), strict=True):
        expected = [count(layout_of(layout, total, mesh.size).ranges(rank)) for rank in range(mesh.size)]
        if list(counts) != expected:
            raise RingMismatchError(
                f"attention: the ranks hold {list(counts)} rows of {name}, and a {layout} sequence of {total} is cut "
                f"into {expected}. Cut it with ringopt.shard, or pass the layout it was cut with"
            )
    return totals[0], totals[1]
