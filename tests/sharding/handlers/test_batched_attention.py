"""Windows of a sequence, folded into the batch or put in the place of heads: each rank attends within its own, also
where the mask asks which window it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.frontend.capture import capture
from ringopt.options import Options
from ringopt.passes import UNDERSTAND, with_options
from ringopt.pipeline import Context, Pipeline
from tests.harness.models import difference, run
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, captured, validate, values_and_gradients, with_seed
from tests.harness.translation import difference as different

D, H, W = 8, 2, 4  # width, heads, rows of a window


class Windows(nn.Module):
    """Attention over n rows, then within windows of W of them, two heads folded with the batch as Swin has it."""

    def __init__(self, mask, n=32, **how):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.mask, self.how = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D), mask, how
        self.bias = nn.Parameter(torch.randn(n // W, H, W, W))
        zones = torch.arange(n).add(W // 2).floor_divide(n).view(-1, W)  # where rows meet that are no neighbours
        hidden = zones[:, :, None] != zones[:, None, :]
        self.register_buffer("shifted", torch.zeros(n // W, W, W).masked_fill(hidden, -100.0))

    def whole(self, x):
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x, seen):
        x = x + self.whole(x)
        b, n, _ = x.shape
        windows = x.roll(-W // 2, 1).reshape(b * n // W, W, D)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.out(windows).chunk(3, -1))
        y = self.mask(self, q, k, v, seen).transpose(1, 2).reshape(b, n, D)
        return (x + y.roll(W // 2, 1)).square().mean()


def spelled(add, soft=lambda scores: scores, weigh=lambda weights: weights):
    """Attention in products, with what `add` gives added to scores [b, windows, H, W, W]."""

    def attend(m, q, k, v, seen):
        scores = soft(q @ k.mT / 2).unflatten(0, (-1, len(m.shifted)))
        return weigh((scores + add(m, seen)).flatten(0, 1).softmax(-1)) @ v

    return attend


def padded(m, seen):
    """Keys that are padding, by batch row, window and row in it."""
    return torch.zeros(()).double().masked_fill(~seen.unflatten(1, (-1, W))[:, :, None, None], -1e9)


MASKS = {
    "shifted": spelled(lambda m, seen: m.shifted[:, None]),
    "a bias of each window": spelled(lambda m, seen: m.bias),
    "padding": spelled(padded),
    "shifted, a bias and padding": spelled(lambda m, seen: m.shifted[:, None] + m.bias + padded(m, seen)),
    "shifted, softcap": spelled(lambda m, seen: m.shifted[:, None], lambda scores: 5 * torch.tanh(scores / 5)),
    "shifted, within a softcap": lambda m, q, k, v, seen: (
        (
            (5 * torch.tanh(((q @ k.mT / 2).unflatten(0, (-1, len(m.shifted))) + m.shifted[:, None]) / 5)).flatten(0, 1)
        ).softmax(-1)
        @ v
    ),
    "softcap alone": spelled(lambda m, seen: 0.0, lambda scores: 5 * torch.tanh(scores / 5)),
    "given to SDPA": lambda m, q, k, v, seen: F.scaled_dot_product_attention(
        q, k, v, m.shifted[:, None].repeat(len(q) // len(m.shifted), 1, 1, 1)
    ),
}


def inputs(b, n=32):
    seen = torch.ones(b, n, dtype=torch.bool)
    seen[-1, -6:] = False
    return torch.randn(b, n, D, dtype=torch.float64, requires_grad=True), seen


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MASKS)
def test_each_rank_has_its_windows(name):
    """8 and 16 windows: not all of 3 ranks have equally many."""
    p, b = ((3, 2), (2, 1))[list(MASKS).index(name) % 2]
    within(validate(p, Windows(MASKS[name]).double(), *inputs(b)))


def within(verdict):
    """Exact, all of it on shards, and nothing is exchanged for the second attention."""
    assert not verdict.wrong and not verdict.report.gathers, verdict.report
    assert verdict.report.sites[1].strategy == "none" and verdict.report.sharded_fraction == 1


def in_place_of_heads(m, q, k, v, seen, mask=lambda m: m.shifted + m.bias[:, 0], **how):
    """One head of windows [b, n / W, W, D]."""
    q, k, v = (x.transpose(1, 2).flatten(2).unflatten(0, (-1, len(m.shifted))) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, mask(m), **how)
    return y.flatten(0, 1).unflatten(-1, (H, -1)).transpose(1, 2)


def test_windows_in_the_place_of_heads():
    within(validate(3, Windows(in_place_of_heads).double(), *inputs(2)))


DROPPED = {
    "SDPA": lambda m, q, k, v, seen: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "in products, of shifted windows": spelled(lambda m, seen: m.shifted[:, None], weigh=lambda w: F.dropout(w, 0.5)),
    "in the place of heads": lambda m, q, k, v, seen: in_place_of_heads(m, q, k, v, seen, dropout_p=0.5),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("p, b", [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", DROPPED)
def test_the_same_weights_are_dropped_as_on_one_process(name, p, b):
    report = dropped_alike(p, Windows(DROPPED[name]).double(), inputs(b))
    assert report.sites[1].strategy == "none" and not report.gathers, report


def test_dilated_attention_of_windows_that_drops_weights_is_computed_whole():
    """What it drops is numbered from the first window on that it is given."""
    how = {"segment_lengths": (W,), "dilation_rates": (2,), "layout": "contiguous"}
    report = dropped_alike(2, Windows(DROPPED["SDPA"]).double(), inputs(2), **how)
    assert report.sites[1].strategy == "none" and {gather.op for gather in report.gathers} == {"attention"}, report


def dropped_alike(p, model, given, **options):
    """The report, after p ranks have been compared with one process, all with one seed."""
    gm, given = captured(model, *given)
    context = Context(Options(**options), mesh_of("pretend:0/1"))
    one = capture(gm, given).begin(context)
    Pipeline(with_options(UNDERSTAND, context.options)).run(one, context)
    expected = values_and_gradients(with_seed(one), given)
    made = [transform(gm, given, Options(**options), Seat(rank, p)) for rank in range(p)]
    graphs = [with_seed(one.graph) for one in made]
    for found in run_on_threads(p, lambda mesh: values_and_gradients(graphs[mesh.rank], given)):
        assert not different(expected, found)
    return made[0].report


@pytest.mark.zoo
def test_heads_of_dilated_attention_keep_rows_of_their_own():
    """Windows in the place of heads are not spread: which rows a head keeps, its number among all says."""
    given = inputs(2)
    how = {"segment_lengths": (W,), "dilation_rates": (2,)}
    model = Windows(lambda m, q, k, v, seen: in_place_of_heads(m, q, k, v, seen, lambda m: None)).double()
    (alone,) = validate(1, model, *given, **how).found
    assert not any(different(alone, found) for found in validate(3, model, *given, **how).found)


class Axes(nn.Module):
    """Attention down the columns of a picture, then along its rows, of which some end early."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.along = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)

    def attend(self, linear, x, mask=None):
        """[b, lines, n, D]"""
        q, k, v = (t.flatten(0, 1).unflatten(-1, (H, -1)).transpose(1, 2) for t in linear(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2).view_as(x)

    def forward(self, x, seen):
        """[b, r, c, D], and which columns of each batch row there are, [b, c]"""
        x = self.attend(self.down, x.transpose(1, 2)).transpose(1, 2)
        mask = seen[:, None, None, None].expand(-1, x.shape[1], -1, -1, -1).flatten(0, 1)
        return self.attend(self.along, x, mask)


def picture(rows=7, columns=5):
    seen = torch.ones(2, columns, dtype=torch.bool)
    seen[1, -2:] = False
    return torch.randn(2, rows, columns, D, dtype=torch.float64, requires_grad=True), seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [2, 3])
def test_lines_of_a_picture(p):
    """Both kinds of lines are in the batch, one after the other."""
    verdict = validate(p, Axes().double(), *picture())
    assert not verdict.wrong and verdict.report.sharded_fraction == 1
    assert {gather.op for gather in verdict.report.gathers} == {"output"}, verdict.report


def converted(file, given):
    module = ringopt.load(file).module()
    return run(lambda x, seen: module(x, seen), module, given)


@pytest.mark.zoo
def test_a_file_for_any_number_of_ranks(ranks, tmp_path):
    """How many lines a rank has is known when it runs."""
    x, seen = picture()
    given = {"x": x.detach(), "seen": seen}
    program = torch.export.export(Axes().double(), tuple(given.values()))
    torch.export.save(ringopt.convert(program), tmp_path / "axes.pt2")
    whole = program.module()
    wanted = run(lambda x, seen: whole(x, seen), whole, given)
    for p in (1, 3):
        assert max(difference(found, wanted) for found in ranks(p, converted, tmp_path / "axes.pt2", given)) < 1e-9
