"""Whole lines of generated programs: layouts, changes of length, attention, losses, what is returned."""

from __future__ import annotations

from tests.generated.ops import HEAD, HEADS, WIDTH, WORDS, Piece

#: into another layout, and back
LAYOUTS: dict[str, tuple[str, str]] = {
    "as it is": ("x", "t"),
    "time first": ("x.transpose(0, 1)", "t.transpose(0, 1)"),
    "channels first": ("x.mT", "t.mT"),
    "channels first, in memory": ("x.transpose(1, 2).contiguous()", "t.permute(0, 2, 1)"),
    "time last": ("x.permute(0, 2, 1)", "t.movedim(-1, 1)"),
    "all folded": ("x.reshape(-1, {D})", "t.view({B}, {S}, {D})"),
    "flat": ("x.flatten()", "t.view({B}, {S}, {D})"),
    "time first, folded": ("x.transpose(0, 1).reshape(-1, {D})", "t.view({S}, {B}, {D}).transpose(0, 1)"),
    "heads": ("x.view({B}, {S}, 2, -1).transpose(1, 2)", "t.transpose(1, 2).flatten(2)"),
    "heads behind": ("x.unflatten(-1, (2, -1))", "t.flatten(2)"),
    "heads folded": (
        "x.view({B}, {S}, 2, -1).transpose(1, 2).flatten(0, 1)",
        "t.view({B}, 2, {S}, -1).transpose(1, 2).flatten(2)",
    ),
    "one sample": ("x[0]", "torch.cat([t[None], x[1:]])"),
    "a new dim": ("x[:, None]", "t[:, 0]"),
    "a new dim inside": ("x.unsqueeze(2)", "t.squeeze(2)"),
    "expanded": ("x[:, :, None].expand(-1, -1, 3, -1)", "t.mean(2)"),
    "windows": ("x.view({B}, {w}, -1, {D})", "t.reshape({B}, {S}, {D})"),
    "strided windows": ("x.view({B}, -1, {w}, {D}).transpose(1, 2)", "t.transpose(1, 2).reshape({B}, {S}, {D})"),
    "windows into the batch": ("x.view({B} * {w}, -1, {D})", "t.view({B}, {S}, {D})"),
    "pairs of rows": ("x.reshape({B}, {S} // {w}, {w} * {D})", "t.reshape({B}, {S}, {D})"),
    "batch last": ("x.permute(1, 2, 0)", "t.permute(2, 0, 1)"),
}

#: lines that may change how long the sequence is
LENGTHS: dict[str, Piece] = {
    "slice": lambda d: f"x = x[:, {d.part(1)}]",
    "drop the first": lambda d: "x = x[:, 1:]",
    "drop the last": lambda d: "x = x[:, :-1]",
    "strided": lambda d: f"x = x[:, {d.below(2)}::{d.one(2, 3)}]",
    "narrow": lambda d: f"x = x.narrow(1, {d.below(3)}, {d.shape[1] - 3})",
    "padded": lambda d: f"x = F.pad(x, (0, 0, {d.below(3)}, {d.below(3)}), value={d.one(0.0, 0.5)})",
    "padded by itself": lambda d: (
        f"x = F.pad(x.mT, ({d.below(3)}, {d.below(3)}), {d.one('circular', 'reflect', 'replicate')!r}).mT"
    ),
    "a class token": lambda d: f"x = torch.cat([p(1, 1, {WIDTH}).expand({d.shape[0]}, -1, -1), x], 1)",
    "registers": lambda d: f"x = torch.cat([x, p(3, {WIDTH}).expand({d.shape[0]}, 3, {WIDTH})], 1)",
    "twice": lambda d: "x = torch.cat([x, x.sin()], 1)",
    "earlier beside": lambda d: "x = torch.cat([kept[0], x], dim=1)",
    "diff": lambda d: f"x = x.diff(n={d.one(1, 2)}, dim={d.one(1, -2)})",
    "convolution": lambda d: (
        f"x = F.conv1d(x.mT, p({WIDTH}, {WIDTH}, {d.one(1, 2, 3, 4)}), {d.one('None', f'p({WIDTH})')}, "
        f"stride={d.one(1, 1, 2)}, padding={d.one(0, 1, 3)}, dilation={d.one(1, 1, 2)}).mT"
    ),
    "convolution, same": lambda d: f"x = F.conv1d(x.mT, p({WIDTH}, {WIDTH}, {d.one(2, 3, 4, 5)}), padding='same').mT",
    "causal convolution": lambda d: (
        f"x = F.silu(F.conv1d(x.mT, p({WIDTH}, 1, 4), padding=3, groups={WIDTH})[..., :x.shape[1]].mT)"
    ),
    "convolution over channels": lambda d: f"x = F.conv1d(x, p({d.shape[1]}, {d.shape[1]}, 3), padding=1)",
    "picture": lambda d: "x = F.conv2d(x[:, None], p(1, 1, 3, 3), padding=1)[:, 0]",
    "transposed convolution": lambda d: f"x = F.conv_transpose1d(x.mT, p({WIDTH}, {WIDTH}, 2), stride=2).mT",
    "average pooling": lambda d: (
        f"x = F.avg_pool1d(x.mT, {d.one(2, 3)}, {d.one(1, 2)}, {d.one(0, 1)}, {d.one(False, True)}).mT"
    ),
    "max pooling": lambda d: f"x = F.max_pool1d(x.mT, {d.one(2, 3)}, {d.one(1, 2)}, {d.one(0, 1)}).mT",
    "largest of a picture": lambda d: (
        f"x = F.max_pool2d(x[:, None], (3, 1), {d.one(1, (2, 1))}, (1, 0), ceil_mode={d.one(False, True)})[:, 0]"
    ),
    "average of a picture": lambda d: f"x = F.avg_pool2d(x[:, None], 3, 1, 1, False, {d.one(False, True)})[:, 0]",
    "a grid convolved": lambda d: (
        f"x = F.conv2d(x[:, :{d.shape[1] // 2 * 2}].mT.unflatten(2, (-1, 2)), p({WIDTH}, {WIDTH}, 3, 3), padding=1)"
        ".flatten(2).mT"
    ),
    "windows unfolded": lambda d: (
        f"x = F.unfold(x.mT[..., None], (3, 1), padding=(1, 0)).view({d.shape[0]}, {WIDTH}, 3, -1).mean(2).mT"
    ),
    "adaptive pooling": lambda d: f"x = F.adaptive_avg_pool1d(x.mT, {max(1, d.shape[1] // d.one(1, 2, 3))}).mT",
    "twice as tall": lambda d: "x = F.interpolate(x[:, None], scale_factor=(2.0, 1.0))[:, 0]",
    "interpolated": lambda d: f"x = F.interpolate(x.mT, scale_factor=2, mode={d.one('nearest', 'linear')!r}).mT",
    "repeated": lambda d: "x = x.repeat(1, 2, 1)",
    "interleaved": lambda d: "x = x.repeat_interleave(2, 1)",
    "unfolded": lambda d: f"x = x.unfold(1, {d.one(2, 3)}, {d.one(1, 2)}).mean(-1)",
    "split": lambda d: f"x = x.split(({(a := 1 + d.below(d.shape[1] - 1))}, {d.shape[1] - a}), 1)[{d.below(2)}]",
    "chunk": lambda d: f"x = x.chunk(2, 1)[{d.below(2)}]",
    "kept by number": lambda d: (
        f"x = x.gather(1, x.sum(-1).argsort(1)[:, :{d.shape[1] // d.one(1, 2)}, None].expand(-1, -1, {WIDTH}))"
    ),
    "picked": lambda d: f"x = x[:, {d.index(1)}]",
    "every second by mask": lambda d: f"x = x[:, torch.arange({d.shape[1]}) % 2 == 0]",
    "top rows": lambda d: f"x = x.topk({max(1, d.shape[1] // 2)}, 1).values",
    "pairs merged": lambda d: (
        f"x = F.linear(x[:, :{d.shape[1] // 2 * 2}].reshape({d.shape[0]}, -1, {2 * WIDTH}), p({WIDTH}, {2 * WIDTH}))"
    ),
}

PROJECTED = f"q, k, v = heads(F.linear(x, p({3 * WIDTH}, {WIDTH})), 3)"
SAME = "q, k, v = heads(x, 1) * 3"

#: the first nine are drawn more often than the others
ATTENTIONS: dict[str, Piece] = {
    "plain": lambda d: f"{PROJECTED}; x = x + merge(sdpa(q, k, v))",
    "causal": lambda d: f"{PROJECTED}; x = x + merge(sdpa(q, k, v, is_causal=True))",
    "shared": lambda d: "h, = heads(x, 1); x = merge(sdpa(h, h, h, is_causal=True)) + 0.5 * x",
    "window": lambda d: (
        f"{PROJECTED}; i = torch.arange(x.shape[1]); seen = (i <= i[:, None]) & (i > i[:, None] - 4); "
        "x = x + merge(sdpa(q, k, v, seen))"
    ),
    "documents": lambda d: (
        f"{PROJECTED}; i = (torch.arange(x.shape[1]) % 5 == 0).cumsum(0); x = x + merge(sdpa(q, k, v, i[:, None] == i))"
    ),
    "bias": lambda d: (
        f"{PROJECTED}; i = torch.arange(x.shape[1]); "
        f"x = x + merge(sdpa(q, k, v, p(7, {HEADS})[(i - i[:, None]).clamp(-3, 3) + 3].permute(2, 0, 1)))"
    ),
    "padding": lambda d: (
        f"{PROJECTED}; seen = (torch.arange(x.shape[1]) < x.shape[1] - 2)[None, None, None]; "
        "x = x + merge(sdpa(q, k, v, seen))"
    ),
    "grouped": lambda d: (
        f"{PROJECTED}; x = x + merge(sdpa(torch.cat([q, q.sin()], 1), k, v, enable_gqa=True))[..., ::2]"
    ),
    "cross": lambda d: (
        f"q, = heads(x, 1); k, v = heads(F.linear(kept[0], p({2 * WIDTH}, {WIDTH})), 2); x = x + merge(sdpa(q, k, v))"
    ),
    "prefix": lambda d: (
        f"{SAME}; e = p(1, {HEADS}, 2, {HEAD}).expand(x.shape[0], -1, -1, -1); "
        "x = x + merge(sdpa(q, torch.cat([e, k], 2), torch.cat([e, v], 2)))"
    ),
    "last query": lambda d: f"{SAME}; x = x + merge(sdpa(q[:, :, -1:], k, v))",
    "pooled keys": lambda d: (
        "(q,), (k,) = heads(x, 1), heads(F.avg_pool1d(x.mT, 2).mT, 1); x = x + merge(sdpa(q, k, k))"
    ),
    "latents": lambda d: (
        f"(q,), (k,) = heads(p(1, 3, {WIDTH}).expand(x.shape[0], -1, -1), 1), heads(x, 1); "
        "x = x + merge(sdpa(q, k, k)).mean(1, True)"
    ),
    "time first": lambda d: (
        f"y = x.transpose(0, 1); s, b, w = y.shape; q = F.linear(y, p({WIDTH}, {WIDTH})).view(s, b * {HEADS}, {HEAD}); "
        "q = q.transpose(0, 1); x = x + sdpa(q, q, q).transpose(0, 1).reshape(s, b, w).transpose(0, 1)"
    ),
    "windows": lambda d: (
        "y, = heads(x.view(x.shape[0] * 2, -1, x.shape[2]), 1); x = x + merge(sdpa(y, y, y)).view(x.shape)"
    ),
    "over the batch": lambda d: "y, = heads(x.transpose(0, 1), 1); x = x + merge(sdpa(y, y, y)).transpose(0, 1)",
    "over heads": lambda d: "y = heads(x, 1)[0].transpose(1, 2); x = x + sdpa(y, y, y).reshape(x.shape)",
    "unfused": lambda d: f"{PROJECTED}; x = x + merge((q @ k.mT / 2).softmax(-1) @ v)",
    "unfused by einsum": lambda d: (
        f"{SAME}; w = torch.einsum('bhqd,bhkd->bhqk', q, k).softmax(-1); "
        "x = x + merge(torch.einsum('bhqk,bhkd->bhqd', w, v))"
    ),
    "unfused, masked": lambda d: (
        f"{SAME}; n = x.shape[1]; hidden = torch.ones(n, n).triu(1).bool(); "
        "x = x + merge((q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v)"
    ),
    "over queries": lambda d: f"{SAME}; x = x + merge((q @ k.mT / 2).softmax(-2) @ v)",
    "linear attention": lambda d: f"{SAME}; x = x + merge(q.softmax(-1) @ (k.softmax(-2).mT @ v))",
    "channels": lambda d: f"{SAME}; x = x + merge(((q.mT @ k).softmax(-1) @ v.mT).mT)",
}

#: what is made of the last activations; `wanted` are labels [B, S] in [0, 7), of which some are -100, `hot` chances
LOSSES: dict[str, Piece] = {
    "cross entropy": lambda d: (
        f"F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction='{d.one('mean', 'sum')}')"
    ),
    "weights": lambda d: (
        f"F.cross_entropy(logits.view(-1, {WORDS}), wanted.view(-1), torch.arange(1.0, {WORDS} + 1).double())"
    ),
    "smoothing": lambda d: f"F.cross_entropy(logits.mT, wanted, label_smoothing={d.one(0.1, 0.3)})",
    "none": lambda d: "F.cross_entropy(logits.mT, wanted, reduction='none').square().sum(1).mean()",
    "another ignored": lambda d: f"F.cross_entropy(logits.view(-1, {WORDS}), wanted.clamp(0).view(-1), ignore_index=1)",
    "shift by slice": lambda d: f"F.cross_entropy(logits[:, :-1].reshape(-1, {WORDS}), wanted[:, 1:].reshape(-1))",
    "shift by pad": lambda d: (
        f"F.cross_entropy(logits.view(-1, {WORDS}), F.pad(wanted, (0, 1), value=-100)[:, 1:].reshape(-1))"
    ),
    "chances": lambda d: (
        f"F.cross_entropy(logits.view(-1, {WORDS}), hot.view(-1, {WORDS}), reduction='{d.one('mean', 'sum')}')"
    ),
    "chances, classes second": lambda d: "F.cross_entropy(logits.mT, hot.mT)",
    "likelihood": lambda d: "F.nll_loss(logits.log_softmax(-1).mT, wanted)",
    "kept by number": lambda d: (
        f"x = x.gather(1, x.sum(-1).argsort(1)[:, :{d.shape[1] // d.one(1, 2)}, None].expand(-1, -1, {WIDTH}))"
    ),
    "picked": lambda d: (
        "-(logits.log_softmax(-1).gather(-1, wanted.clamp(0)[..., None])[..., 0] * (wanted >= 0)).sum() "
        "/ (wanted >= 0).sum()"
    ),
    "by sample": lambda d: (
        "(F.cross_entropy(logits.mT, wanted, reduction='none').sum(1) / (wanted >= 0).sum(1)).mean()"
    ),
    "masked rows": lambda d: "F.cross_entropy(logits[:, ::2].flatten(0, 1), wanted[:, ::2].clamp(0).flatten())",
    "last row": lambda d: "F.cross_entropy(logits[:, -1], wanted[:, -1].clamp(0))",
    "pooled": lambda d: "F.cross_entropy(logits.mean(1), wanted[:, 0].clamp(0))",
    "mse": lambda d: f"F.mse_loss(logits, hot, reduction='{d.one('mean', 'sum')}')",
    "mse, masked": lambda d: (
        "(F.mse_loss(logits, hot, reduction='none') * (wanted >= 0)[..., None]).sum() / (wanted >= 0).sum()"
    ),
    "smooth l1": lambda d: "F.smooth_l1_loss(logits, hot)",
    "bce": lambda d: (
        "F.binary_cross_entropy_with_logits(logits[..., 0], (wanted > 2).double(), pos_weight=torch.tensor(2))"
    ),
    "kl": lambda d: f"F.kl_div(logits.log_softmax(-1), hot, reduction='{d.one('batchmean', 'sum', 'mean')}')",
    "cosine": lambda d: "1 - F.cosine_similarity(logits, hot, -1).mean()",
    "z": lambda d: "logits.logsumexp(-1).square().mean()",
    "square": lambda d: "logits.square().mean()",
    "variation": lambda d: "(logits[:, 1:] - logits[:, :-1]).abs().mean()",
    "contrast": lambda d: (
        "(lambda u: F.cross_entropy(u @ u.T * 5, torch.arange(u.shape[0])))(F.normalize(logits.mean(1), dim=-1))"
    ),
    "router": lambda d: (
        f"(logits.softmax(-1).mean((0, 1)) * F.one_hot(logits.argmax(-1), {WORDS}).double().mean((0, 1))).sum()"
    ),
    "margin": lambda d: f"F.multi_margin_loss(logits.view(-1, {WORDS}), wanted.clamp(0).view(-1))",
    "variance": lambda d: "logits.var()",
    "right ones": lambda d: "(logits.square().mean(-1) * (logits.argmax(-1) == wanted)).mean()",
}

#: what is returned
RETURNS = (
    "loss,",
    "loss, logits",
    "x,",
    "loss, x[:, 0], x.mean(1)",
    "logits[:, -1], loss",
    "x.mT, loss",
    "x.sum(), x.flatten(), loss",
    "x.argmax(1), loss",
    "loss, x[0], x > 0",
)
