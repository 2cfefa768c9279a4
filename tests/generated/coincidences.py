"""Programs at random whose sizes coincide: batch, length, heads, width are often one number, or 1.

def program(given, ids, p):
    # x is [8, 8, 8]
    B, n, W = x.shape; H = W // 4; x = x.transpose(0, 1)
    B, n, W = x.shape; H = W // 4; x = x + p(n, n) @ x

Who tells a dim by its size, or the sequence by its length, is wrong here. Many of these lines mean another dim than
models do, and are valid only because sizes coincide.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.generated.drawing import INVALID, NAMES, Parameters, Program, heads
from tests.generated.ops import WIDTH, WORDS
from tests.generated.parts import RETURNS

#: masks and biases of attention
MASKS = (
    "(ids > 1)[:, None, None, :n] | (torch.arange(n) == 0)", "(ids > 1)[:, None, :n] | (torch.arange(n) == 0)",
    "(ids > 1)[:, :n] | (torch.arange(n) == 0)", "(ids > 1)[:, None, :n, None] | (torch.arange(n) == 0)",
    "p(H, n, n)", "p(n, n)", "p(n, 1)", "p(n)", "p(B, 1, 1, n)", "p(H, 1, 1) * torch.arange(n)",
    "x.mean(2)[:, None, None]", "x.mean(2)[:, None, :, None]",
)  # fmt: skip

#: what attention is, and is not, in place of it
MIXED = (
    "sdpa(q, k, v)", "sdpa(q, k, v, is_causal=True)", "(q @ k.mT / 2).softmax(-1) @ v",
    "(q @ k.mT / 2).softmax(-2) @ v", "(q @ k.mT / 2).softmax(1) @ v", "(q @ k.mT / 2).softmax(-1).mT @ v",
    "((q.mT @ k).softmax(-1) @ v.mT).mT", "(q @ k.mT + x.mean(2)).softmax(-1) @ v",
    "(q @ k.mT * p(n)).softmax(-1) @ v", "(q @ k.mT * p(n, 1)).softmax(-1) @ v",
    "((q @ k.mT).softmax(-1) * p(n)) @ v", "((q @ k.mT).softmax(-1) * p(n, 1)) @ v",
    "((q @ k.mT).softmax(-1) * p(H, 1, 1)) @ v",
    "(q @ k.mT).masked_fill(torch.ones(n, n).triu(1).bool().mT, -1e9).softmax(-1) @ v",
    "(q @ k.mT).tril().softmax(-1) @ v", "(q @ k.mT).softmax(-1).tril() @ v",
    "torch.einsum('bhqk,bhkd->bhqd', torch.einsum('bhqd,bhkd->bhqk', q, k).softmax(-1), v)",
    "torch.einsum('bhqk,bhqd->bhkd', torch.einsum('bhqd,bhkd->bhqk', q, k).softmax(-1), v)",
    "torch.einsum('bhqk,bhkd->bhqd', torch.einsum('bhqd,bhkd->bhqk', q, k).softmax(-2), v)",
    "sdpa(q[:, :, :1], k, v)", "sdpa(q.flip(2), k, v, is_causal=True)", "sdpa(q, k.roll(1, 2), v)",
)  # fmt: skip

#: other lines that attend
OTHERS = (
    "q, k, v = (t.transpose(1, 2) for t in projected(x, p)); x = x + sdpa(q, k, v).flatten(2)",
    "q, k, v = projected(x.transpose(0, 1), p); x = x + merge(sdpa(q, k, v)).transpose(0, 1)",
    "q, k, v = projected(x, p); x = x + merge(sdpa(q, k, v, attn_mask=x @ x.mT)) if B == 1 or B == H else x",
    "q, k, v = projected(x, p); w = (q @ k.mT).softmax(-1); "
    "x = x + merge(F.linear(w.permute(0, 2, 3, 1), p(H, H)).permute(0, 3, 1, 2) @ v)",
    "x = x + (x @ x.mT).softmax(-1) @ x", "x = x + (x @ x.mT).softmax(-2) @ x", "x = x + (x @ x.mT).softmax(0) @ x",
    "x = x + (x.mT @ x).softmax(-1).mT.sum(1)[:, None]", "x = x + x @ (x.mT @ x).softmax(-1)",
    "q, k, v = x.view(B, H, n, -1), x.reshape(B, n, H, -1).transpose(1, 2), heads(x, 1)[0]; "
    "x = x + merge(sdpa(q, k, v))",
    "q, k, v = projected(x, p); c = p(n, 4); "
    "q, k = (torch.cat([-t[..., 1::2], t[..., ::2]], -1) * c.cos() + t for t in (q, k)); "
    "x = x + merge(sdpa(q, k, v, is_causal=True))",
    "q, k, v = projected(x, p); e = heads(p(1, n, W), 1)[0].expand(B, H, n, -1); "
    "x = x + merge(sdpa(q, torch.cat([e, k], 2), torch.cat([e, v], 2)))",
    "q, = heads(x, 1); e = heads(p(B, n, W), 1)[0]; x = x + merge(sdpa(q, e, e))",
    "q, = heads(x, 1); e = heads(p(1, W, W), 1)[0]; x = x + merge(sdpa(q, e, e))",
    "q, = heads(p(B, n, W), 1); e = heads(x, 1)[0]; x = x + merge(sdpa(q, e, e))",
    "y = F.linear(x, p(n, W)); x = x + y.softmax(-1) @ p(n, W)",
    "y = F.linear(x, p(n, W)); x = x + y.softmax(-1) @ x", "y = F.linear(x, p(n, W)); x = x + y.softmax(1).mT @ x",
    "y = F.linear(x, p(n, W)); x = x + y.softmax(-2) @ x",
)  # fmt: skip

#: lines that may take a dim for another
STEPS = (
    "x = x.mT", "x = x.transpose(0, 1)", "x = x.permute(2, 1, 0)", "x = x.permute(1, 2, 0)", "x = x.mT.contiguous()",
    "x = x.transpose(0, 1).contiguous()", "x = x.reshape(B, W, n).mT", "x = x.reshape(n, B, W).transpose(0, 1)",
    "x = x.mT.reshape(B, n, W)", "x = x.transpose(0, 1).reshape(B, n, W)",
    "x = x.reshape(B, n, H, -1).transpose(1, 2).reshape(B, n, W)",
    "x = x.reshape(B, n, H, -1).transpose(2, 3).reshape(B, n, W)",
    "x = x.reshape(B, n, H, -1).transpose(1, 3).reshape(B, n, W)",
    "x = x.reshape(B * n, W).view(n, B, W).transpose(0, 1)", "x = x + p(n, n) @ x", "x = x @ p(W, W)",
    "x = x + p(B, n, n) @ x", "x = x + torch.einsum('bnd,nm->bmd', x, p(n, n))",
    "x = x + torch.einsum('bnd,mn->bmd', x, p(n, n))", "x = x + torch.einsum('bnd,bc->cnd', x, p(B, B))",
    "x = x + torch.einsum('bnd,dbn->bnd', x, x.permute(2, 0, 1))", "x = torch.einsum('bnd,bmd->bnm', x, x) @ x",
    "x = x @ torch.einsum('bnd,bne->bde', x, x) / 9", "x = x + torch.einsum('bnd,cnd->bc', x, x).mean()",
    "x = x + torch.einsum('bnd,cmd->bnd', x, x) / n", "x = x + torch.einsum('nbd,bnd->bnd', x, x) if n == B else x",
    "x = x + x[:, 0] if B in (1, n) else x", "x = x + x.mean(1) if B in (1, n) else x",
    "x = x * x.mean(2) if n == W and B in (1, n) else x", "x = x + x.mean(0)", "x = x + x.mean(0, True)",
    "x = x + x[0]", "x = x + x[-1:].mT if n == W else x", "x = x + p(n, 1)", "x = x + p(n, W)", "x = x * p(W)",
    "x = x * p(B, 1, 1)", "x = x + p(B, n, 1) * p(B, 1, W)", "x = x + p(W, n).T", "x = x + p(W, W)[:n]",
    "x = x + p(W, W)[:, :n].T", "x = x + p(32, W)[torch.arange(n)]", "x = x - x.mean(1, True)",
    "x = x - x.amax(0, True)", "x = x.softmax(0)", "x = x.softmax(1) * n", "x = x.softmax(2)", "x = x.cumsum(0) / B",
    "x = x.cumsum(1) / n", "x = x.cumsum(2) / W", "x = F.layer_norm(x, (n, W))", "x = F.layer_norm(x, (W,), p(W))",
    "x = F.layer_norm(x.mT, (n,), p(n)).mT", "x = F.layer_norm(x.transpose(0, 1), (B, W)).transpose(0, 1)",
    "x = F.layer_norm(x, (B, n, W))", "x = F.group_norm(x, 1)", "x = F.group_norm(x.mT, 2).mT",
    "x = F.instance_norm(x)", "x = F.instance_norm(x.mT).mT", "x = F.rms_norm(x, (n, W))",
    "x = F.normalize(x, dim=1)", "x = F.normalize(x, dim=0)",
    "x = x + x[torch.arange(B), torch.arange(B) % n][:, None]", "x = x + x[torch.arange(B)[:, None], ids[:, :n] % n]",
    "x = x + F.embedding(ids[:, :n] % n, x[0])", "x = x + F.embedding(ids[:, :n] % n, p(n, W))",
    "x = x + x[0][torch.arange(n).flip(0)]", "x = x[:, ids[0, :n] % n]", "x = x[ids[:, 0] % B]",
    "x = x.gather(1, (ids[:, :n, None] % n).expand(B, n, W))",
    "x = x.gather(2, (ids[:, :n, None] % W).expand(B, n, W))",
    "x = x.gather(0, (ids[:, :n, None] % B).expand(B, n, W))", "x = x.index_select(1, torch.arange(n - 1, -1, -1))",
    "x = x.take_along_dim(x.argsort(1), 1)", "x = x.take_along_dim(x.argsort(2), 2)",
    "x = x + F.linear(F.linear(x, x[0]), x[0].T) / n", "x = x + F.linear(x, p(n, W)) @ p(n, W)",
    "x = x + F.linear(F.linear(x.mT, p(W, n)), p(n, W)).mT", "x = F.linear(x, p(W, W), p(W))",
    "x = x + F.linear(x, p(n, W)).mT @ p(n, W) if n == W else x", "x = x + F.bilinear(x, x, p(W, W, W))",
    "x = x + x.diagonal(0, 1, 2).mean()", "x = x + x.diagonal(0, 0, 1).mT[:1, None].mean(-1, True)", "x = x.tril()",
    "x = x.triu(1)", "x = x + x.diagonal(0, 1, 2)[:, None] if n >= W else x",
    "x = x + torch.diag_embed(x.mean(2))[:, :, :W] if n >= W else x", "x = x + torch.eye(n, W)",
    "x = torch.where(torch.eye(n, W).bool(), x, x.flip(1))", "x = F.conv1d(x, p(n, n, 3), padding=1)",
    "x = F.conv1d(x.mT, p(W, W, 3), padding=1).mT", "x = F.conv2d(x[None], p(B, B, 3, 3), padding=1)[0]",
    "x = F.conv1d(x, p(n, 1, 3), padding=1, groups=n)", "x = F.conv1d(x.mT, p(W, 1, 3), padding=1, groups=W).mT",
    "x = x.sort(1).values", "x = x.sort(0).values", "x = x.topk(n, 1).values", "x = x.topk(W, 2).values",
    "x = x.flip(0)", "x = x.flip(1)", "x = x.flip(2)", "x = x.roll(1, 0)", "x = x.roll(1, 1)", "x = x.roll(1, 2)",
    "x = x.roll(1)", "x = x.rot90(2, (1, 2))", "x = x.rot90(1, (1, 2)) if n == W else x",
    "x = x.rot90(1, (0, 1)) if n == B else x", "x = torch.stack([x, x.sin()], 1).flatten(0, 1)[::2]",
    "x = torch.stack([x, x.sin()], 1).mean(1)", "x = torch.stack([x, x.sin()], 2).flatten(1, 2)[:, ::2]",
    "x = torch.stack([x, x.sin()], 3).flatten(2)[..., :W]", "x = torch.cat([x, x.cos()], 0)[1:B + 1]",
    "x = torch.cat([x, x.cos()], 0).view(2, B, n, W).mean(0)",
    "x = torch.cat([x, x.cos()], 0).view(B, 2, n, W)[:, 1]", "x = torch.cat([x, x.cos()], 1).view(B, 2, n, W).sum(1)",
    "x = torch.cat([x, x.cos()], 1).view(B, n, 2, W).sum(2)",
    "x = torch.cat([x, x.cos()], 2).view(B, n, 2, W).sum(2)",
    "x = torch.cat([x, x.cos()], 2).view(B, n, W, 2).sum(3)", "x = x[:, None].expand(B, n, n, W).mean(1)",
    "x = x[:, None].expand(B, n, n, W).mean(2)", "x = (x[:, None] * x[:, :, None]).mean(1)",
    "x = (x[:, None] * x[:, :, None]).mean(2)", "x = (x[:, None] - x[:, :, None]).abs().sum(-1) @ x",
    "x = x[None].expand(B, B, n, W).mean(1)", "x = x[None].expand(n, B, n, W).mean(2).transpose(0, 1)",
    "x = x[..., None].expand(B, n, W, n).mean(1).mT", "x = x[..., None].expand(B, n, W, W).mean(2)",
    "x = x.repeat(1, 2, 1)[:, :n]", "x = x.repeat(2, 1, 1)[::2]", "x = x.repeat_interleave(2, 1)[:, n:]",
    "x = x.repeat_interleave(2, 0)[B:]", "x = x.tile(1, 1, 2)[..., W:]", "x = x * (x > 0).any(1, True)",
    "x = x + (x > 0).sum(1, True)", "x = x + x.argmax(1, True)", "x = x + x.argmax(2, True)",
    "x = x + x.flatten().sum()", "x = x + x.flatten(1).mean(1)[:, None, None]", "x = x + x.flatten(0, 1).mean(0)",
    "x = x + x.flatten(0, 1).view(B, n, W).mean(1, True)", "x = x + x.flatten(0, 1).view(n, B, W).mean(0)[:, None]",
    "x = x + x.flatten(1).view(B, W, n).mean(2)[:, None]", "x = x + x.flatten(1).view(B, W, n).mean(1)[..., None]",
    "x = x + x.flatten(1)[:, :W, None].mean(1, True)", "x = x + x.var(1, keepdim=True)",
    "x = x + x.norm(dim=(1, 2), keepdim=True)", "x = x + x.logsumexp((0, 1), True)",
    "x = torch.zeros_like(x).index_add(1, ids[0, :n] % n, x)",
    "x = torch.zeros_like(x).index_add(0, ids[:, 0] % B, x)", "x = x.index_copy(1, torch.arange(n).flip(0), x)",
    "x = x.scatter(1, (ids[:, :n, None] % n).expand(B, n, W).sort(1).values * 0 + torch.arange(n)[:, None], x)",
    "x = x.scatter_add(1, (ids[:, :n, None] % n).expand(B, n, W), x)", "x = put(x, 1, 0, 0.5)",
    "x = put(x, 0, 0, 0.5)", "x = put(x, 2, 0, 0.5)", "x = add_to(x, 1, slice(1, None))",
    "y = x * 1; y[torch.arange(min(B, n)), torch.arange(min(B, n))] += 1; x = y",
    "y = x * 1; y[:, torch.arange(min(n, W)), torch.arange(min(n, W))] = 0.5; x = y",
    "y = x * 1; y[:, 0] = x[:, -1]; x = y", "y = x * 1; y[:, :, 0] = x.mean(2); x = y",
    "y = x * 1; y[0] = x[-1]; x = y", "x = x[:, 1:]", "x = x[:, ::2]", "x = x[:, -1:]", "x = x[:, :B]",
    "x = x[:, :W]", "x = x[:, :H]", "x = x.narrow(1, 0, 1)", "x = torch.cat([x, x], 1)",
    "x = torch.cat([p(1, 1, W).expand(B, 1, W), x], 1)", "x = torch.cat([x, x[:, :1]], 1)",
    "x = F.pad(x, (0, 0, 1, 0))", "x = F.pad(x, (0, 0, 0, -n % 3))", "x = F.avg_pool1d(x.mT, 2, 1, 1).mT",
    "x = x.unfold(1, 2, 1).mean(-1)", "x = x.mean(1, True)", "x = F.linear(x.mT, p(W, n)).mT",
    "x = F.linear(x.mT, p(n + 1, n)).mT", "x = p(B, n + 1, n) @ x",
    "x = x.view(B, n, 2, -1).transpose(1, 2).flatten(1, 2).view(B, 2 * n, -1).repeat(1, 1, 2)",
    "x = x.view(B, n * 2, -1).repeat(1, 1, 2)", "x = x.reshape(B, n // 2, 2, W).mean(2)",
    "x = x.reshape(B, 2, n // 2, W).mean(1)", "x = x.view(-1, n, W)[:B].mean(1, True)",
    "x = x + kept[0].mean(1, True)", "x = x + kept[0] if kept[0].shape == x.shape else x",
    "x = x @ kept[0].mT @ kept[0] / 9 if kept[0].shape[0] == B else x", "x = torch.cat([kept[0], x], 1)",
    "q, = heads(x, 1); e, = heads(kept[0], 1); x = x + merge(sdpa(q, e, e))", "x = kept[0] * 1",
    "x = x + (kept[0].mT @ kept[0]).mean(0)", "x = F.gelu(x)", "x = x + torch.arange(n).to(x)[:, None].cos()",
    "x = x * torch.arange(W).to(x).cos()", "x = x * torch.arange(B).to(x)[:, None, None].cos()",
    "x = x + torch.linspace(0, 1, n).to(x)[:, None]", "x = x.masked_fill((ids[:, :n] == 0)[..., None], 0.1)",
    "x = x * (torch.arange(n)[:, None] >= torch.arange(W))",
    "x = x * (torch.arange(B)[:, None] >= torch.arange(n))[..., None]",
)  # fmt: skip

SIZES = (1, 1, 2, 2, 3, 4, 4, 5, 7, 8, 8, 16)
LONGEST = 24

LOSSES = (
    "logits.square().mean()", "F.cross_entropy(logits.flatten(0, 1), wanted.flatten())",
    "F.cross_entropy(logits.mT, wanted)", "logits.softmax(1).square().sum()", "logits[:, -1].logsumexp(-1).sum()",
    "(logits @ logits.mT).log_softmax(-1).diagonal(0, 1, 2).mean()", "F.mse_loss(logits, hot)",
    "F.cross_entropy((logits @ logits.mT).flatten(0, 1), torch.arange(logits.shape[1]).repeat(logits.shape[0]))",
)  # fmt: skip

RETURNED = (
    *RETURNS, "loss, x.transpose(0, 1)", "loss, x.permute(2, 0, 1)", "loss, x.reshape(x.shape[1], -1)", "x.mean(0),",
)  # fmt: skip


def projected(x: Tensor, p: Parameters) -> tuple[Tensor, ...]:
    """Queries, keys and values."""
    width = x.shape[-1]
    return heads(F.linear(x, p(3 * width, width)), 3)


@dataclass(frozen=True)
class Coincidence(Program):
    """Of any width that heads of four divide."""

    width: int = WIDTH

    @property
    def names(self) -> dict[str, Any]:
        return {**NAMES, "projected": projected}

    def before(self, line: str) -> str:
        return f"B, n, W = x.shape; H = W // 4; {line}"


def attention(chosen: random.Random) -> str:
    kind = chosen.randrange(len(MASKS) + len(MIXED) + len(OTHERS))
    if kind < len(OTHERS):
        return OTHERS[kind]
    mixed = (*MIXED, *(f"sdpa(q, k, v, attn_mask={mask})" for mask in MASKS))[kind - len(OTHERS)]
    return f"q, k, v = projected(x, p); x = x + merge({mixed})"


def draw(seed: int, most: int) -> Coincidence:
    """A program of at most so many steps beside its attentions, of lines that eager takes."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width, length, batch = chosen.choice((4, 8, 8, 16)), chosen.choice(SIZES), chosen.choice(SIZES)
    length = width if chosen.random() < 0.35 else length
    batch = chosen.choice((length, width, width // 4)) if chosen.random() < 0.35 else batch
    x = torch.randn(batch, length, width, dtype=torch.float64, generator=generator)
    program = Coincidence((), (chosen.choice(LOSSES), chosen.choice(RETURNED)), batch, length, width)
    ids = torch.randint(0, WORDS, (batch, length), generator=generator)
    names = {**program.names, "p": Parameters([], generator), "x": x, "kept": [x], "ids": ids}
    kinds = ["step"] * chosen.randint(1, most) + ["attention"] * chosen.randint(1, 2)
    chosen.shuffle(kinds)
    lines: list[str] = []
    for kind in kinds:
        for _ in range(20):
            line = attention(chosen) if kind == "attention" else chosen.choice(STEPS)
            after = ran(program.before(line), names)
            if after is not None:
                names = after
                lines.append(line)
                break
    return replace(program, lines=tuple(lines))


def ran(line: str, names: dict[str, Any]) -> dict[str, Any] | None:
    """What there is behind it; None where it cannot stand there, or leaves activations that are of no use."""
    after = dict(names)
    try:
        with torch.no_grad():
            exec(line, after)
    except INVALID:
        return None
    x, (batch, _, width) = after["x"], names["x"].shape
    if x.dim() != 3 or (x.shape[0], x.shape[2]) != (batch, width) or not 1 <= x.shape[1] <= LONGEST:
        return None
    return after if x.dtype == torch.float64 and x.isfinite().all() and x.abs().max() < 1e3 else None
