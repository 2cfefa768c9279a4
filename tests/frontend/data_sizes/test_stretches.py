"""Mixtures of experts in the spellings that people write, whose sizes data decide: each rank works on its own tokens;
what is no work on single tokens is done by every rank, and is as exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference, run
from tests.harness.translation import validate

D, EXPERTS, CHOSEN, HEADS, ROWS = 8, 4, 2, 2, 13


class Experts(nn.Module):
    """Attention, then of each token the sum of what its experts make of it, which `go` spells. The last expert has no
    token, and others have none on some rank."""

    def __init__(self, go):
        super().__init__()
        torch.manual_seed(0)
        self.go = go
        self.qkv, self.router = nn.Linear(D, 3 * D), nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.SiLU()) for _ in range(EXPERTS)])
        self.weight = nn.Parameter(torch.randn(EXPERTS, D, D) / 3)
        with torch.no_grad():
            self.router.bias[-1] = -1e6

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, D)
        weights, chosen = self.router(x).view(b * n, EXPERTS).softmax(-1).topk(CHOSEN, -1)
        return x + self.go(self, x.view(b * n, D), weights, chosen).view(b, n, D)


def written_in_place(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        row, nth = torch.where(chosen == number)
        out[row] += weights[row, nth, None] * expert(x[row])
    return out


def masks_by_expert(m, x, weights, chosen):
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        nth, row = torch.where(mask[number])
        y = F.linear(x[None, row].reshape(-1, D), m.weight[number]).relu()
        out.index_add_(0, row, y * weights[row, nth, None])
    return out


def boolean_masks(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        mine = (chosen == number).any(-1)
        rate = (weights * (chosen == number)).sum(-1)
        out[mine] = out[mine] + expert(x[mine]) * rate[mine].unsqueeze(-1)
    return out


def masks_of_sequences(m, x, weights, chosen):
    """Of [B, S]: a token may be along either dim."""
    x, chosen = x.view(2, -1, D), chosen.view(2, -1, CHOSEN)
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        mine = (chosen == number).any(-1)
        out[mine] = out[mine] + expert(x[mine])
    return out.view(-1, D)


def in_pieces(m, x, weights, chosen, mixed=False, wrong=False):
    zeros = torch.zeros([x.shape[0], EXPERTS], dtype=x.dtype)
    counts = zeros.scatter(1, chosen.flip(1) if wrong else chosen, 1).long().sum(0)
    sizes = (counts.flip(0).flip(0) if wrong else counts).tolist()
    order = chosen.flatten().sort(0)[1]
    row = order.div(CHOSEN, rounding_mode="trunc")
    parts = [F.linear(part, w) for part, w in zip(x[row].split(sizes), m.weight, strict=True)]
    parts = [part - part.sum(0) for part in parts] if mixed else parts
    y = torch.cat(parts) * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, row, y)


def pieces_put_back(m, x, weights, chosen):
    """As queries of experts are: a token is there as often as it has experts, until it is summed."""
    counts, order = F.one_hot(chosen, EXPERTS).sum((0, 1)).tolist(), chosen.flatten().sort(0)[1]
    parts = x[order // CHOSEN].split(counts)
    y = torch.cat([F.linear(parts[i], m.weight[i]).tanh() for i in range(EXPERTS)])
    y = torch.zeros(x.shape[0] * CHOSEN, D, dtype=x.dtype).index_add(0, order, y)
    return (y.view(-1, CHOSEN, D) * weights.unsqueeze(-1)).sum(1)


def columns_of_numbers(m, x, weights, chosen):
    """What `nonzero` finds, as a vector (as tokens that are no padding are found), and in columns."""
    row = (chosen[:, 0] != 1).nonzero().flatten()
    out = torch.zeros_like(x).index_put((row,), m.experts[0](x[row]))
    row, nth = (chosen == 2).nonzero().unbind(-1)
    return out.index_add(0, row, m.experts[2](x[row]) * weights[row, nth, None])


def numbers_are_set(m, x, weights, chosen):
    """Experts as a mask (top-p routing of TimeFilter): what is set is a number of the program, in a tensor."""
    mask = torch.zeros(x.shape[0], EXPERTS, dtype=torch.bool)
    row, nth = (weights > 0.3).nonzero(as_tuple=True)
    mask[row, chosen[row, nth]] = True
    made = torch.stack([expert(x) for expert in m.experts], 1)
    return (made * mask.unsqueeze(-1)).sum(1)


def batch(rows=ROWS):
    return torch.randn(2, rows, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


@pytest.mark.sample(4)
@pytest.mark.parametrize("p, layout", [(2, "zigzag"), (3, "contiguous"), (4, "contiguous")])
@pytest.mark.parametrize(
    "go",
    [
        *(written_in_place, masks_by_expert, boolean_masks, masks_of_sequences, in_pieces, pieces_put_back),
        *(columns_of_numbers, numbers_are_set),
    ],
)
def test_each_rank_works_on_its_own_tokens(go, p, layout):
    verdict = validate(p, Experts(go).double(), batch(), layout=layout)
    assert not verdict.wrong
    assert verdict.report.sharded_fraction == 1 and {each.op for each in verdict.report.gathers} == {"output"}


def mixed_on_the_way(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        row, nth = torch.where(chosen == number)
        out[row] += weights[row, nth, None] * (expert(x[row]) - x[row].sum(0))
    return out


def numbered(m, x, weights, chosen):
    """Where a token stands goes into it."""
    row = torch.where(chosen[:, 0] == 0)[0]
    return torch.zeros_like(x).index_add(0, row, x[row] * row.unsqueeze(-1))


def beside_others(m, x, weights, chosen):
    """Tokens meet those of another expert, of which there are as many."""
    first, second = (torch.where(chosen[:, nth] == nth)[0] for nth in (0, 0))
    return torch.zeros_like(x).index_add(0, first, x[second.flip(0)])


def mixed_pieces(m, x, weights, chosen):
    return in_pieces(m, x, weights, chosen, mixed=True)


def other_counts(m, x, weights, chosen):
    """They are right, but who reads the program does not know it."""
    return in_pieces(m, x, weights, chosen, wrong=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("go", [mixed_on_the_way, numbered, beside_others, mixed_pieces, other_counts])
def test_what_is_no_work_on_single_tokens_is_done_whole(go):
    verdict = validate(2, Experts(go).double(), batch())
    assert not verdict.wrong
    assert "picked" in {each.op for each in verdict.report.gathers}


def on_rank(go, inner_backend, lengths=(13, 10)):
    """Two lengths, which are two graphs, or those that are given; loss and all gradients."""
    torch._dynamo.reset()
    model, before = Experts(go).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner_backend})
    wrong = [difference(run(compiled, model, {"x": batch(n)}), run(model, model, {"x": batch(n)})) for n in lengths]
    return worst_of(*wrong), [(report.sharded_fraction, report.notes) for report in ringopt.reports()[before:]]


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.zoo)])
@pytest.mark.parametrize("go", [masks_by_expert, pytest.param(in_pieces, marks=pytest.mark.zoo)])
def test_dynamo_does_not_break_there(ranks, go, inner_backend):
    for error, reports in ranks(2, on_rank, go, inner_backend):
        assert error < 1e-10
        assert [share for share, _ in reports] == [1, 1] and "graph break" not in str(reports)


def unforetold(m, x, weights, chosen):
    """As many as there are different ones, or the largest of them says."""
    numbers = chosen[:, 0]
    _, which, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    often = counts[which] + torch.bincount(numbers, minlength=2)[numbers]
    return x * often[:, None] + torch.masked_select(weights, chosen > 1).mean()


def test_beside_numbers_that_nothing_foretells_attention_is_sharded(ranks):
    for error, reports in ranks(2, on_rank, unforetold, "aot_eager"):
        assert error < 1e-10 and [share for share, _ in reports] == [1, 1]
        assert "is not counted: its sizes follow from what the data pick: aten._unique2" in str(reports)


def left_to_python(m, x, weights, chosen):
    """No trace can have it: what is done depends on how many there are."""
    row = torch.where(chosen[:, 0] == 0)[0]
    return x * weights[:, :1] * len(row) if row.numel() % 2 else x * weights[:, 1:]


def test_what_cannot_be_one_graph_breaks_as_ever(ranks):
    for error, reports in ranks(2, on_rank, left_to_python, "aot_eager", [13]):
        assert error < 1e-10 and "ends at a graph break: Dynamic shape operator" in str(reports)


def aligned(m, x, weights, chosen):
    """CTC: torch has no shapes of it for a trace, whatever Dynamo is told of sizes."""
    targets, lengths = torch.ones(2, 3, dtype=torch.long), torch.full((2,), len(x) // 2)
    return x * F.ctc_loss(x.view(2, -1, D).log_softmax(-1).transpose(0, 1), targets, lengths, (targets > 0).sum(1))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="zeros for what is not used behind a break, as with aot_eager")
def test_nor_is_it_traced_over_and_over(ranks):
    for error, reports in ranks(2, on_rank, aligned, "aot_eager"):
        assert error < 1e-10
        assert len(reports) <= 6  # of each length what stands before the loss, and what follows
