"""Graphs without attention and recurrences: the sequence is what prefix sums and Fourier transforms run along, what
products of activations sum over, or what convolutions move along."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.harness.translation import validate

WIDTH, ROWS = 8, 13


class Layers(nn.Module):
    """Layers of `mix(q, k, v)`, each [B, S, D]."""

    def __init__(self, mix, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.depth, self.qkv, self.out = mix, depth, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        for _ in range(self.depth):
            x = x + self.out(self.mix(*self.qkv(x).chunk(3, -1)))
        return x


def given(rows=ROWS):
    torch.manual_seed(rows)
    return torch.randn(2, rows, WIDTH, dtype=torch.float64, requires_grad=True)


def linear_attention(q, k, v):
    """Katharopoulos et al. 2020, as a prefix sum of outer products."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states, sums = (k[..., :, None] * v[..., None, :]).cumsum(1), k.cumsum(1)
    return (q[..., None, :] @ states).squeeze(-2) / (q * sums).sum(-1, keepdim=True)


def min_gru(q, k, v):
    """Feng et al. 2024, in logarithms: a prefix sum, and one of exponentials."""
    kept, new = -F.softplus(q), -F.softplus(-q) + F.softplus(k).log()
    decay = kept.cumsum(1)
    return (decay + (new - decay).logcumsumexp(1)).exp() * v


def long_convolution(q, k, v):
    """Hyena (Poli et al. 2023), S4: a filter as long as the sequence, by transforms of twice its length."""
    n = q.shape[1]
    decay = torch.exp(-torch.arange(n) / 3)[:, None].to(v)
    made = torch.fft.rfft(k * v, 2 * n, dim=1) * torch.fft.rfft(decay, 2 * n, dim=0)
    return q * torch.fft.irfft(made, 2 * n, dim=1)[:, :n]


def convolved(q, k, v):
    short = F.conv1d(F.pad(k.mT, (2, 0)), torch.ones(WIDTH, 1, 3).to(k) / 3, groups=WIDTH).mT
    return torch.tanh((short * v).cumsum(1)) * q


def state(q, k, v):
    """Linear attention without a mask (Katharopoulos et al. 2020; Sana, EfficientViT): one state of all tokens."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)


def spectrum(q, k, v):
    """FNet (Lee-Thorp et al. 2021), AFNO (Guibas et al. 2021): tokens and channels in one transform."""
    made = torch.fft.rfft2(q * v, dim=(1, 2), norm="ortho")
    return torch.fft.fft2(k).real / 9 + torch.fft.irfft2(made * made.abs(), s=q.shape[1:], dim=(1, 2), norm="ortho")


def operator(q, k, v):
    """Fourier neural operator (Li et al. 2021), FEDformer (Zhou et al. 2022): products with a few frequencies."""
    made = torch.fft.rfft(v, dim=1)
    kept = torch.zeros_like(made)
    kept[:, :3] = torch.einsum("bsi,sio->bso", made[:, :3], torch.ones(3, WIDTH, WIDTH).to(made) / (3 + 1j))
    return q * torch.fft.irfft(kept, v.shape[1], dim=1) + k


MIXED = {
    "a state of all tokens": state,
    "channels that attend to channels": lambda q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).mT,
    "weights over the tokens": lambda q, k, v: torch.einsum("bsf,bfd->bsd", q.softmax(-1), k.softmax(1).mT @ v),
    "linear attention": linear_attention,
    "minGRU": min_gru,
    "a long convolution": long_convolution,
    "transforms of both dims": spectrum,
    "a few frequencies": operator,
    "behind a short convolution": convolved,
    "products of decays": lambda q, k, v: torch.sigmoid(k).cumprod(1) * v + q,
}


@pytest.mark.parametrize("name, p", [(name, 2 + i % 2) for i, name in enumerate(MIXED)])
def test_tokens_stay_on_shards(name, p):
    verdict = validate(p, Layers(MIXED[name]), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert any("tokens are sharded along the dim of" in note for note in verdict.report.notes)


@pytest.mark.parametrize("mix", [min_gru, state, spectrum, operator])
def test_lengths_that_are_open(mix):
    calls = [(given(rows),) for rows in (20, 13, 4)]
    reports = run_over(Layers(mix, 1), calls, 3, dynamic=True).reports
    # (Beside batched products, fewer than two tokens a rank are compiled for themselves.)
    assert [report.sharded_fraction for report in reports] == [1.0] * (2 if mix in (state, operator) else 1)


class Residual(nn.Module):
    """As in ResNet (He et al. 2015): strided, with statistics of the whole batch, behind a largest of each window."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, WIDTH, 7, stride=2, padding=3), nn.BatchNorm2d(WIDTH)
        self.layer, self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 3, stride=2, padding=1)
        x = F.relu(x + self.inner(self.layer(x)))
        return self.last(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Modern(nn.Module):
    """As in ConvNeXt (Liu et al. 2022): patches, wide depthwise kernels, channels last in between."""

    def __init__(self):
        super().__init__()
        self.patches, self.wide = nn.Conv2d(3, WIDTH, 2, stride=2), nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        x = self.patches(x)
        made = self.down(F.gelu(self.up(self.norm(self.wide(x).permute(0, 2, 3, 1)))))
        return x + made.permute(0, 3, 1, 2)


class DownAndUp(nn.Module):
    """As in U-Net (Ronneberger et al. 2015)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, (4, 3), padding="same")
        self.down = nn.Conv2d(WIDTH, 16, 4, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, WIDTH, 4, stride=2, padding=1), nn.Conv2d(2 * WIDTH, 3, 1)
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        wide = F.silu(self.norm(self.first(x)))
        return self.last(torch.cat([wide, self.up(F.silu(self.down(wide)))], 1))


class Causal(nn.Module):
    """As in WaveNet (van den Oord et al. 2016): dilated, gated, of sound [B, C, T]."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, WIDTH, 1)
        self.gates = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(3))

    def forward(self, x):
        x = self.first(x)
        for i, gates in enumerate(self.gates):
            new, gate = gates(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + new.tanh() * gate.sigmoid()
        return x


class OfTime(nn.Module):
    """As in the autoencoders of videos: kernels over time and space, causal in time, more pixels at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv3d(3, WIDTH, 3), nn.Conv3d(WIDTH, 3, 3, padding=1)

    def forward(self, x):
        x = F.silu(self.first(F.pad(x, (1, 1, 1, 1, 2, 0))))
        return self.last(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0)))


class Windowed(nn.Module):
    """Chunks that overlap in memory, as in Longformer (Beltagy et al. 2020), each a weighted mean of its tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.weigh = nn.Embedding(17, WIDTH), nn.Parameter(torch.randn(8, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = self.embed(ids)
        rows = x.contiguous()
        both = (rows.shape[0], rows.shape[1] // 4 - 1, 8, WIDTH)
        seen = rows.as_strided(both, (rows.stride(0), 4 * WIDTH, WIDTH, 1))
        made = (seen * self.weigh).sum(2, keepdim=True).tanh().expand(-1, -1, 4, -1).flatten(1, 2)
        return self.out(x + F.pad(made, (0, 0, 0, 4)))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021) of embedded tokens: a layer over all of them, one over channels."""

    def __init__(self):
        super().__init__()
        self.embed, self.norms = nn.Embedding(17, WIDTH), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.over = nn.ModuleList([nn.Linear(24, 9), nn.Linear(9, 24), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)])

    def forward(self, ids):
        x, (up, down, wide, narrow) = self.embed(ids), self.over
        x = x + down(F.gelu(up(self.norms[0](x).mT))).mT
        return x + narrow(F.gelu(wide(self.norms[1](x))))


class Weighed(nn.Module):
    """Tokens weighed by a matrix of the model, `mix(weights [S, S], x [B, S, D])`."""

    def __init__(self, mix, rows=ROWS):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.weights = mix, nn.Parameter(torch.randn(rows, rows) / rows**0.5)
        self.bias, self.wide, self.out = nn.Parameter(torch.randn(rows)), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.double()

    def forward(self, x):
        return x + self.out(self.mix(self, F.gelu(self.wide(x))))


def spatial_gate(model, x):
    """gMLP (Liu et al. 2021), the causal one: channels of a convolution are tokens."""
    return x * F.conv1d(x, model.weights.tril()[..., None], model.bias)


def attention_free(model, x):
    """AFT (Zhai et al. 2021)."""
    weights = model.weights.exp()
    return torch.sigmoid(x) * (weights @ (x.exp() * x)) / (weights @ x.exp())


def synthesized(model, x):
    """Synthesizer (Tay et al. 2020): random weights, and those that a layer makes of a token."""
    made = F.linear(x[..., :ROWS], model.weights)
    return model.weights.softmax(-1) @ x + made.softmax(-1) @ x


def dilated(model, x):
    """Channels of a convolution that moves over features too."""
    weights = torch.stack([model.weights, model.weights.mT], -1)
    return x + F.conv1d(x, weights, None, 2, 1, 2).repeat_interleave(2, 2)


def by_token(model, x):
    """A filter for each channel, which is a token."""
    return x + F.conv1d(x, model.weights[:, None, :3], model.bias, padding=1, groups=ROWS)


WEIGHED = [spatial_gate, attention_free, synthesized, dilated]


@pytest.mark.parametrize("mix, p", [(mix, 2 + i % 2) for i, mix in enumerate(WEIGHED)])
def test_weights_over_tokens_sum_what_the_ranks_have(mix, p):
    verdict = validate(p, Weighed(mix), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert {gather.op for gather in verdict.report.gathers} <= {"output", "matmul"}
    assert "over whose rows products sum, windows move or layers run" in verdict.report.notes[0]


def test_filters_of_tokens_are_no_sum_over_tokens():
    assert validate(2, Weighed(by_token), given()).wrong == ""


class Pooled(nn.Module):
    """PoolFormer (Yu et al. 2022): means of neighbours instead of attention."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x + F.avg_pool1d(x.mT, 3, 1, 1, count_include_pad=False).mT)


CONVOLVED = {
    "a residual network": (Residual, (2, 3, 52, 21), (2, 3, 40, 21)),
    "channels last": (Modern, (2, 3, 14, 9), (2, 3, 20, 9)),
    "down and up": (DownAndUp, (1, 3, 14, 10), (1, 3, 10, 14)),
    "of sound": (Causal, (2, 3, 17), (2, 3, 23)),
    "of a video": (OfTime, (1, 3, 2, 9, 7), (1, 3, 3, 9, 7)),
    "of windows": (Windowed, (2, 24), (2, 32)),
    "of layers over tokens": (Mixer, (2, 24), (1, 24)),
    "of means of neighbours": (Pooled, (2, 17, WIDTH), (2, 23, WIDTH)),
}


def convolved_model(name):
    torch.manual_seed(0)
    return CONVOLVED[name][0]().double()


def pictures(sizes):
    torch.manual_seed(sizes[-1])
    if len(sizes) == 2:
        return torch.randint(17, sizes)
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", CONVOLVED)
def test_convolutions_say_which_dim_is_shared(name, p):
    """The longest that a kernel moves along, of each input."""
    verdict = validate(p, convolved_model(name), pictures(CONVOLVED[name][1]))
    assert verdict.wrong == "" and verdict.report.sharded_fraction > 0.99
    assert {gather.op for gather in verdict.report.gathers} <= {"output", "as_strided"}
    assert any("over whose rows products sum, windows move or layers run" in note for note in verdict.report.notes)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONVOLVED)
def test_pictures_of_other_sizes(name):
    """Where the compiler behind asks for the number of rows that a rank has, each size has a graph of its own."""
    reports = run_over(convolved_model(name), [(pictures(sizes),) for sizes in CONVOLVED[name][1:]], 2).reports
    assert all(report.sharded_fraction > 0.99 for report in reports)


def test_fewer_rows_than_ranks_are_no_sequence():
    verdict = validate(4, convolved_model("channels last"), pictures((1, 3, 3, 3)))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 0.0


class Compared(nn.Module):
    """Pictures, as LoFTR compares them: a buffer has the channels that a product sums over, and rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.places = nn.Conv2d(3, 8, 3, padding=1), nn.Buffer(torch.randn(1, 8, 12, 9))

    def forward(self, x):
        pixels = (self.layer(x) + self.places).flatten(2).mT
        return (scores := pixels @ pixels.flip(0).mT).softmax(1) * scores.softmax(2)


def test_channels_that_are_added_to_are_no_tokens():
    verdict = validate(2, Compared().double(), pictures((2, 3, 12, 9)))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0


class Placed(nn.Module):
    """A parameter for each place is added to the tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.places = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(ROWS, WIDTH))
        self.double()

    def forward(self, x):
        return (self.layer(x) + self.places).tanh().cumsum(1)


def test_tokens_that_meet_a_parameter_are_tokens():
    """The dim of the sum comes from both."""
    verdict = validate(2, Placed(), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0


def positions(q, k, v):
    """Of integers, as positions are counted: no tokens are mixed."""
    return q * (k.detach() > 0).long().cumsum(1) + v


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v.cumsum(1), is_causal=True)


LEFT = {"over features": lambda q, k, v: q * k.softmax(-1).cumsum(-1) + v, "positions": positions}


@pytest.mark.parametrize("name", LEFT)
def test_what_mixes_no_tokens(name):
    """Then it is the layers that say it."""
    verdict = validate(2, Layers(LEFT[name]), given())
    assert verdict.wrong == "" and "along the dim of x, over whose rows" in verdict.report.notes[0]


def test_fewer_tokens_than_ranks():
    verdict = validate(3, Layers(min_gru), given(2))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 0


def test_an_attention_says_itself_what_the_sequence_is():
    report = validate(2, Layers(attended), given()).report
    assert report.sharded_fraction > 0.9 and not any("along the dim of" in note for note in report.notes)


def test_the_report_names_the_line():
    (note,) = validate(2, Layers(min_gru), given()).report.notes
    assert "cumsum (test_mixing.py:" in note and "logcumsumexp (test_mixing.py:" in note
