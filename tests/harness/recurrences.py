"""Recurrences as models write them, in plain torch: a sequence of tokens in, one of outputs out.

Decays are mild: what a step forgets at once, no test of what steps hand on would see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, BATCH, HEADS, WIDTH, CHUNK = 16, 2, 3, 4, 4


@dataclass(frozen=True)
class Given:
    """Inputs of a recurrence: shapes of normal numbers."""

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, rows: int = ROWS) -> list[Tensor]:
        torch.manual_seed(0)
        sizes = [tuple(rows if size == ROWS else size for size in shape) for shape in self.shapes]
        return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


TOKENS = (BATCH, ROWS, WIDTH)
HEADED = (BATCH, HEADS, ROWS, WIDTH)
GATES = (BATCH, HEADS, ROWS)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Token by token, into a list (GLA)."""
    state, out = q.new_zeros(BATCH, WIDTH, WIDTH), []
    for t in range(q.shape[1]):
        state = state * g[:, t].sigmoid().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1)


def gated_linear_attention_filled(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, into a tensor; the last state is returned."""
    state, out = q.new_zeros(BATCH, WIDTH, WIDTH), torch.zeros_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t].sigmoid().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out[:, t] = (q[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return out, state


def gated_linear_attention_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Chunk by chunk, one decay a head and token."""
    log_decay = F.logsigmoid(g) * 0.1
    q, k, v = (x.reshape(BATCH, HEADS, -1, CHUNK, WIDTH) for x in (q, k, v))
    total = log_decay.reshape(BATCH, HEADS, -1, CHUNK).cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    state, out = q.new_zeros(BATCH, HEADS, WIDTH, WIDTH), []
    for i in range(q.shape[2]):
        q_i, k_i, v_i, a = q[:, :, i], k[:, :, i], v[:, :, i], total[:, :, i]
        decay = (a.unsqueeze(-1) - a.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
        out.append((q_i * a.exp()[..., None]) @ state + (q_i @ k_i.mT * decay) @ v_i)
        state = state * a[..., -1, None, None].exp() + (k_i * (a[..., -1:] - a).exp()[..., None]).mT @ v_i
    return torch.cat(out, 2)


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Chunk by chunk, with decays that are constants (RetNet)."""
    at = torch.arange(CHUNK, dtype=q.dtype)
    within = (0.9 ** (at[:, None] - at).clamp(min=0)).tril()
    state, out = q.new_zeros(BATCH, WIDTH, WIDTH), []
    for i in range(q.shape[1] // CHUNK):
        q_i, k_i, v_i = (x[:, i * CHUNK : (i + 1) * CHUNK] for x in (q, k, v))
        out.append((q_i @ k_i.mT * within) @ v_i + (q_i * 0.9 ** (at + 1)[:, None]) @ state)
        state = state * 0.9**CHUNK + (k_i * 0.9 ** (CHUNK - 1 - at)[:, None]).mT @ v_i
    return torch.cat(out, 1)


def hgrn(x: Tensor, f: Tensor, i: Tensor) -> Tensor:
    """h' = f h + (1 - f) tanh(i), the list begun with zeros (HGRN, minGRU)."""
    f = f.sigmoid()
    states = [torch.zeros_like(x[:, 0])]
    for t in range(x.shape[1]):
        states.append(f[:, t] * states[-1] + (1 - f[:, t]) * i[:, t].tanh())
    return torch.stack(states[1:], 1) * x.sigmoid()


def in_place(x: Tensor, f: Tensor) -> Tensor:
    """The state is what was written a row before."""
    h = torch.zeros_like(x)
    h[:, 0] = x[:, 0]
    for t in range(1, x.shape[1]):
        h[:, t] = f[:, t].sigmoid() * h[:, t - 1] + x[:, t]
    return h


def s5(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Diagonal, with constant coefficients."""
    a, state, out = decay.sigmoid(), x.new_zeros(BATCH, 6), []
    for u in x.unbind(1):
        state = a * state + u @ b
        out.append(state @ c)
    return torch.stack(out, 1)


def lru(x: Tensor, rate: Tensor, angle: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A linear recurrent unit (Orvieto et al. 2023): complex numbers, and the real part of what it reads of them."""
    turn = torch.polar(rate.sigmoid(), angle)
    state, out = torch.zeros(BATCH, 6, dtype=turn.dtype), []
    for u in x.unbind(1):
        state = turn * state + u.to(turn.dtype) @ torch.complex(b, -b)
        out.append((state @ torch.complex(c, c * 0.5)).real)
    return torch.stack(out, 1)


def trapezoids(x: Tensor, b: Tensor, c: Tensor, f: Tensor) -> Tensor:
    """What a token adds is half added by the next one (Mamba-3): it is handed on, and made anew in every step."""
    state, before, out = x.new_zeros(BATCH, WIDTH, WIDTH), x.new_zeros(BATCH, WIDTH, WIDTH), []
    for t in range(x.shape[1]):
        now = x[:, t].unsqueeze(-1) * b[:, t].unsqueeze(-2)
        state = state * f[:, t].sigmoid().unsqueeze(-1) + 0.5 * (before + now)
        before = now
        out.append((state @ c[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(out, 1)


def backwards(x: Tensor, f: Tensor) -> Tensor:
    """From the last token to the first."""
    state, out = torch.zeros_like(x[:, 0]), []
    for t in reversed(range(x.shape[1])):
        state = state * f[:, t].sigmoid() + x[:, t]
        out.append(state)
    return torch.stack(out[::-1], 1)


def begun_by_the_first(x: Tensor, f: Tensor) -> Tensor:
    """The first token is the first state."""
    state, out = None, []
    for t in range(x.shape[1]):
        state = x[:, t] if state is None else state * f[:, t].sigmoid() + x[:, t]
        out.append(state * f[:, t])
    return torch.stack(out, 1)


def mamba(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Token by token (transformers' slow path of Mamba)."""
    x, dt = x.mT, F.softplus(dt.mT - 3)
    discrete = torch.exp(-torch.exp(a)[None, :, None] * dt[..., None])  # [batch, width, rows, state]
    given = dt[..., None] * b[:, None].float().double() * x[..., None]
    state, out = torch.zeros(BATCH, WIDTH, 5, dtype=x.dtype), []
    for i in range(x.shape[2]):
        state = discrete[:, :, i, :] * state + given[:, :, i, :]
        out.append(torch.matmul(state.to(x.dtype), c[:, i, :].unsqueeze(-1))[:, :, 0])
    return torch.stack(out, dim=-1).mT


def rwkv(decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """RWKV-4 with its running maximum, as transformers writes it."""
    decay = -torch.exp(decay - 2)
    out = torch.zeros_like(key)
    num, den, most = torch.zeros_like(key[:, 0]), torch.zeros_like(key[:, 0]), torch.zeros_like(key[:, 0]) - 1e38
    for t in range(key.shape[1]):
        k, v = key[:, t], value[:, t]
        top = torch.maximum(most, k + first)
        e1, e2 = torch.exp(most - top), torch.exp(k + first - top)
        out[:, t] = (e1 * num + e2 * v) / (e1 * den + e2)
        top = torch.maximum(most + decay, k)
        e1, e2 = torch.exp(most + decay - top), torch.exp(k - top)
        num, den, most = e1 * num + e2 * v, e1 * den + e2, top
    return out


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Chunk by chunk (transformers' torch_chunk_gated_delta_rule)."""
    q, k, beta, g = F.normalize(q, dim=-1), F.normalize(k, dim=-1), beta.sigmoid(), F.logsigmoid(g + 4)
    v_beta, k_beta = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    q, k, v, k_beta, v_beta = (x.reshape(BATCH, HEADS, -1, CHUNK, x.shape[-1]) for x in (q, k, v, k_beta, v_beta))
    g = g.reshape(BATCH, HEADS, -1, CHUNK).cumsum(dim=-1)
    upper = torch.triu(torch.ones(CHUNK, CHUNK, dtype=torch.bool), diagonal=0)
    decay = ((g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp()).tril()
    attn = -((k_beta @ k.transpose(-1, -2)) * decay).masked_fill(upper, 0)
    for i in range(1, CHUNK):
        row, sub = attn[..., i, :i].clone(), attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(CHUNK, dtype=attn.dtype)
    v, decayed = attn @ v_beta, attn @ (k_beta * g.exp().unsqueeze(-1))
    state, out = torch.zeros(BATCH, HEADS, WIDTH, WIDTH, dtype=v.dtype), torch.zeros_like(v)
    hidden = torch.triu(torch.ones(CHUNK, CHUNK, dtype=torch.bool), diagonal=1)
    for i in range(out.shape[2]):
        q_i, k_i, v_i = q[:, :, i], k[:, :, i], v[:, :, i]
        within = (q_i @ k_i.transpose(-1, -2) * decay[:, :, i]).masked_fill_(hidden, 0)
        new = v_i - decayed[:, :, i] @ state
        out[:, :, i] = (q_i * g[:, :, i, :, None].exp()) @ state + within @ new
        gone = (g[:, :, i, -1, None] - g[:, :, i]).exp()[..., None]
        state = state * g[:, :, i, -1, None, None].exp() + (k_i * gone).transpose(-1, -2) @ new
    return out.reshape(BATCH, HEADS, -1, WIDTH).transpose(1, 2).contiguous(), state


def rg_lru(x: Tensor, gate: Tensor, a: Tensor) -> Tensor:
    """Token by token, with a reset where a document begins (RecurrentGemma)."""
    log_a = -0.1 * gate.sigmoid() * F.softplus(a)
    reset = (torch.arange(x.shape[1]) % 20 == 0)[None, :, None]
    recurrent = log_a.exp() * ~reset
    given = x * torch.where(reset, 1, (1 - torch.exp(2 * log_a)).sqrt())
    state, out = torch.zeros(BATCH, WIDTH, dtype=x.dtype), torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = recurrent[:, t] * state + given[:, t]
        out[:, t] = state
    return out


FEATURES = (WIDTH,)
AFFINE = {
    "GLA": Given(gated_linear_attention, (TOKENS,) * 4),
    "GLA, filled": Given(gated_linear_attention_filled, (TOKENS,) * 4),
    "GLA, chunked": Given(gated_linear_attention_chunked, (HEADED, HEADED, HEADED, GATES)),
    "RetNet": Given(retention, (TOKENS,) * 3),
    "HGRN": Given(hgrn, (TOKENS,) * 3),
    "in place": Given(in_place, (TOKENS,) * 2),
    "S5": Given(s5, (TOKENS, (6,), (WIDTH, 6), (6, WIDTH))),
    "LRU": Given(lru, (TOKENS, (6,), (6,), (WIDTH, 6), (6, WIDTH))),
    "trapezoids": Given(trapezoids, (TOKENS,) * 4),
    "backwards": Given(backwards, (TOKENS,) * 2),
    "begun by the first": Given(begun_by_the_first, (TOKENS,) * 2),
    "Mamba": Given(mamba, (TOKENS, TOKENS, (WIDTH, 5), (BATCH, ROWS, 5), (BATCH, ROWS, 5))),
    "RWKV": Given(rwkv, (FEATURES, FEATURES, TOKENS, TOKENS)),
    "GDN": Given(gated_delta, (HEADED, HEADED, HEADED, GATES, GATES)),
    "RG-LRU": Given(rg_lru, (TOKENS, TOKENS, FEATURES)),
}
