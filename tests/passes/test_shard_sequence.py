"""Programs with one step between two attentions: the sharded program is the program, on every rank, gradients
included."""

from __future__ import annotations

from pathlib import Path

import expecttest
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.backend import transform
from ringopt.capture import capture
from ringopt.graph.printer import changes, short
from ringopt.options import Options
from ringopt.passes import LINE
from ringopt.pipeline import Context, Pipeline
from tests.threads import run_on_threads
from tests.translation import Seat, captured, validate

B, N, D, H = 2, 11, 8, 2


class Model(nn.Module):
    """Attention, a step, attention, and an end."""

    def __init__(self, step=lambda m, x: x, end=lambda m, x: x, causal=True):
        super().__init__()
        self.step, self.end, self.causal = step, end, causal
        self.qkv, self.linear, self.wide = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.conv, self.norm, self.table = nn.Conv1d(D, D, 3, padding=1), nn.LayerNorm(D), nn.Embedding(40, D)
        self.vector = nn.Parameter(torch.randn(D))
        self.register_buffer("count", torch.zeros(D))

    def attention(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, H, D // H).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, n, D)

    def forward(self, x, ids):
        x = x + self.table(ids)
        x = self.attention(x)
        x = self.step(self, x)
        return self.end(self, self.attention(x)), ids


def inputs(n=N):
    return torch.randn(B, n, D, dtype=torch.float64, requires_grad=True), torch.randint(0, 40, (B, n))


def check(step=lambda m, x: x, end=lambda m, x: x, p=2, n=N, **options):
    torch.manual_seed(0)
    verdict = validate(p, Model(step, end).double(), *inputs(n), **options)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    return verdict


def no_grad(m, x):
    with torch.no_grad():
        y = m.linear(x)
    return m.linear(x) + y


def zero_row(m, x):
    y = x.clone()
    y[:, 0] = 0
    return y


def write_after_use(m, x):
    y = x * 1
    z = y + 1
    y.mul_(2)
    return y + z


def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return m.linear(x)


#: steps that work token by token: nothing may be gathered
LOCAL = {
    "nothing": lambda m, x: x,
    "pointwise": lambda m, x: torch.tanh(x) * 2 + x.abs(),
    "residual with a parameter": lambda m, x: x * m.vector + x,
    "linear": lambda m, x: m.linear(x),
    "gated": lambda m, x: F.silu(m.wide(x).chunk(2, -1)[0]) * x,
    "layer norm": lambda m, x: m.norm(x),
    "rms norm": lambda m, x: F.rms_norm(x, (D,)) * m.vector,
    "flatten and back": lambda m, x: m.linear(x.reshape(-1, D)).view(x.shape),
    "addmm of flat tokens": lambda m, x: torch.addmm(m.linear.bias, x.reshape(-1, D), m.linear.weight).view(x.shape),
    "heads and back": lambda m, x: x.view(*x.shape[:2], H, -1).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
    "time first": lambda m, x: m.linear(x.transpose(0, 1)).transpose(0, 1),
    "rotary": lambda m, x: x * torch.arange(x.shape[1], dtype=x.dtype)[None, :, None].cos(),
    "added positions": lambda m, x: x + m.table(torch.arange(x.shape[1])),
    "matmul by a vector": lambda m, x: x * (x @ m.vector)[..., None],
    "einsum": lambda m, x: torch.einsum("bnd,ed->bne", x, m.linear.weight),
    "scaled by the mean of all": lambda m, x: x * x.mean(),
    "minus the mean row": lambda m, x: x - x.mean(1, keepdim=True),
    "plus a sum over the sequence": lambda m, x: x + x.sum(1, keepdim=True) / 7,
    "linear attention": lambda m, x: x + x @ (x.transpose(1, 2) @ x),
    "softmax over channels": lambda m, x: x.softmax(-1),
    "expand and mask": lambda m, x: x.masked_fill((torch.arange(x.shape[1]) % 3 == 0)[None, :, None].expand_as(x), 0.5),
    "stack": lambda m, x: torch.stack([x, x * 2], -1).mean(-1),
    "cat of channels": lambda m, x: torch.cat([x, -x], -1)[..., :D],
    "no_grad": no_grad,
    "write after use": write_after_use,
    "autocast off": autocast,
    "buffer is counted up": lambda m, x: x + m.count.add_(1),
    "detach": lambda m, x: x + x.detach() * 2,
}

#: steps that mix rows: gathered, told, and right
MIXING = {
    "convolution": lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2),
    "cumsum": lambda m, x: x.cumsum(1),
    "flip": lambda m, x: x.flip(1),
    "roll": lambda m, x: x.roll(1, 1),
    "softmax over the sequence": lambda m, x: x.softmax(1),
    "first row": lambda m, x: x + x[:, :1],
    "last row": lambda m, x: x + x[:, -1][:, None],
    "shift": lambda m, x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "sorted": lambda m, x: x.sort(1)[0],
    "unfused attention": lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "a row is zeroed": zero_row,
    "largest": lambda m, x: x - x.amax(1, keepdim=True),
    "variance": lambda m, x: x / (1 + x.var(1, keepdim=True)),
    "fft": lambda m, x: torch.fft.fft(x, dim=1).real,
}

CASES = [(2, "contiguous"), (3, "zigzag"), (3, "contiguous"), (2, "zigzag")]


@pytest.mark.parametrize("name", LOCAL)
def test_token_wise_steps_stay_sharded(name):
    p, layout = CASES[list(LOCAL).index(name) % len(CASES)]
    verdict = check(LOCAL[name], p=p, layout=layout)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert verdict.report.sharded_fraction == 1.0


@pytest.mark.parametrize("name", MIXING)
def test_steps_that_mix_rows_are_right_and_told(name):
    p, layout = CASES[list(MIXING).index(name) % len(CASES)]
    verdict = check(MIXING[name], p=p, layout=layout)
    assert len(verdict.report.gathers) > 1 and all(gather.why for gather in verdict.report.gathers)


def labels(m, x):
    """Class indices out of nothing, ignored labels in the first third only."""
    wanted = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % D
    return wanted.masked_fill(torch.arange(x.shape[1]) < x.shape[1] // 3, -100)


LOSSES = {
    "mean": lambda m, x: F.cross_entropy(x.reshape(-1, D), labels(m, x).reshape(-1)),
    "sum": lambda m, x: F.cross_entropy(x.reshape(-1, D), labels(m, x).reshape(-1), reduction="sum"),
    "none": lambda m, x: F.cross_entropy(x.reshape(-1, D), labels(m, x).reshape(-1), reduction="none"),
    "class dim second": lambda m, x: F.cross_entropy(x.transpose(1, 2), labels(m, x)),
    "weights": lambda m, x: F.cross_entropy(x.reshape(-1, D), labels(m, x).reshape(-1), weight=m.vector.abs().detach()),
    "smoothing": lambda m, x: F.cross_entropy(x.reshape(-1, D), labels(m, x).reshape(-1), label_smoothing=0.2),
    "weights and smoothing": lambda m, x: F.cross_entropy(
        x.reshape(-1, D), labels(m, x).reshape(-1), weight=m.vector.abs().detach(), label_smoothing=0.2
    ),
    "probabilities": lambda m, x: F.cross_entropy(x.reshape(-1, D), (2 * x.detach()).softmax(-1).reshape(-1, D)),
    "shift by pad": lambda m, x: F.cross_entropy(
        x.reshape(-1, D), F.pad(labels(m, x), (0, 1), value=-100)[:, 1:].reshape(-1)
    ),
    "shift by slice": lambda m, x: F.cross_entropy(x[:, :-1].reshape(-1, D), labels(m, x)[:, 1:].reshape(-1)),
    "mean of squares": lambda m, x: (x**2).mean(),
    "mse": lambda m, x: F.mse_loss(x, torch.ones_like(x)),
    "mean pooling": lambda m, x: m.linear(x.mean(1)).sum(),
    "last token": lambda m, x: m.linear(x[:, -1]).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    p, layout = CASES[list(LOSSES).index(name) % len(CASES)]
    check(end=LOSSES[name], p=p, layout=layout)


@pytest.mark.parametrize("n", (2, 3, 4, 5, 7))
def test_short_sequences(n):
    """Fewer rows than ranks: replicated, with the reason; fewer than 2p: contiguous."""
    verdict = check(p=3, n=n)
    sites = verdict.report.sites
    if n < 3:
        assert sites[0].refusal == f"{n} rows for 3 ranks: every rank needs a row"
    else:
        assert {site.layout for site in sites} == {"zigzag" if n >= 6 else "contiguous"}


def test_dropout_of_a_shard_is_drawn_by_each_rank():
    """The mean over many elements is kept, and no two ranks drop the same places."""
    torch.manual_seed(0)

    class Dropped(Model):
        def forward(self, x, ids):
            return F.dropout(self.attention(x) * 0 + 1, 0.5, True)

    gm, given = captured(Dropped().double(), *inputs(512))
    graphs = [transform(gm, given, Options(layout="contiguous"), Seat(rank, 2))[0] for rank in range(2)]
    (out,), (other,) = run_on_threads(2, lambda mesh: graphs[mesh.rank](*given))
    assert torch.equal(out, other)
    assert abs(float(out.detach().mean()) - 1) < 0.05
    assert set(out.unique().tolist()) == {0.0, 2.0}
    halves = out.chunk(2, 1)
    assert 0.4 < float((halves[0] == halves[1]).double().mean()) < 0.6


class TestGolden(expecttest.TestCase):
    """What the pass does to one attention between two linear layers, and a mean."""

    def test_the_diff(self):
        class One(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4, bias=False)

            def forward(self, x):
                q = self.linear(x).unsqueeze(1)
                y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
                return self.linear(y.squeeze(1)).mean(), x + 1

        seen = {}

        def keep(step, gm):
            seen[step.name] = short(gm.graph)

        gm, given = captured(One(), torch.randn(1, 10, 4))
        Pipeline(LINE, keep).run(capture(gm, given), Context(Options(), Seat(0, 2)))
        diff = changes(seen["choose_strategy"], seen["shard_sequence"])
        assert diff in (Path(__file__).parents[2] / "README.md").read_text()
        self.assertExpectedInline(
            diff,
            """\
  %linear_weight = input
  %x = input
+ %x_rows = scatter(%x, 1, 1, 10, 1, 5, 'zigzag')
+ %linear_weight_beside = copy_to_group(%linear_weight)
- %linear = linear(%x, %linear_weight)
+ %linear = linear(%x_rows, %linear_weight_beside)
  %unsqueeze = unsqueeze(%linear, 1)
- %attention = attention(%unsqueeze, %unsqueeze, %unsqueeze, None, [], None, None, 'causal', '', 0, 0.5)
- %squeeze = squeeze(%attention, 1)
+ %attention_ring_attention = ring_attention(%unsqueeze, %unsqueeze, %unsqueeze, [], None, None, 10, 10, 'causal', '', [], 0, 0.5, 'zigzag', 'zigzag', 'ring', 'flash_cpu')
+ %attention = getitem(%attention_ring_attention, 0)
+ %squeeze = reshape(%attention, [1, -1, 4])
- %linear_1 = linear(%squeeze, %linear_weight)
+ %linear_1 = linear(%squeeze, %linear_weight_beside)
- %mean = mean(%linear_1)
+ %mean_sum = sum(%linear_1, [0, 1, 2], False, dtype=float32)
+ %mean_reduce_from_group = reduce_from_group(%mean_sum)
+ %mean_div = div(%mean_reduce_from_group, 40)
+ %mean = to(%mean_div, float32)
  %add = add(%x, 1)
  return [%mean, %add]""",  # noqa: E501
        )
