"""Recurrences as programs write them: loops that are one node, and look-alikes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def tokens(x: Tensor, w: Tensor) -> Tensor:
    """A gated sum, token by token."""
    a = torch.sigmoid(x @ w)
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h * a[:, t] + x[:, t]
        out[:, t] = h
    return out.tanh() @ w


def chunks(x: Tensor, w: Tensor, size: int = 4) -> Tensor:
    """Linear attention with decay, chunk by chunk."""
    b, n, d = x.shape
    padded = F.pad(x, (0, 0, 0, -n % size))
    q, k, v = (each.reshape(b, -1, size, d) for each in (padded @ w, padded, padded * 0.5))
    g = torch.sigmoid(k.mean(-1)).cumsum(-1).neg()
    state, out = x.new_zeros(b, d, d), torch.zeros_like(v)
    for i in range(padded.shape[1] // size):
        q_i, k_i, v_i = q[:, i], k[:, i], v[:, i]
        decay = g[:, i, :, None].exp()
        out[:, i] = (q_i * decay) @ state + (q_i @ k_i.transpose(-1, -2)).tril() @ v_i
        state = state * g[:, i, -1, None, None].exp() + k_i.transpose(-1, -2) @ v_i
    return out.reshape(b, -1, d)[:, :n] @ w


def appended(x: Tensor, w: Tensor) -> Tensor:
    """Its rows stand in a list, as in the loops of Mamba without its kernels."""
    a = torch.sigmoid(x @ w)
    h, rows = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h * a[:, t] + x[:, t]
        rows.append((h * x[0, t]).cumsum(-1))
    whole = torch.stack(rows, dim=-1).view(x.shape[0], -1)  # which is laid out as a stack is
    return whole.view(x.shape[0], -1, x.shape[1]).transpose(1, 2).tanh() @ w


def slices(x: Tensor, w: Tensor, size: int = 4) -> Tensor:
    """Chunks are slices, of which the last is not padded, and are joined along the sequence, as in MiniMax."""
    n, rows = x.shape[1], []
    q, k = x @ w, x * 0.5
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
    for i in range((n + size - 1) // size):
        start = i * size
        end = min(start + size, n)
        many = end - start
        q_i, k_i = q[:, start:end], k[:, start:end]
        rows.append(q_i @ state + (q_i @ k_i.transpose(-1, -2)).tril() @ k_i[:, :many])
        state = state * 0.9**many + k_i.transpose(-1, -2) @ k_i
    return torch.cat(rows, dim=1) @ w


def steps(x: Tensor, w: Tensor, size: int = 4) -> Tensor:
    """The range goes by chunks, and rows are written."""
    n, padded = x.shape[1], F.pad(x, (0, 0, 0, -x.shape[1] % size))
    q, state, out = padded @ w, x.new_zeros(x.shape[0], x.shape[2], x.shape[2]), torch.zeros_like(padded)
    for start in range(0, padded.shape[1], size):
        q_i, k_i = q[:, start : start + size], padded[:, start : start + size]
        out[:, start : start + size] = q_i @ state
        state = state * 0.9 + k_i.transpose(-1, -2) @ k_i
    return out[:, :n] @ w


def begins_later(x: Tensor, w: Tensor) -> Tensor:
    """The first row stands in the list before the loop."""
    h = x[:, 0]
    rows = [h]
    for t in range(1, x.shape[1]):
        h = h * 0.5 + x[:, t] - 0.1 * x[:, t - 1]
        rows += [h]
    return torch.stack(rows, 1) @ w


def by_rows(x: Tensor, w: Tensor) -> Tensor:
    """A gated sum over the rows of two tensors."""
    a = torch.sigmoid(x @ w)
    h, rows = torch.zeros_like(x[:, 0]), []
    for x_t, a_t in zip(x.unbind(1), torch.unbind(a, dim=-2)):  # noqa: B905
        h = h * a_t + x_t
        rows.append(h)
    return torch.stack(rows, 1) @ w


def by_numbered_rows(x: Tensor, w: Tensor) -> Tensor:
    """The number of a row is one of the program."""
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t, (x_t, y_t) in enumerate(zip(x.unbind(1), x.unbind(-2))):  # noqa: B905
        h = h * 0.5 + x_t * y_t
        out[:, t] = h
    return out @ w


def by_slices(x: Tensor, w: Tensor, size: int = 4) -> Tensor:
    """Chunks of tensors that are split."""
    q, rows = x @ w, []
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[2])
    for q_i, k_i in zip(q.split(size, 1), x.split(size, dim=1)):  # noqa: B905
        rows.append(q_i @ state + (q_i @ k_i.transpose(-1, -2)).tril() @ k_i)
        state = state * 0.9 + k_i.transpose(-1, -2) @ k_i
    return torch.cat(rows, dim=1) @ w


def over_other_numbers(x: Tensor, w: Tensor) -> Tensor:
    """One tensor has a row less."""
    h, rows, later = torch.zeros_like(x[:, 0]), [], x[:, 1:]
    for x_t, y_t in zip(x.unbind(1), later.unbind(1)):  # noqa: B905
        h = h * 0.5 + x_t * y_t
        rows.append(h)
    return torch.stack(rows, 1) @ w


def row_behind(x: Tensor, w: Tensor) -> Tensor:
    """The last row is read behind the loop."""
    h = torch.zeros_like(x[:, 0])
    for x_t in x.unbind(1):
        h = h * 0.5 + x_t
    return (x + h[:, None] + x_t[:, None]) @ w


def number_behind(x: Tensor, w: Tensor) -> Tensor:
    """So is the number of it, and the name had another before."""
    h, t = torch.zeros_like(x[:, 0]), 100
    for t, x_t in enumerate(x.unbind(1)):  # noqa: B007
        h = h * 0.5 + x_t
    return (x + h[:, None]) @ w * t


def another_since(x: Tensor, w: Tensor) -> Tensor:
    """The name of the tensor stands for another one in the second turn; its rows are those of the first."""
    h, y = torch.zeros_like(x[:, 0]), x * 2
    for y_t in y.unbind(1):
        h = h * 0.5 + y_t
        y = y + h[:, None]
    return (y + h[:, None]) @ w


def last_row(x: Tensor, w: Tensor) -> Tensor:
    """A row is read by itself."""
    h, rows = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t]
        rows.append(h)
    return torch.stack(rows, 1) @ w + rows[-1][:, None]


def through_another_name(x: Tensor, w: Tensor) -> Tensor:
    """A turn reads the row that the turn before has appended."""
    h = torch.zeros_like(x[:, 0])
    rows = [h]
    kept = [rows]
    for t in range(x.shape[1]):
        h = h * 0.1 + kept[0][-1] * 0.5 + x[:, t]
        rows.append(h)
    return torch.stack(rows, 1)[:, 1:] @ w


def in_a_deque(x: Tensor, w: Tensor) -> Tensor:
    """It keeps the last two."""
    h, rows = torch.zeros_like(x[:, 0]), deque(maxlen=2)  # type: ignore[var-annotated]
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t]
        rows.append(h)
    return x @ w + torch.stack(list(rows), 1).sum(1, keepdim=True)


def written_since(x: Tensor, w: Tensor) -> Tensor:
    """The last row is written before rows are joined."""
    h, rows = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t]
        rows.append(h)
    h.mul_(2.0)
    return torch.stack(rows, 1) @ w


def last_state(x: Tensor, w: Tensor) -> Tensor:
    """Nothing is written: only the last state is read."""
    h = x.new_zeros(x.shape[0], 1, x.shape[2])
    y = x @ w
    for t in range(x.shape[-2]):
        h = 0.9 * h + y[..., t, :].unsqueeze(1) + x[:, t : t + 1]
    return h + y.mean(1, keepdim=True)


def grows_at_first(x: Tensor, w: Tensor) -> Tensor:
    """What is carried is a number before the first turn, and has a batch behind it."""
    h: Any = 0.0
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    return out @ w


def partly_seen(x: Tensor, w: Tensor) -> Tensor:
    """A part of each turn has no gradient."""
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        with torch.no_grad():
            scale = x[:, t].mean()
        h = h * 0.5 + x[:, t] * scale
        out[:, t] = h
    return out @ w


def exchange(x: Tensor, w: Tensor) -> Tensor:
    """Two states that read each other: ranks share them by the columns, at a length that is known."""
    a, b, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        a, b = a * 0.5 + b * 0.1 + x[:, t], b * 0.9 + a * 0.1
        out[:, t] = a + b
    return out @ w


def twice(x: Tensor, w: Tensor) -> Tensor:
    return tokens(chunks(x, w), w)


def some_rows(x: Tensor, w: Tensor) -> Tensor:
    """The last two rows are neither read nor written."""
    h, out = torch.zeros_like(x[:, 0]), torch.ones_like(x)
    for t in range(x.shape[1] - 2):
        h = h * 0.5 + x[:, t]
        out[:, t] = h
    return out @ w


def in_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(tokens, x, w, use_reentrant=False)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A module is called in each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()
        torch.nn.init.uniform_(self.inner.weight, -0.2, 0.2)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = self.inner(h) + x[:, t]
            out[:, t] = h
        return out @ w


def saturates(x: Tensor, w: Tensor) -> Tensor:
    """An RNN: no step is affine in what it carries."""
    h, out = torch.zeros_like(x[0, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(h @ w + x[:, t].mean(0))
        out[:, t] = h.expand(x.shape[0], -1)
    return out @ w


def sums(x: Tensor, w: Tensor) -> Tensor:
    """What is added up in any order, as over experts."""
    out = x @ w
    for k in range(x.shape[-1]):
        out = out + x[..., k].unsqueeze(-1) * w[k]
    return out


def through_an_alias(x: Tensor, w: Tensor) -> Tensor:
    """A turn reads the row that the turn before has written, by another name."""
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    seen = out.view(x.shape)
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t] + seen.sum(1)
        out[:, t] = h
    return out @ w


def through_a_list(x: Tensor, w: Tensor) -> Tensor:
    """The same, in a list."""
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    kept = [out]
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t] + kept[0].sum(1)
        out[:, t] = h
    return out @ w


def in_place(x: Tensor, w: Tensor) -> Tensor:
    """What is carried is written, which another name sees."""
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    begun = h
    for t in range(x.shape[1]):
        h *= 0.5
        h += x[:, t]
        out[:, t] = h
    return (out + begun[:, None]) @ w


def broadcasts(x: Tensor, w: Tensor) -> Tensor:
    """A row is written for the whole batch."""
    h, out = torch.zeros_like(x[0, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t].sum(0)
        out[:, t] = h
    return out @ w


def counted(x: Tensor, w: Tensor) -> Tensor:
    """What Python keeps is another after each turn."""
    h, out, done = torch.zeros_like(x[:, 0]), torch.zeros_like(x), [0]
    for t in range(x.shape[1]):
        h = h * 0.5 + x[:, t]
        out[:, t] = h
        done[0] += 1
    return (out * done[0]) @ w
