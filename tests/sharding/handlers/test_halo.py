"""Convolution, pooling, running sums and joins along a sharded sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.calls import OpCall
from ringopt.ir.nodes import op_name
from ringopt.ops import operators
from ringopt.ops.fetch_rows import window_rows
from ringopt.sharding.seen_rows import Seen, seen_of_all
from tests.harness.translation import validate
from tests.programs.test_lengths import run_over
from tests.sharding.programs import D, H, Model, case, check, inputs

N = 13

T = lambda x: x.transpose(1, 2)  # noqa: E731


class Convolved(nn.Module):
    """Attention, a convolution along the sequence, an end of any length."""

    def __init__(self, convolution, step=lambda m, x: T(m.layer(T(x)))):
        super().__init__()
        self.model, self.layer, self.step = Model(), convolution, step

    def forward(self, x, ids):
        x = self.step(self, self.model.attention(x))
        return self.model.attention(x)


CONVOLUTIONS = {
    "padded": lambda: nn.Conv1d(D, D, 3, padding=1),
    "same": lambda: nn.Conv1d(D, D, 4, padding="same"),
    "same, dilated": lambda: nn.Conv1d(D, D, 3, padding="same", dilation=2),
    "valid": lambda: nn.Conv1d(D, D, 3, padding="valid"),
    "longer than the input": lambda: nn.Conv1d(D, D, 4, padding=3),
    "depthwise": lambda: nn.Conv1d(D, D, 4, padding=3, groups=D, bias=False),
    "wide": lambda: nn.Conv1d(D, D, 9, padding=4, groups=2),
    "one row": lambda: nn.Conv1d(D, D, 1),
    "stride": lambda: nn.Conv1d(D, D, 3, stride=2, padding=3),
    "stride wider than the kernel": lambda: nn.Conv1d(D, D, 1, stride=2),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    p, layout = case(CONVOLUTIONS, name)
    torch.manual_seed(0)
    n = 26 if "stride" in name else N
    verdict = validate(p, Convolved(CONVOLUTIONS[name]()).double(), *inputs(n), layout=layout)
    assert not verdict.wrong, verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert verdict.report.sharded_fraction == 1.0


CAUSAL = {
    "the end cut": (3, lambda m, x: m.layer(T(x))[..., : x.shape[1]]),
    "the end cut, by a number": (3, lambda m, x: m.layer(T(x))[..., :-3]),
    "zeros in front": (0, lambda m, x: m.layer(F.pad(T(x), (3, 0)))),
    "the end cut twice": (3, lambda m, x: (y := m.layer(T(x)))[..., :-3] + y[..., : x.shape[1]].tanh()),
    "a dilation": (6, lambda m, x: m.layer(T(x))[..., : x.shape[1]]),
    "looking ahead": (3, lambda m, x: m.layer(T(x))[..., 3:]),
    "about in the middle": (3, lambda m, x: m.layer(T(x))[..., 1:-2]),
}
NOT_CAUSAL = {
    "both read": (3, lambda m, x: (y := m.layer(T(x)))[..., :-3] + y[..., 3:]),
    "every second": (3, lambda m, x: m.layer(T(x))[..., :-3:2].repeat_interleave(2, -1)[..., : x.shape[1]]),
    "ones in front": (0, lambda m, x: m.layer(F.pad(T(x), (3, 0), value=1.0))),
    "rows of its own in front": (0, lambda m, x: m.layer(F.pad(T(x), (3, 0), "replicate"))),
    "channels too": (0, lambda m, x: m.layer(F.pad(T(x[..., 2:]), (3, 0, 1, 1)))),
}


def cut_or_padded(name, both):
    padding, step = both[name]
    torch.manual_seed(0)
    layer = nn.Conv1d(D, D, 4, padding=padding, groups=D, dilation=padding // 3 if padding else 1)
    return Convolved(layer.double(), lambda m, x: T(step(m, x))).double()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_convolution_fetches_the_rows_before_a_shard_and_nothing_else(name):
    """And has rows of n as all else has, not of n + 3: nothing is laid out anew behind it."""
    p, layout = case(CAUSAL, name)
    assert_only_rows_beside_a_shard_are_fetched(cut_or_padded(name, CAUSAL), p, layout)


def assert_only_rows_beside_a_shard_are_fetched(module, p, layout):
    verdict = validate(p, module, *inputs(12), layout=layout)
    assert not verdict.wrong, verdict.wrong
    fetches = verdict.graph.graph.find_nodes(op="call_function", target=operators.fetch_rows.default)
    assert {OpCall.of(node)["form"] for node in fetches} <= {"edges", "halo"}


def test_zeros_in_front_of_rows_that_are_not_the_last_dim_are_not_made():
    """Of [B, 1, S, D] as a picture: two rows of zeros, and channels that the kernel pads itself."""
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 1, 3, padding=(0, 1)).double()
    module = Convolved(layer, lambda m, x: m.layer(F.pad(x[:, None], (0, 0, 2, 0)))[:, 0]).double()
    assert_only_rows_beside_a_shard_are_fetched(module, 2, "contiguous")


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_other_padding_is_made(name):
    p, layout = case(NOT_CAUSAL, name)
    verdict = validate(p, cut_or_padded(name, NOT_CAUSAL), *inputs(12), layout=layout)
    assert not verdict.wrong, verdict.wrong
    assert verdict.report.sharded_fraction == 1.0


def test_of_open_length_a_causal_convolution_is_one_operator():
    """It fetches what it needs itself, so one graph serves the second length and the third."""
    calls = [inputs(N), inputs(N + 2), inputs(N - 3)]
    _first, found = run_over(cut_or_padded("the end cut", CAUSAL), calls, 2).reports
    assert [gather.op for gather in found.gathers] == ["output"] and found.sharded_fraction == 1.0


class Doubled(nn.Module):
    """Twice as many rows, and the means of two."""

    def __init__(self, **how):
        super().__init__()
        self.more = nn.ConvTranspose1d(D, D, 2, stride=2, **how)

    def forward(self, x):
        return F.avg_pool1d(self.more(x), 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", [{}, {"groups": 2, "bias": False}])
@pytest.mark.parametrize("p, layout", [(2, "zigzag"), (3, "contiguous")])
def test_rows_that_a_kernel_as_long_as_its_stride_makes(how, p, layout):
    torch.manual_seed(0)
    verdict = validate(p, Convolved(Doubled(**how)).double(), *inputs(N), layout=layout)
    assert not verdict.wrong, verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.zoo
def test_such_rows_are_made_for_each_length():
    """Inductor lowers no convolution over rows whose number is known only when it runs."""
    torch.manual_seed(0)
    reports = run_over(Convolved(Doubled()).double(), [inputs(N), inputs(N + 2)], 2).reports
    assert [[gather.op for gather in report.gathers] for report in reports] == [["output"]] * 2
    assert "compiled for these sizes only" in reports[1].notes[-1]


def causal(m, x):
    """As state space models write it: pad both sides, cut the end off."""
    return T(F.silu(m.layer(T(x))[..., : x.shape[1]]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("p, layout", [(2, "zigzag"), (3, "contiguous"), (4, "zigzag")])
def test_causal_convolution(p, layout):
    torch.manual_seed(0)
    module = Convolved(nn.Conv1d(D, D, 4, padding=3, groups=D), causal).double()
    verdict = validate(p, module, *inputs(11), layout=layout)
    assert not verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_convolution_over_rows_and_channels():
    torch.manual_seed(0)
    module = Convolved(nn.Conv2d(1, 1, 3, padding=1), lambda m, x: m.layer(x[:, None])[:, 0]).double()
    verdict = validate(3, module, *inputs(N), layout="contiguous")
    assert not verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_convolution_to_a_few_rows_is_gathered():
    verdict = check(end=lambda m, x: F.conv1d(T(x), m.conv.weight, stride=5), n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["conv1d"]


STEPS = {
    "average pooling": lambda m, x: x + T(F.avg_pool1d(T(x), 3, 1, 1)),
    "average pooling of what is inside": lambda m, x: (
        x + T(F.avg_pool2d(T(x)[:, None], 3, 1, 1, count_include_pad=False)[:, 0])
        + F.pad(T(F.avg_pool1d(T(x), 4, 2, 1, count_include_pad=False)), (0, 0, 0, N - 6))
    ),
    "average of every two": lambda m, x: x + F.pad(T(F.avg_pool1d(T(x), 2)), (0, 0, 0, N - N // 2)),
    "max pooling, padded": lambda m, x: x + T(F.max_pool1d(T(x), 3, 1, 1)),
    "max pooling": lambda m, x: x + F.pad(T(F.max_pool1d(T(x), 3, 1)), (0, 0, 1, 1)),
    "unfold": lambda m, x: x + F.pad(x.unfold(1, 4, 1).sum(-1), (0, 0, 3, 0)),
    "cumsum": lambda m, x: x.cumsum(1),
    "cumsum of booleans": lambda m, x: x * (x > 0).cumsum(1),
    "positions of the unmasked": lambda m, x: x + m.table((x[..., 0] > 0).long().cumsum(1)),
    "running mean": lambda m, x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None],
    "cumsum behind heads": lambda m, x: T(T(x.view(*x.shape[:2], H, -1)).cumsum(-2)).flatten(2),
    "a row before": lambda m, x: torch.cat([m.vector.expand(x.shape[0], 1, D), x], 1)[:, :-1],
    "zeros before": lambda m, x: m.linear(torch.cat([torch.zeros_like(x[:, :2]), x[:, :-2]], 1)),
    "turned by cat": lambda m, x: m.linear(torch.cat([x[:, 4:], x[:, :4]], 1)),
    "three parts": lambda m, x: torch.cat([x[:, :1], m.linear(x[:, 1:-1]), x[:, -1:]], 1),
    "sums of segments": lambda m, x: (
        (lambda at: x + torch.zeros(2, 5, D).double().scatter_add(1, at, x).gather(1, at))(segments(x))
    ),
    "sums of segments, as long": lambda m, x: torch.zeros_like(x).scatter_add(1, segments(x), x) + x,
    "added by index": lambda m, x: (
        x + m.vector.expand(2, 5, D).index_add(1, segments(x)[0, :, 0], x, alpha=2).sum(1, keepdim=True)
    ),
    "counted by index": lambda m, x: (
        x / torch.ones(2, 4).double().scatter_add(1, 1 * (x[..., 0] > 0), x.abs()[..., 1])[:, :1, None]
    ),
    "a longer sequence": lambda m, x: torch.cat([x, m.linear(x)], 1)[:, 3 : 3 + x.shape[1]],
}  # fmt: skip


def segments(x):
    """Of three rows each, [B, S, D]."""
    return (torch.arange(x.shape[1]) // 3)[None, :, None].expand_as(x)


def written(write):
    def step(m, x):
        y = m.linear(x)
        write(m, y, x)
        return y

    return step


def put(y, place, value):
    y[place] = value


WRITES = {
    "a row is zeroed": written(lambda m, y, x: put(y, (slice(None), 0), 0)),
    "the last row": written(lambda m, y, x: put(y, (slice(None), -1), m.vector)),
    "the first rows": written(lambda m, y, x: put(y, (slice(None), slice(2)), m.vector)),
    "rows from elsewhere": written(lambda m, y, x: put(y, (slice(None), slice(1, None)), x[:, :-1])),
    "channels": written(lambda m, y, x: put(y, (..., slice(3)), x[..., 3:6])),
    "one channel": written(lambda m, y, x: put(y, (..., 2), x[..., 1])),
    "where a mask of rows says": written(lambda m, y, x: put(y, x[..., 0] > 0.2, 0.5)),
    "where a mask of rows says, by a parameter": written(lambda m, y, x: put(y, x[..., 0] > 0.2, m.vector[0])),
    "where a mask of the whole says": written(lambda m, y, x: put(y, x > 0.2, 0.0)),
    "places padded, of every sample": written(lambda m, y, x: put(y, (slice(None), torch.arange(x.shape[1]) > 3), 1.5)),
    "rows of zeros": lambda m, x: x * torch.slice_scatter(torch.zeros(2, N, D).double(), m.linear(x)[:, :-1], 1, 1),
    "every second row": written(lambda m, y, x: put(y, (slice(None), slice(0, None, 2)), 0)),
    "rows of a parameter": lambda m, x: x * torch.slice_scatter(m.vector.expand(2, N, D), x[:, :-2], 1, 2),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", {**STEPS, **WRITES})
def test_steps(name):
    steps = {**STEPS, **WRITES}
    p, layout = case(steps, name)
    verdict = check(steps[name], p=p, layout=layout, n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


class Padded(nn.Module):
    """Attended rows in the first places of a longer output, and of a cache for more samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(3, 4 * N, D).double())

    def forward(self, x):
        rows = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        self.cache[:2, 1 : 1 + N] = rows.detach()
        padded = torch.zeros(2, 4 * N, D).double()
        padded[:, :N] = rows
        return padded


def test_of_what_is_kept_whole_the_rows_that_are_written_are_gathered():
    verdict = validate(3, Padded(), inputs(N)[0])
    assert not verdict.wrong
    assert {(gather.op, gather.bytes) for gather in verdict.report.gathers} == {("slice_scatter", 2 * N * D * 8)}


def test_the_convolution_of_a_shard_is_one_of_its_chunks():
    torch.manual_seed(0)
    verdict = validate(2, Convolved(CONVOLUTIONS["padded"]()).double(), *inputs(N), layout="zigzag")
    assert sum(op_name(node) == "conv1d" for node in verdict.graph.graph.nodes) == 2


def test_every_rank_gives_and_takes_or_all_that_is_seen_is_fetched():
    """A message that the graph of one rank does not need would be dropped there, and the others would wait for it."""
    seen = seen_of_all(window_rows(24, 1, -3, 4), "contiguous", 24, 3)
    assert seen[0] == Seen(((True, 5, 8),), 3, (((False, 0, 3), (True, 0, 8)),))
    assert seen[2] == Seen(((True, 0, 1),), 3, (((False, 0, 3), (True, 0, 8)),))  # gives a row that nobody wants
    assert seen_of_all(window_rows(24, 1, 0, 4), "contiguous", 24, 3)[2].chunks == (((True, 0, 8), (False, 0, 3)),)
    assert seen_of_all(window_rows(13, 2, 0, 2), "contiguous", 26, 3) is None  # the first rank lacks a row, others none
    assert seen_of_all(window_rows(24, 1, -3, 7), "contiguous", 24, 3) is None  # mostly others' rows
