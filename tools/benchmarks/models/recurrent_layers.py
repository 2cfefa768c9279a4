"""Layers whose tokens meet in a state: a gated delta net in the chunked form of Qwen3-Next, and Mamba2 as in its paper.

Each is written as models write it in plain torch: a Python loop over chunks, and sums over pairs of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.torch_compat.dynamo import SCAN

DIM, TAPS = 64, 4  # numbers of a head, of which there are as many as the width of the layer has room for
STATE = 64  # of Mamba2: numbers for each channel
CHUNK = 64


class CausalConvolution(nn.Module):
    """Each channel [B, S, C] by itself, over this token and those before it."""

    def __init__(self, channels: int):
        super().__init__()
        self.filter = nn.Conv1d(channels, channels, TAPS, groups=channels, padding=TAPS - 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.filter(x.mT)[..., : x.shape[1]]).mT


# How the loop over chunks is spelled: its results written into one made before, or stacked; or torch's scan, of which
# Dynamo traces one step, whatever the length.
Loop = Literal["written", "stacked", "scan"]


class GatedDeltaNet(nn.Module):
    """[B, S, width] -> the same."""

    def __init__(self, heads: int, loop: Loop = "written"):
        super().__init__()
        self.loop: Loop = loop
        width = heads * DIM
        self.heads, self.near = heads, CausalConvolution(3 * width)
        self.project, self.gates = nn.Linear(width, 4 * width), nn.Linear(width, 2 * heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv, gate = self.project(x).split([3 * x.shape[-1], x.shape[-1]], -1)
        q, k, v = (part.unflatten(-1, (self.heads, DIM)).transpose(1, 2) for part in self.near(qkv).chunk(3, -1))
        beta, decay = self.gates(x).transpose(1, 2).chunk(2, 1)
        q, k, decay = F.normalize(q, dim=-1), F.normalize(k, dim=-1), mild(decay)
        heads = gated_delta_rule(q, k, v, decay, beta.sigmoid(), self.loop)
        mixed: Tensor = self.out(heads.transpose(1, 2).flatten(2) * F.silu(gate))
        return mixed


def mild(decay: Tensor) -> Tensor:
    """The logarithm of a decay, of which a good deal is left after a chunk: as layers that remember are trained."""
    return -0.01 * F.softplus(decay)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, loop: Loop = "written") -> Tensor:
    """Of heads [B, H, S, D], `decay` and `beta` [B, H, S]."""
    length, short = q.shape[2], -q.shape[2] % CHUNK
    q, k, v, grown = (F.pad(x, (0, 0, 0, short)) for x in (q * DIM**-0.5, k, v * beta[..., None], k * beta[..., None]))
    q, k, v, grown = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, grown))
    total = F.pad(decay, (0, short)).unflatten(2, (-1, CHUNK)).cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, -torch.inf).exp()
    system, near = (grown @ k.mT) * between, (q @ k.mT) * between
    news = torch.linalg.solve_triangular(system, v, upper=False, unitriangular=True)
    olds = torch.linalg.solve_triangular(system, grown * total.exp()[..., None], upper=False, unitriangular=True)
    q, k = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    left = total[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], DIM, DIM)
    chunks = [q, k, near, left, news, olds]
    if loop == "written":
        out = torch.zeros_like(v)
        for i in range(q.shape[2]):
            rows = (q[:, :, i], k[:, :, i], near[:, :, i], left[:, :, i], news[:, :, i], olds[:, :, i])
            state, out[:, :, i] = delta_step(state, rows)
    elif loop == "stacked":
        parts = list[Tensor]()
        for rows in zip(*(x.unbind(2) for x in chunks), strict=True):
            state, part = delta_step(state, rows)
            parts.append(part)
        out = torch.stack(parts, 2)
    else:
        _, out = SCAN(delta_step, state, [x.movedim(2, 0) for x in chunks])
        out = out.movedim(0, 2)
    return out.flatten(2, 3)[:, :, :length]


def delta_step(state: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The state behind a chunk, and what the chunk gives."""
    q, k, near, left, new, old = rows
    new = new - old @ state
    return state * left + k.mT @ new, q @ state + near @ new


class Mamba2(nn.Module):
    """[B, S, width] -> the same. `contract` is torch.einsum, or `multiplied`."""

    def __init__(self, heads: int, contract: Callable[..., Tensor] = torch.einsum):
        super().__init__()
        self.contract, width = contract, heads * DIM
        self.heads, self.near = heads, CausalConvolution(width + 2 * STATE)
        self.project, self.out = nn.Linear(width, 2 * width + 2 * STATE + heads), nn.Linear(width, width)
        self.decay, self.skip = nn.Parameter(torch.linspace(0.1, 0.5, heads)), nn.Parameter(torch.ones(heads, 1))

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        gate, states, step = self.project(x).split([width, width + 2 * STATE, self.heads], -1)
        value, key, query = self.near(states).split([width, STATE, STATE], -1)
        value, step = value.unflatten(-1, (self.heads, DIM)), 0.1 * F.softplus(step)
        heads = state_space(value * step[..., None], -self.decay * step, key, query, self.contract) + self.skip * value
        mixed: Tensor = self.out(heads.flatten(2) * F.silu(gate))
        return mixed


def state_space(
    value: Tensor, decay: Tensor, key: Tensor, query: Tensor, contract: Callable[..., Tensor] = torch.einsum
) -> Tensor:
    """As the paper has it: values [B, S, H, D], decays [B, S, H], keys and queries [B, S, N]; S is whole chunks."""
    value, decay, key, query = (x.unflatten(1, (-1, CHUNK)) for x in (value, decay, key, query))
    decay = decay.permute(0, 3, 1, 2)
    total = decay.cumsum(-1)
    near = contract("bcln,bcsn,bhcls,bcshp->bclhp", query, key, segment_sums(decay).exp(), value)
    states = contract("bcln,bhcl,bclhp->bchpn", key, (total[..., -1:] - total).exp(), value)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    between = segment_sums(F.pad(total[..., -1], (1, 0))).exp()
    before = contract("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    far = contract("bcln,bchpn,bhcl->bclhp", query, before, total.exp())
    return (near + far).flatten(1, 2)


def multiplied(equation: str, *operands: Tensor) -> Tensor:
    """An einsum, one operand after the other multiplied and summed: as transformers 4 has it."""
    inputs, out = equation.split("->")
    (text, *texts), (product, *others) = inputs.split(","), operands
    for place, (other, of) in enumerate(zip(others, texts, strict=True)):
        asked, every = set(out).union(*texts[place + 1 :]), [*dict.fromkeys(text + of)]
        product = unsqueezed(product, text, every) * unsqueezed(other, of, every)
        gone = [dim for dim, letter in enumerate(every) if letter not in asked]
        text = "".join(letter for letter in every if letter in asked)
        product = product.sum(gone) if gone else product
    return product.permute([text.index(letter) for letter in out])


def unsqueezed(x: Tensor, letters: str, every: Sequence[str]) -> Tensor:
    """`x` with a dim of size 1 for each letter that it lacks."""
    x = x.permute([letters.index(letter) for letter in every if letter in letters])
    for dim, letter in enumerate(every):
        x = x if letter in letters else x.unsqueeze(dim)
    return x


def segment_sums(x: Tensor) -> Tensor:
    """[..., i, j]: the sum of x from behind j to i; -inf where j is behind i."""
    total = x.cumsum(-1)
    pairs = total[..., :, None] - total[..., None, :]
    return pairs.masked_fill(torch.ones(pairs.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -torch.inf)


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "gated delta net": GatedDeltaNet,
    "mamba2": Mamba2,
    "mamba2, multiplied": partial(Mamba2, contract=multiplied),
}


def layer_of(name: str, heads: int, loop: Loop = "written") -> nn.Module:
    """With weights that follow from its name."""
    torch.manual_seed(0)
    return GatedDeltaNet(heads, loop) if LAYERS[name] is GatedDeltaNet else LAYERS[name](heads)


def map_sizes(name: str, heads: int) -> tuple[int, int]:
    """Numbers of the map of a segment: those of its matrix (of Mamba2 one a head), and of the state."""
    return (heads, heads * DIM * STATE) if name.startswith("mamba2") else (heads * DIM * DIM, heads * DIM * DIM)
