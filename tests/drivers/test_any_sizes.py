"""A graph for any sizes that leaves work whole is made for the sizes at hand, as long as few sizes come."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from ringopt.drivers import compile as compile_driver
from ringopt.drivers.any_sizes import is_much_whole, saves_work
from ringopt.reporting.figures import MatrixWork
from tests.harness.errors import worst_of
from tests.harness.lengths import run_over

SAID = "compiled for these sizes only: for any, every rank would have more of it whole"


class Picture(nn.Module):
    """Attention over all pixels, then a convolution: rows of pixels are shared where h is a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(4, 12, dtype=torch.float64)
        self.conv = nn.Conv2d(4, 32, 5, padding=2, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.qkv(x.flatten(2).mT).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3)
        return self.conv(y.reshape(x.shape))


def pictures(*sizes: int) -> list[tuple[torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, 4, n, n, dtype=torch.float64),) for n in sizes]


def test_pictures_of_few_sizes_have_a_graph_each():
    reports = run_over(Picture(), pictures(6, 8, 10, 8), 2).reports
    assert [report.sharded_fraction for report in reports] == [1.0, 1.0, 1.0]
    assert [SAID in report.notes for report in reports] == [False, True, True]


@pytest.mark.zoo
def test_of_many_sizes_the_last_graph_serves_all():
    reports = run_over(Picture(), pictures(6, 8, 10, 12, 14, 16, 18), 2).reports
    assert [report.sharded_fraction for report in reports[:4]] == [1.0] * 4
    assert len(reports) == 5 and reports[4].sharded_fraction < 1
    assert any(note.startswith("serves any size 2 of x") for note in reports[4].notes)


def test_sizes_that_the_program_opens_stay_open():
    marked = pictures(8, 10)
    for (x,) in marked:
        torch._dynamo.mark_dynamic(x, 2)
    (x,), (y,) = pictures(6, 8)  # of which the second is compiled anew: it wants a gradient
    opened = [(x,), (y.requires_grad_(),)]
    told = run_over(Picture(), opened, 2, dynamic=True), run_over(Picture(), [*pictures(6), *marked], 2)
    assert [len(found.reports) for found in told] == [2, 2]
    for report in (told[0].reports[-1], told[1].reports[-1]):
        assert report.sharded_fraction < 1 and any("serves any size" in note for note in report.notes)


def test_work_is_weighed_by_rank():
    assert not is_much_whole(MatrixWork(whole=10, total=100), 2)  # 55 a rank, 50 at best
    assert is_much_whole(MatrixWork(whole=10, total=100), 8)  # 21 and 12.5
    assert is_much_whole(None, 2)
    assert saves_work(MatrixWork(whole=0, total=99), MatrixWork(whole=50, total=100), 2)
    assert not saves_work(MatrixWork(whole=45, total=99), MatrixWork(whole=50, total=100), 2)
    assert not saves_work(None, MatrixWork(whole=50, total=100), 2)
    assert saves_work(MatrixWork(whole=0, total=99), None, 2)


def on_rank(name):
    """Where rank 1 is of another opinion in `name`."""
    torch._dynamo.reset()
    model, before, kept = Picture(), len(ringopt.reports()), getattr(compile_driver, name)
    if dist.get_rank() == 1:
        setattr(compile_driver, name, lambda *given: False)
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    try:
        wrong = [float((compiled(x) - model(x)).detach().abs().max()) for (x,) in pictures(6, 8, 10)]
    finally:
        setattr(compile_driver, name, kept)
    return worst_of(*wrong), [SAID in report.notes for report in ringopt.reports()[before:]]


@pytest.mark.parametrize("name", ["is_much_whole", "saves_work"])
def test_ranks_decide_alike(ranks, name):
    for wrong, fixed in ranks(2, on_rank, name):
        assert wrong < 1e-10 and fixed == [False, False]


def test_what_is_gathered_counts_as_work():
    work, gathers = MatrixWork(whole=0, total=100), replace(MatrixWork(whole=0, total=100), gathered=1)
    assert is_much_whole(gathers, 2) and not is_much_whole(work, 2)
    assert saves_work(work, gathers, 2) and not saves_work(gathers, gathers, 2)


class Pairs(nn.Module):
    """Products along columns of pairs of tokens, attention along rows and columns (Jumper et al. 2021): of known sizes
    there is an all-to-all between them."""

    def forward(self, x):
        pairs = x[:, :, None] + x[:, None]
        pairs = pairs + torch.einsum("bikc,bjkc->bijc", pairs.sigmoid(), pairs)
        pairs = pairs + torch.einsum("bkic,bkjc->bijc", pairs.sigmoid(), pairs)
        for _ in range(2):
            pairs = (pairs + F.scaled_dot_product_attention(pairs, pairs, pairs)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x) + pairs.mean(2)


def test_pairs_of_tokens_are_turned_and_not_gathered():
    calls = [(torch.randn(2, n, 4, dtype=torch.float64),) for n in (6, 9)]
    reports = run_over(Pairs(), calls, 2).reports
    assert [[gather.op for gather in report.gathers] for report in reports] == [["einsum", "output"]] * 2
