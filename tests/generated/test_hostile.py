"""Programs that somebody who means harm would write: odd ops, odd shapes, sequences folded, cut, and met by themselves.

Each line stands between two attentions; `h` of the first is at hand.
"""

from __future__ import annotations

import pytest
import torch

from tests.generated.drawing import Program
from tests.generated.test_programs import verdict

ATTENTION = "h, = heads(x, 1); x = x + merge(sdpa(h, h, h, is_causal=True))"
CASES = [(2, "contiguous"), (3, "zigzag"), (3, "contiguous"), (2, "zigzag")]

#: computed on shards from end to end
EXACT = {
    "scan over unbind": (
        "s, out = 0, []\nfor row in x.unbind(1):\n    s = 0.5 * s + row; out.append(s)\nx = torch.stack(out, 1)"
    ),
    "segment sums": (
        "n = x.shape[1]; s = F.linear(x, p(1, 8))[..., 0].cumsum(1); "
        "d = (s[:, :, None] - s[:, None]).masked_fill(torch.ones(n, n).triu(1).bool(), float('-inf')).exp(); "
        "x = x + d @ x / n"
    ),
    "index_add by bucket": (
        "i = torch.arange(x.shape[1]) // 3; s = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype).index_add(1, i, x); "
        "x = x + s[:, i]"
    ),
    "dot of rows": "x = x + torch.dot(x[0, :, 0], x[0, :, 1])",
    "mv along the sequence": "x = x + torch.mv(x[0].T, x[0, :, 0])",
    "vecdot": "x = x + torch.linalg.vecdot(x, x.sin(), dim=1)[:, None]",
    "time first scan": (
        "y = x.transpose(0, 1); s = torch.zeros_like(y[0]); "
        "out = []\nfor i in range(y.shape[0]):\n    s = 0.9 * s + y[i]; "
        "out.append(s)\nx = torch.stack(out).transpose(0, 1)"
    ),
    "state space by cumsum of logs": (
        "a = F.logsigmoid(F.linear(x, p(8, 8))); c = a.cumsum(1); x = (x * (-c).exp()).cumsum(1) * c.exp()"
    ),
    "chunked scan": (
        "b, n, w = x.shape; y = F.pad(x, (0, 0, 0, -n % 4)).view(b, -1, 4, w); c = y.cumsum(2); "
        "c = c + F.pad(c[:, :-1, -1:].cumsum(1), (0, 0, 0, 0, 1, 0)); x = c.flatten(1, 2)[:, :n]"
    ),
    "einops (b s) d and back in halves": (
        "b, n, w = x.shape; x = x.reshape(b * n, 2, w // 2).permute(1, 0, 2).reshape(2, b, n, w // 2).permute(1, "
        "2, 0, 3).reshape(b, n, w)"
    ),
    "two sequences": (
        "y = F.linear(x[:, :5], p(8, 8)); q, = heads(x, 1); k, = heads(y, 1); x = x + merge(sdpa(q, k, k)); "
        "y = y + merge(sdpa(k, q, q)); x = torch.cat([x, y], 1)"
    ),
    "joint stream": (
        "y = p(2, 5, 8).expand(2, -1, -1)[:x.shape[0]]; z = torch.cat([y, x], 1); h, = heads(z, 1); "
        "z = merge(sdpa(h, h, h)); y, x = z[:, :5], z[:, 5:]; x = x + y.mean(1, True)"
    ),
    "conv stem": (
        "x = F.gelu(F.conv1d(F.gelu(F.conv1d(x.mT, p(8, 8, 3), padding=1)), p(8, 8, 3), stride=2, padding=1)).mT"
    ),
    "window partition with shift": (
        "b, n, w = x.shape; y = x.roll(-2, 1).view(b * 4, n // 4, w); h, = heads(y, 1); "
        "x = x + merge(sdpa(h, h, h)).view(b, n, w).roll(2, 1)"
    ),
    "relative buckets": (
        "n = x.shape[1]; d = torch.arange(n) - torch.arange(n)[:, None]; "
        "d = torch.where(d.abs() < 3, d.abs(), (3 + (d.abs().clamp(1).double() / 3).log() * "
        "2).long().clamp(max=6)); b = p(7, 2)[d].permute(2, 0, 1); q, k, v = heads(x, 1) * 3; "
        "x = x + merge((q @ k.mT + b).softmax(-1) @ v)"
    ),
    "kv of another length": ("k, = heads(F.max_pool1d(x.mT, 2).mT, 1); q, = heads(x, 1); x = x + merge(sdpa(q, k, k))"),
    "one_hot pooling": "i = F.one_hot(torch.arange(x.shape[1]) // 4, 6).to(x.dtype); x = x + i @ (i.T @ x)",
    "complex rope": (
        "z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)); "
        "f = torch.polar(torch.ones(x.shape[1], 4).double(), torch.outer(torch.arange(x.shape[1]).double(), "
        "torch.arange(4).double())); x = torch.view_as_real(z * f).flatten(2)"
    ),
    "register tokens": (
        "x = torch.cat([x[:, :1], p(1, 3, 8).expand(x.shape[0], 3, 8), x[:, 1:]], 1); h, = heads(x, 1); "
        "x = merge(sdpa(h, h, h)); x = torch.cat([x[:, :1], x[:, 4:]], 1)"
    ),
    "class and mean": "x = x + torch.cat([x[:, 0], x[:, 1:].mean(1)], -1)[:, None, ::2]",
    "patch merging": (
        "b, n, w = x.shape; y = torch.cat([x[:, 0::2], x[:, 1::2]], -1); x = F.linear(F.layer_norm(y, (16,)), p(8, 16))"
    ),
    "pixel shuffle": "b, n, w = x.shape; x = F.linear(x, p(16, 8)).view(b, n, 2, w).view(b, n * 2, w)",
    "picture conv": (
        "b, n, w = x.shape; y = x.mT.reshape(b, w, 4, n // 4); "
        "y = F.conv2d(y, p(8, 1, 3, 3), padding=1, groups=8); x = x + y.flatten(2).mT"
    ),
    "dims negative, keepdim": (
        "x = x - x.amax(dim=(-2, -1), keepdim=True) + x.mean(dim=-2, keepdim=False).unsqueeze(-2)"
    ),
    "mixture of experts": (
        "g = F.linear(x, p(3, 8)).softmax(-1); w, i = g.topk(2, -1); "
        "y = 0\nfor e in range(3):\n    y = y + F.linear(x, p(8, 8)) * (w * (i == e)).sum(-1, True)\nx = x + y"
    ),
    "capacity by cumsum": (
        "i = F.linear(x, p(3, 8)).argmax(-1); o = F.one_hot(i, 3); "
        "r = (o.flatten(0, 1).cumsum(0) - 1).view_as(o); x = x * ((r < 3) * o).sum(-1, True)"
    ),
    "position by mask": (
        "m = (ids > 1).long(); q = (m.cumsum(1) - 1).clamp(0)[:, :x.shape[1]]; x = x + F.embedding(q, p(26, 8))"
    ),
    "last unpadded": (
        "n = (ids > 0).long().cumsum(1).argmax(1).clamp(max=x.shape[1] - 1); "
        "x = x + x[torch.arange(x.shape[0]), n][:, None]"
    ),
    "token shift": "x = x + F.pad(x, (0, 0, 1, -1)) * p(8).sigmoid()",
    "time shift by zero pad 2d": "x = torch.nn.ZeroPad2d((0, 0, 1, -1))(x)",
    "moving average": "c = F.pad(x.cumsum(1), (0, 0, 3, 0)); x = (c[:, 3:] - c[:, :-3]) / 3",
    "tril by where": (
        "n = x.shape[1]; i = torch.arange(n); w = torch.where(i[:, None] >= i, 1.0, 0.0).double() / (i[:, None] "
        "+ 1); x = w @ x"
    ),
    "toeplitz": "n = x.shape[1]; i = torch.arange(n); x = p(2 * n - 1)[i[:, None] - i + n - 1] @ x",
    "mlp mixer": "n = x.shape[1]; x = x + F.linear(F.gelu(F.linear(x.mT, p(6, n))), p(n, 6)).mT",
    "linformer": "n = x.shape[1]; q, k, v = heads(x, 1) * 3; e = p(3, n); x = x + merge(sdpa(q, e @ k, e @ v))",
    "meshgrid": (
        "a, b = torch.meshgrid(torch.arange(x.shape[1]), torch.arange(8), indexing='ij'); "
        "x = x * (a + b).double().cos()"
    ),
    "vander": "x = x * torch.linspace(0, 1, x.shape[1]).double()[:, None] ** torch.arange(8)",
    "swapaxes, squeeze, expand": "x = x.unsqueeze(0).swapaxes(1, 2).expand(2, -1, -1, -1).mean(0).swapdims(0, 1)",
    "hstack and tile": "x = torch.hstack([x, x])[:, 2:]; x = torch.tile(x, (1, 1, 2))[..., ::2]",
    "roll both": "x = x.roll((1, 2), (1, 2))",
    "std_mean whitening": "s, m = torch.std_mean(x, (0, 1)); x = (x - m) / (s + 1)",
    "addcmul, lerp": "x = torch.addcmul(x, x, x.flip(1), value=0.3).lerp(x[:, :1], 0.1)",
    "double write": "y = x.clone(); y[:, 1:] += x[:, :-1]; y[:, -1].zero_(); x = y",
    "swap halves in place": (
        "y = x.clone(); n = y.shape[1] // 2; y[:, :n], y[:, n:2 * n] = x[:, n:2 * n], x[:, :n]; x = y"
    ),
    "new_full of the sequence": "x = x + x.new_full((x.shape[1], 1), 0.5).cumsum(0)",
    "interpolate positions": "q = F.interpolate(p(1, 8, 5), size=x.shape[1], mode='linear').mT; x = x + q",
    "group norm behind heads": "b, n, w = x.shape; x = F.group_norm(x.reshape(b * n, w), 2).view(b, n, w)",
    "block diagonal": (
        "b, n, w = x.shape; y = x.view(b, 4, n // 4, w); "
        "x = (torch.einsum('bcnd,bcmd->bcnm', y, y).softmax(-1) @ y).view(b, n, w)"
    ),
    "float32 inside": "x = x * (x.float().relu() > 0).double().mean((1, 2), True)",
    "sequence sum in float32 count": "x = x * ((x > 0).sum(1, True).float() / x.shape[1]).double()",
    "bool cumsum": "x = x * (x > 0).cumsum(1)",
    "any over pairs": "m = ids[:, :x.shape[1]]; x = x * (m[:, :, None] == m[:, None]).any(-1)[..., None]",
    "count of pairs": "m = ids[:, :x.shape[1]]; x = x / (m[:, :, None] == m[:, None]).sum(-1)[..., None]",
    "stack of shifts": "x = torch.stack([F.pad(x, (0, 0, i, 0))[:, :x.shape[1]] for i in range(3)], -1) @ p(3)",
    "frames": "y = F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1); x = torch.einsum('bndk,k->bnd', y, p(4))",
    "min of two rows": "x = torch.minimum(x, x.roll(1, 1))",
    "kron": "x = x + torch.kron(x[0, :2], torch.eye(2).double())[:4].sum()",
    "where over rows": "x = torch.where((torch.arange(x.shape[1]) < 3)[:, None], x, x.mean(1, True))",
    "log_sum over kept": "x = x - torch.logaddexp(x, kept[0][:, :x.shape[1]]).logsumexp(1, True)",
    "argmax one way out": (
        "x = x + F.one_hot(x.argmax(1), x.shape[1]).mT[..., :x.shape[1]].transpose(1, 2).double().mean(-1)[:, None]"
    ),
    "pooling token": (
        "t = p(1, 1, 8).expand(x.shape[0], 1, 8); q, = heads(t, 1); k, = heads(x, 1); "
        "t = t + merge(sdpa(q, k, k)); x = x * t.sigmoid()"
    ),
    "a view that other strides do not allow": (
        "y = x.permute(1, 2, 0).index_fill(2, torch.zeros(1, dtype=torch.int64), 0.5).permute(2, 0, 1); "
        "x = x + y.view(4, -1, 8).mean((0, 1))"
    ),
    "in-place on a view of a view": (
        "y = x * 1; z = y.view(y.shape[0], -1); z[:, ::2] *= 0.5; y[:, 1:3].transpose(1, 2)[:, 0] = 0; x = y"
    ),
    "rfft filter": "f = torch.fft.rfft(x, dim=1); x = torch.fft.irfft(f * p(f.shape[1], 8), n=x.shape[1], dim=1)",
    "fft convolution": (
        "n = x.shape[1]; k = torch.fft.rfft(p(n, 8), 2 * n, dim=0); "
        "x = torch.fft.irfft(torch.fft.rfft(x, 2 * n, dim=1) * k, 2 * n, dim=1)[:, :n]"
    ),
}

#: some operand is needed whole
GATHERED = {
    "1-D from the sequence": "w = x[0, :, 0]; x = x + torch.outer(w, w)[None].mean(-1, True)",
    "broadcast from the sequence axis": "x = x + (x[:, :, None] - x[:, None]).abs().mean((2, 3))[..., None]",
    "gather by sorted index": (
        "i = x[..., 0].argsort(1); y = x.gather(1, i[..., None].expand(-1, -1, 8)); "
        "x = y.cumsum(1).gather(1, i.argsort(1)[..., None].expand(-1, -1, 8))"
    ),
    "masked_scatter": (
        "m = (torch.arange(x.shape[1]) % 3 == 0)[None, :, None].expand_as(x); x = x.masked_scatter(m, x.sin())"
    ),
    "scatter_reduce by bucket": (
        "i = (torch.arange(x.shape[1]) // 4)[None, :, None].expand_as(x); "
        "s = torch.zeros(x.shape[0], 6, 8, dtype=x.dtype).scatter_reduce(1, i, x, 'mean', include_self=False); "
        "x = x + s.gather(1, i)"
    ),
    "fft mixing": "x = x + torch.fft.fft2(x, dim=(1, 2)).real / 9",
    "stft": (
        "s = torch.stft(x[..., 0], 4, 2, window=torch.ones(4).double(), return_complex=True).abs(); "
        "x = x + s.mean((1, 2))[:, None, None]"
    ),
    "top-k tokens": (
        "s, i = x[..., 0].topk(4, 1); x = x + (x.gather(1, i[..., None].expand(-1, -1, 8)) * s.sigmoid()[..., "
        "None]).sum(1, True)"
    ),
    "cosine of all pairs": "y = F.normalize(x, dim=-1); x = x + (y @ y.mT).tanh() @ x",
    "rot90": "x = torch.rot90(x, 2, (1, 2))",
    "quantile": "x = x - x.quantile(0.5, 1, True)",
    "index_put accumulate": (
        "y = torch.zeros_like(x); y.index_put_((torch.arange(x.shape[0])[:, None], "
        "torch.arange(x.shape[1])[None] // 2), x, accumulate=True); x = y"
    ),
    "weights of the softmax used twice": (
        "q, k, v = heads(x, 1) * 3; w = (q @ k.mT).softmax(-1); x = x + merge(w @ v) + w.sum((1, 2))[..., None]"
    ),
    "as_strided": "x = x + torch.as_strided(x.contiguous(), x.shape, x.contiguous().stride()) * 0.5",
    "cdist of rows": "x = x + (-torch.cdist(x, x).square()).softmax(-1) @ x",
    "batch folded into heads": (
        "b, n, w = x.shape; y = x.view(b, n, 2, 4).permute(2, 0, 1, 3).reshape(2 * b, n, 4); "
        "y = torch.baddbmm(y, y.softmax(-1) @ y.mT, y, beta=0.5, alpha=0.1); "
        "x = y.view(2, b, n, 4).permute(1, 2, 0, 3).reshape(b, n, w)"
    ),
    "sum of squares distance": (
        "s = x.square().sum(-1); d = s[:, :, None] + s[:, None] - 2 * x @ x.mT; x = x + (-d).softmax(-1) @ x"
    ),
}

#: what is computed decides on sizes
REFUSED = {
    "bincount": "c = torch.bincount(ids.flatten(), minlength=7).to(x.dtype); x = x * c[ids][:, :x.shape[1], None]",
    "unique": "u = torch.unique(ids); x = x + u.shape[0]",
    "nonzero": "x = x + (x[0, :, 0] > 0).nonzero().shape[0]",
    "cov": "x = x @ torch.cov(x.flatten(0, 1).T)",
    "scalar tensor index": "i = ids[0, 0] % x.shape[1]; x = x + x[:, i][:, None]",
}


def outcome(table, name):
    p, layout = CASES[list(table).index(name) % len(CASES)]
    program = Program((ATTENTION, table[name], ATTENTION), ("logits.square().mean()", "loss, x"), length=24)
    return verdict(program, p, layout)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_gathered(name):
    assert outcome(EXACT, name) == "exact"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", GATHERED)
def test_right_though_gathered(name):
    # In torch 2.11 a quantile looks at numbers to check its argument, which no graph of all sizes can.
    old = name == "quantile" and torch.__version__.startswith("2.11")
    assert outcome(GATHERED, name) == ("refused" if old else "gathered")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    assert outcome(REFUSED, name) == "refused"
