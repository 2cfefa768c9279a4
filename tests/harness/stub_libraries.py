"""Stand-ins for libraries of Triton and CUDA kernels, which no CPU runs: modules with the same functions, of the same
signatures, hidden from Dynamo as theirs are, that compute token by token in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def steps(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, scale: float | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S = decay S + k (v - k S) beta where there is a beta, else + k v; o = scale q S. B T H D, decay [B, T, H, K or 1]
    as its logarithm. Heads of q and k are shared by several of v."""
    heads = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    start = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=wide)
    now, out, like = (start if state is None else state), [], q.dtype
    q, k, v = (x.to(wide) for x in (q, k, v))
    for t in range(q.shape[1]):
        now = now if decay is None else now * decay[:, t].to(wide).exp()[..., None]
        value = v[:, t] if beta is None else (v[:, t] - (k[:, t, :, None] @ now)[:, :, 0]) * beta[:, t, :, None]
        now = now + k[:, t, :, :, None] * value[:, :, None]
        out.append((q[:, t, :, None] @ now)[:, :, 0] * (scale or k.shape[-1] ** -0.5))
    return torch.stack(out, 1).to(like), now.clone()


def seen(*tensors: Tensor | None) -> None:
    """A kernel is launched on memory."""
    if any(isinstance(x, torch._subclasses.FakeTensor) for x in tensors):
        raise AssertionError("a kernel was launched on a fake tensor")


def in_documents(cu_seqlens: Tensor | None, state: Tensor | None, call: Callable[..., Any], *xs: Any) -> Any:
    """The call, on each packed sequence by itself."""
    if cu_seqlens is None:
        return call(*xs, state)
    ends, found = cu_seqlens.tolist(), []
    for at, (first, last) in enumerate(pairwise(ends)):
        parts = [x if x is None else x[:, first:last] for x in xs]
        found.append(call(*parts, None if state is None else state[at : at + 1]))
    outs, states = zip(*found, strict=True)
    return torch.cat(outs, 1), torch.cat(states)


@torch.compiler.disable
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None, cp_context: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    seen(q, k, v)
    if use_qk_l2norm_in_kernel:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    if use_gate_in_kernel:
        g = -A_log.flatten().exp() * F.softplus(g + dt_bias)
    call = lambda q, k, v, g, beta, state: steps(q, k, v, g[..., None], beta, scale, state)  # noqa: E731
    out, last = in_documents(cu_seqlens, initial_state, call, q, k, v, g, beta)
    return out, last if output_final_state else None


@torch.compiler.disable
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    seen(q, k, v)
    if use_qk_l2norm_in_kernel:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    call = lambda q, k, v, g, beta, state: steps(q, k, v, g, beta, scale, state)  # noqa: E731
    out, last = in_documents(cu_seqlens, initial_state, call, q, k, v, g, beta)
    return out, last if output_final_state else None


@torch.compiler.disable
def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    seen(q, k, v)
    call = lambda q, k, v, beta, state: steps(q, k, v, None, beta, scale, state)  # noqa: E731
    out, last = in_documents(cu_seqlens, initial_state, call, q, k, v, beta)
    return out, last if output_final_state else None


@torch.compiler.disable
def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    seen(q, k, v)
    state = initial_state.mT if state_v_first and initial_state is not None else initial_state
    call = lambda q, k, v, g, state: steps(q, k, v, g, None, scale, state)  # noqa: E731
    out, last = in_documents(cu_seqlens, state, call, q, k, v, g)
    return out, (last.mT if state_v_first else last) if output_final_state else None


@torch.compiler.disable
def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    seen(q, k, v)
    decay = g_gamma.expand(v.shape[:3]) if g is None and g_gamma is not None else g
    call = lambda q, k, v, g, state: steps(q, k, v, None if g is None else g[..., None], None, scale, state)  # noqa: E731
    out, last = in_documents(cu_seqlens, initial_state, call, q, k, v, decay)
    return out, last if output_final_state else None


@torch.compiler.disable
def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    return_varlen_states: bool = False, state_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    seen(x, dt, B)
    assert isinstance(dt_limit, tuple)
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    if seq_idx is not None:  # a sequence begins without the state before it; that before all is of sequence 0
        same = (seq_idx == F.pad(seq_idx, (1, -1)))[..., None]
    state = None if initial_states is None else initial_states.mT
    decay = A * dt if seq_idx is None else torch.where(same, A * dt, -torch.inf)
    out, last = steps(c, b, x * dt[..., None], decay[..., None], None, 1.0, state)
    out = out if D is None else out + x * (D if D.dim() == 2 else D[:, None])
    out = (out if z is None else out * F.silu(z)).to(x.dtype)
    return (out, last.mT.contiguous()) if return_final_states else out


@torch.compiler.disable
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, activation: str = "silu",
    rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6, outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None, headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """In another way than ringopt spells it: by loops over groups and taps."""
    heads = D.shape[0]
    dim, channels = heads * int(headdim or D.shape[1]), conv1d_weight.shape[0]
    z, xbc, dt = zxbcdt[..., :dim], zxbcdt[..., dim : dim + channels], zxbcdt[..., dim + channels :]
    xbc = causal_conv1d_fn(xbc.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, (b, c) = xbc[..., :dim].unflatten(-1, (heads, -1)), xbc[..., dim:].unflatten(-1, (2, ngroups, -1)).unbind(2)
    gate = z.unflatten(-1, (heads, -1)) if rmsnorm_weight is None else None
    out = mamba_chunk_scan_combined(
        x, dt, A, b, c, chunk_size, D, gate, dt_bias, initial_states, seq_idx, dt_softplus=True, dt_limit=dt_limit
    ).flatten(-2)
    if rmsnorm_weight is not None:
        out = out if norm_before_gate else out * F.silu(z)
        normed = [part / (part.square().mean(-1, keepdim=True) + rmsnorm_eps).sqrt() for part in out.chunk(ngroups, -1)]
        out = torch.cat(normed, -1) * rmsnorm_weight
        out = out * F.silu(z) if norm_before_gate else out
    return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)


@torch.compiler.disable
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:  # fmt: skip
    seen(x)
    taps, out = weight.shape[1], []
    for t in range(x.shape[2]):
        found = x.new_zeros(x.shape[:2]) if bias is None else bias.expand(x.shape[:2])
        for back in range(min(taps, t + 1)):
            mine = 1 if seq_idx is None else (seq_idx[:, t - back] == seq_idx[:, t])[:, None]
            found = found + x[:, :, t - back] * mine * weight[:, taps - 1 - back]
        out.append(found)
    made = torch.stack(out, 2)
    made = F.silu(made) if activation else made
    return (made, x[..., 1 - taps :]) if return_final_states else made


def package(name: str, **functions: Any) -> None:
    """The module with these functions, and those above it."""
    above, path = None, ""
    for part in name.split("."):
        path = f"{path}.{part}".lstrip(".")
        module = sys.modules.setdefault(path, ModuleType(path))
        if above is not None:
            setattr(above, part, module)
        above = module
    vars(above).update(functions)


@contextmanager
def libraries() -> Iterator[None]:
    """Within it they can be imported."""
    before = dict(sys.modules)
    fla = (chunk_gated_delta_rule, chunk_kda, chunk_delta_rule, chunk_gla, chunk_simple_gla)
    for function in fla:
        package(f"fla.ops.{function.__name__.removeprefix('chunk_')}", **{function.__name__: function})
    mamba = {each.__name__: each for each in (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined)}
    package("mamba_ssm.ops.triton.ssd_combined", **mamba)
    package("causal_conv1d", causal_conv1d_fn=causal_conv1d_fn)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.partition(".")[0] in ("fla", "mamba_ssm", "causal_conv1d"):
                del sys.modules[name]
