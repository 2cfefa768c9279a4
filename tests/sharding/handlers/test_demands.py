"""What stands before the first attention is sharded too, where rows are mixed in a way that is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import validate_module
from tests.sharding.programs import D, Model, case

N = 13


class Before(nn.Module):
    """A layer, a step, attention. Nothing demands the rows of the layer by a rule."""

    def __init__(self, step):
        super().__init__()
        self.model, self.step = Model(), step
        self.none = nn.Parameter(torch.zeros(1, 0, D))

    def forward(self, x, ids):
        return self.model.attention(self.step(self, F.relu(self.model.linear(x + self.model.table(ids)))))


T = lambda x: x.transpose(1, 2)  # noqa: E731
SEQUENCES = {
    "convolution": lambda m, x: T(m.model.conv(T(x))),
    "two convolutions and a skip": lambda m, x: x + T(m.model.conv(F.silu(m.model.conv(T(x))))),
    "class token": lambda m, x: torch.cat([m.model.vector.expand(2, 1, D), x], 1),
    "no registers": lambda m, x: torch.cat([m.none.expand(2, 0, D), x], 1),
    "two streams": lambda m, x: torch.cat([x, m.model.linear(x.flip(1))], 1),
    "slice": lambda m, x: x[:, 1:],
    "split": lambda m, x: x.split([5, x.shape[1] - 5], 1)[1],
    "shift": lambda m, x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "padded in two dims": lambda m, x: F.pad(x, (1, -1, 2, 0)),
    "cumsum": lambda m, x: x.cumsum(1),
    "norm over the sequence": lambda m, x: T(F.group_norm(T(x), 2)),
}


def whole(report):
    return [gather for gather in report.gathers if gather.op != "output"]


def check(module, *args, p=2, **options):
    verdict = validate_module(p, module.double(), *args, **options)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    assert verdict.report.sharded_fraction == 1.0 and not whole(verdict.report), verdict.report
    return verdict


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SEQUENCES)
def test_before_the_first_attention(name):
    torch.manual_seed(0)
    p, layout = case(SEQUENCES, name)
    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    check(Before(SEQUENCES[name]), x, torch.randint(0, 40, (2, N)), p=p, layout=layout)


class Beside(Before):
    """The layer and the step beside attention, whose rows meet theirs."""

    def forward(self, x, ids):
        y = self.model.attention(x + self.model.table(ids))
        return y + F.silu(self.step(self, F.relu(self.model.linear(x))))


BESIDE = ("convolution", "two convolutions and a skip", "shift", "cumsum", "norm over the sequence")


@pytest.mark.parametrize("name", BESIDE)
def test_beside_attention(name):
    torch.manual_seed(0)
    p, layout = case(BESIDE, name)
    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    check(Beside(SEQUENCES[name]), x, torch.randint(0, 9, (2, N)), p=p, layout=layout)



class Pictures(nn.Module):
    """A convolution over a picture, a step, attention over all places, a convolution over the picture again."""

    def __init__(self, step=lambda m, x: x):
        super().__init__()
        self.model, self.step = Model(causal=False), step
        self.stem, self.conv = nn.Conv2d(3, D, 3, stride=2, padding=1), nn.Conv2d(D, D, 3, padding=1)

    def forward(self, x):
        x = self.step(self, F.gelu(self.stem(x)))
        y = self.model.attention(x.flatten(2).transpose(1, 2))
        return self.conv(y.transpose(1, 2).unflatten(2, x.shape[2:]))


STEPS = {
    "nothing": lambda m, x: x,
    "convolution": lambda m, x: m.conv(x),
    "depthwise": lambda m, x: F.conv2d(x, m.conv.weight[:, :1], padding=1, groups=D),
    "largest, padded": lambda m, x: F.max_pool2d(x - 9, 3, 1, 1),
    "largest of the last rows": lambda m, x: F.max_pool2d(x - 9, 3, 2, 1, ceil_mode=True),
    "average": lambda m, x: F.avg_pool2d(x, 3, 1, 1),
    "average of what there is beside": lambda m, x: F.avg_pool2d(x, (1, 3), 1, (0, 1), count_include_pad=False),
    "nearest": lambda m, x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "squeezed": lambda m, x: x * F.adaptive_avg_pool2d(x, 1).sigmoid(),
    "channels by groups": lambda m, x: F.group_norm(x, 2),
    "padded on one side": lambda m, x: F.pad(x, (0, 1, 0, 1)),
    "unfolded": lambda m, x: F.unfold(x, 3, padding=1).view(2, D, 9, *x.shape[2:]).sum(2),
    "patches of patches": lambda m, x: (
        x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 1, 3, 5, 2, 4).flatten(2, 3).mean(2)
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", STEPS)
def test_pictures(name):
    torch.manual_seed(0)
    p, _ = case(STEPS, name)
    x = torch.randn(2, 3, 24, 12, dtype=torch.float64, requires_grad=True)
    check(Pictures(STEPS[name]), x, p=p)


def test_adaptive_pooling_to_several_rows():
    torch.manual_seed(0)
    check(Pictures(lambda m, x: F.adaptive_avg_pool2d(m.conv(x), (6, 3))), torch.randn(2, 3, 24, 12).double(), p=3)


def test_a_source_that_is_read_whole_is_computed_whole():
    """What is scaled by norms of all rows is known in no way: its operand is as if nothing had been cut, and needs no
    gather."""

    class Sorted(Before):
        def forward(self, x, ids):
            y = x + self.model.table(ids)
            return self.model.attention(T(self.model.conv(T(y)))), torch.renorm(y, 2, 0, 0.5)

    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    verdict = validate_module(3, Sorted(None).double(), x, torch.randint(0, 40, (2, N)))
    assert not verdict.wrong and not whole(verdict.report)


PICKED = {
    "gather": lambda x, kept: x.gather(1, kept[..., None].expand(-1, -1, D)),
    "index": lambda x, kept: x[:, kept[0]],
    "index_select": lambda x, kept: x.index_select(1, kept[1]),
}


@pytest.mark.parametrize("name", PICKED)
def test_tokens_kept_by_number(name):
    """Which ranks they come from is known only when it runs: they are gathered, and each rank takes its own of them."""

    class Kept(Before):
        def forward(self, x, kept):
            return self.model.attention(self.step(self.model.linear(x).relu(), kept))

    torch.manual_seed(0)
    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    kept = torch.stack([torch.randperm(N)[:9] for _ in range(2)])
    verdict = validate_module(3, Kept(PICKED[name]).double(), x, kept)
    assert not verdict.wrong, verdict.wrong
    assert verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in whole(verdict.report)] == [name]


class OneKey(nn.Module):
    """Six heads of queries and one of keys and values in one product, picked by number."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 8 * 4), nn.Linear(6 * 4, D)

    def forward(self, x, ids):
        heads = self.qkv(x).unflatten(-1, (8, 4))
        q, k, v = (t.transpose(1, 2) for t in (heads[:, :, :-2], heads[:, :, [-2]], heads[:, :, [-1]]))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("p", [2, 3])
def test_heads_picked_by_number_are_no_sequence(p):
    torch.manual_seed(0)
    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    verdict = check(OneKey(), x, None, p=p)
    assert [site.strategy for site in verdict.report.sites] == ["ring"]


def test_an_input_is_not_cut_to_be_sliced():
    """Every rank has it: nothing is sent."""

    class Sliced(Before):
        def forward(self, x, ids):
            return self.model.attention(self.model.table(ids[:, 1:]) + x[:, 1:])

    x = torch.randn(2, N, D, dtype=torch.float64, requires_grad=True)
    verdict = check(Sliced(None), x, torch.randint(0, 40, (2, N)))
    assert "fetch_rows" not in str(verdict.graph.graph)


class Windows(nn.Module):
    """Attention inside windows of four rows by four columns, with a bias that is learned for each head and pair."""

    def __init__(self):
        super().__init__()
        self.model, self.bias = Model(causal=False), nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x):
        whole = self.model.attention(self.model.linear(x).flatten(1, 2)).unflatten(1, (8, 8))
        windows = whole.unflatten(2, (2, 4)).unflatten(1, (2, 4)).transpose(2, 3).reshape(-1, 16, D)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.model.qkv(windows).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.bias).transpose(1, 2).flatten(2)


def test_windows_stay_on_their_ranks_whatever_is_added_to_their_scores():
    torch.manual_seed(0)
    check(Windows(), torch.randn(2, 8, 8, D, dtype=torch.float64, requires_grad=True), layout="contiguous")
