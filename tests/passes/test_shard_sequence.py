"""Programs with one step between two attentions: the sharded program is the program, on every rank, gradients
included."""

from __future__ import annotations

from pathlib import Path

import expecttest
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.drivers.compile import transform
from ringopt.frontend.capture import capture
from ringopt.ir.printer import changes, short
from ringopt.options import Options
from ringopt.passes import LINE, with_options
from ringopt.pipeline import Context, Pipeline
from tests.harness.models import build
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, captured, validate
from tests.sharding.programs import D, H, Model, case, check, inputs


def no_grad(m, x):
    with torch.no_grad():
        y = m.linear(x)
    return m.linear(x) + y


def write_after_use(m, x):
    y = x * 1
    z = y + 1
    y.mul_(2)
    return y + z


def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return m.linear(x)


def rotated(m, x):
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(D // 2)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


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
    "cosine similarity": lambda m, x: x * F.cosine_similarity(x, m.vector, dim=-1)[..., None],
    "rotary by complex numbers": rotated,
    "new rows": lambda m, x: x * x.new_ones(x.shape[1], 1) + x.new_zeros(()),
    "einsum with an ellipsis": lambda m, x: torch.einsum("...d,ed->...e", x, m.linear.weight),
    "no_grad": no_grad,
    "write after use": write_after_use,
    "autocast off": autocast,
    "buffer is counted up": lambda m, x: x + m.count.add_(1),
    "detach": lambda m, x: x + x.detach() * 2,
}

#: steps that mix rows: gathered, told, and right
MIXING = {
    "rolled": lambda m, x: x.roll(3),
    "product of all": lambda m, x: x * x.prod(),
    "renormed": lambda m, x: torch.renorm(x, 2, 0, 0.5),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", LOCAL)
def test_token_wise_steps_stay_sharded(name):
    p, layout = case(LOCAL, name)
    verdict = check(LOCAL[name], p=p, layout=layout)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert verdict.report.sharded_fraction == 1.0


@pytest.mark.parametrize("name", MIXING)
def test_steps_that_mix_rows_are_right_and_told(name):
    p, layout = case(MIXING, name)
    verdict = check(MIXING[name], p=p, layout=layout)
    assert len(verdict.report.gathers) > 1 and all(gather.why for gather in verdict.report.gathers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("n", (2, 3, 4, 5, 7))
def test_short_sequences(n):
    """Fewer rows than ranks: replicated, with the reason; fewer than 2p: contiguous."""
    verdict = check(p=3, n=n)
    sites = verdict.report.sites
    if n < 3:
        assert sites[0].refusal == f"{n} rows for 3 ranks: every rank needs a row"
    else:
        assert {site.layout for site in sites} == {"zigzag" if n >= 6 else "contiguous"}


def test_dropout_by_the_stream_of_torch_is_drawn_by_each_rank():
    """The mean over many elements is kept, and no two ranks drop the same places."""
    torch.manual_seed(0)

    class Dropped(Model):
        def forward(self, x, ids):
            return F.dropout(self.attention(x) * 0 + 1, 0.5, True)

    gm, given = captured(Dropped().double(), *inputs(512))
    options = Options(layout="contiguous", random="torch")
    graphs = [transform(gm, given, options, Seat(rank, 2)).graph for rank in range(2)]
    (out,), (other,) = run_on_threads(2, lambda mesh: graphs[mesh.rank](*given))
    assert torch.equal(out, other)
    assert abs(float(out.detach().mean()) - 1) < 0.05
    assert set(out.unique().tolist()) == {0.0, 2.0}
    halves = out.chunk(2, 1)
    assert 0.4 < float((halves[0] == halves[1]).double().mean()) < 0.6


@pytest.mark.parametrize("p", (pytest.param(2, marks=pytest.mark.zoo), 3, pytest.param(4, marks=pytest.mark.zoo)))
def test_attention_alone(p):
    """With shard="attention" all else is whole: what a rank computes of it is what one process does."""
    model, given = build("llama", 21, torch.float64)
    verdict = validate(p, model, given, shard="attention")
    assert not verdict.wrong
    assert [site.refusal for site in verdict.report.sites] == [None, None]
    assert len(verdict.report.gathers) == 2
    assert verdict.report.sharded_fraction < 0.2


ALONE = ("linear", "softmax over channels", "scaled by the mean of all", "buffer is counted up", "no_grad", "rolled")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ALONE)
def test_attention_alone_between_steps(name):
    step = {**LOCAL, **MIXING}[name]
    assert len(check(step, p=3, shard="attention").report.gathers) == 2


class One(nn.Module):
    """One attention between two linear layers, and a mean."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        q = self.linear(x).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.linear(y.squeeze(1)).mean(), x + 1


def changed_by_sharding(module, options, shape=(1, 10, 4)):
    seen = {}

    def keep(step, gm):
        seen[step.name] = short(gm.graph)

    gm, given = captured(module, torch.randn(shape))
    context = Context(options, Seat(0, 2))
    Pipeline(with_options(LINE, options), keep).run(capture(gm, given).begin(context), context)
    return changes(seen["choose_strategy"], seen["shard_sequence"])


class Small(nn.Module):
    """That of README.md."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.linear(x)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).sum()


class TestGolden(expecttest.TestCase):
    """What the pass does to one attention between two linear layers, and a mean."""

    def test_the_diff(self):
        self.assertExpectedInline(
            changed_by_sharding(One(), Options()),
            """\
  %x = input
  %linear_weight = input
  %add = add(%x, 1)
+ %x_rows = scatter(%x, 1, 1, 10, 1, 5, 'zigzag')
+ %linear_weight_copied = copy_to_group(%linear_weight)
- %linear = linear(%x, %linear_weight)
+ %linear = linear(%x_rows, %linear_weight_copied)
  %unsqueeze = unsqueeze(%linear, 1)
- %attention = attention(%unsqueeze, %unsqueeze, %unsqueeze, None, [], None, None, 'causal', '', 0, 0.5)
- %squeeze = squeeze(%attention, 1)
+ %attention_ring_attention = ring_attention(%unsqueeze, %unsqueeze, %unsqueeze, [], None, None, 10, 10, 'causal', '', [], 0, 0.5, 'zigzag', 'zigzag', 'ring', 'flash_cpu')
+ %attention = getitem(%attention_ring_attention, 0)
+ %squeeze = reshape(%attention, [1, -1, 4])
- %linear_1 = linear(%squeeze, %linear_weight)
+ %linear_1 = linear(%squeeze, %linear_weight_copied)
- %mean = mean(%linear_1)
+ %mean_sum = sum(%linear_1, [0, 1, 2], False, dtype=float32)
+ %mean_reduce_from_group = reduce_from_group(%mean_sum)
+ %mean_div = div(%mean_reduce_from_group, 40)
+ %mean = to(%mean_div, float32)
  return [%add, %mean]""",  # noqa: E501
        )

    def test_the_diff_of_readme(self):
        diff = changed_by_sharding(Small(), Options(), (1, 1, 10, 4))
        assert diff in (Path(__file__).parents[2] / "README.md").read_text()
        self.assertExpectedInline(
            diff,
            """\
  %x = input
  %linear_weight = input
+ %x_rows = scatter(%x, 2, 1, 10, 1, 5, 'zigzag')
+ %linear_weight_copied = copy_to_group(%linear_weight)
- %linear = linear(%x, %linear_weight)
+ %linear = linear(%x_rows, %linear_weight_copied)
- %attention = attention(%linear, %linear, %linear, None, [], None, None, 'causal', '', 0, 0.5)
- %sum_1 = sum(%attention)
+ %attention_ring_attention = ring_attention(%linear, %linear, %linear, [], None, None, 10, 10, 'causal', '', [], 0, 0.5, 'zigzag', 'zigzag', 'ring', 'flash_cpu')
+ %attention = getitem(%attention_ring_attention, 0)
+ %sum_1_sum = sum(%attention, [0, 1, 2, 3], False, dtype=float32)
+ %sum_1_reduce_from_group = reduce_from_group(%sum_1_sum)
+ %sum_1 = to(%sum_1_reduce_from_group, float32)
  return [%sum_1]""",  # noqa: E501
        )

    def test_attention_alone(self):
        self.assertExpectedInline(
            changed_by_sharding(One(), Options(shard="attention")),
            """\
  %x = input
  %linear_weight = input
  %add = add(%x, 1)
  %linear = linear(%x, %linear_weight)
  %unsqueeze = unsqueeze(%linear, 1)
- %attention = attention(%unsqueeze, %unsqueeze, %unsqueeze, None, [], None, None, 'causal', '', 0, 0.5)
+ %unsqueeze_rows = scatter(%unsqueeze, 2, 1, 10, 1, 5, 'zigzag')
+ %attention_ring_attention = ring_attention(%unsqueeze_rows, %unsqueeze_rows, %unsqueeze_rows, [], None, None, 10, 10, 'causal', '', [], 0, 0.5, 'zigzag', 'zigzag', 'ring', 'flash_cpu')
+ %attention = getitem(%attention_ring_attention, 0)
+ %attention_whole = gather(%attention, 2, 1, 10, 1, 'zigzag')
- %squeeze = squeeze(%attention, 1)
+ %squeeze = squeeze(%attention_whole, 1)
  %linear_1 = linear(%squeeze, %linear_weight)
  %mean = mean(%linear_1)
  return [%add, %mean]""",  # noqa: E501
        )
