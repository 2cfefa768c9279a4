"""Loops over experts as people write them, which branch on the data: one graph, in which each rank works on its own
tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ringopt
from tests.frontend.data_sizes.test_stretches import EXPERTS, D, Experts, batch
from tests.harness.errors import worst_of
from tests.harness.models import difference, run


def over_those_hit(m, x, weights, chosen):
    """transformers 4: modules by a number that is a tensor."""
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        nth, row = torch.where(mask[number].squeeze(0))
        out.index_add_(0, row, m.experts[number](x[None, row].reshape(-1, D)) * weights[row, nth, None])
    return out


def with_one_class_more(m, x, weights, chosen):
    """As GPT-OSS: a class that stands for no expert, weights of all experts in one tensor, no gradient of masks."""
    rates, out = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights), torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen, EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for number in hit[:]:
        number = number[0]
        if number == EXPERTS:
            continue
        with torch.no_grad():
            _, row = torch.where(mask[number])
        out.index_add_(0, row, (x[row] @ m.weight[number]).relu() * rates[row, number, None])
    return out


def by_plain_numbers(m, x, weights, chosen):
    """As LongCat: an expert may be the identity."""
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for which in torch.greater(mask.sum((-1, -2)), 0).nonzero(as_tuple=False):
        number = int(which.item())
        nth, row = torch.where(mask[number].squeeze(0))
        if row.numel() == 0:
            continue
        y = x[row] if number == 1 else F.linear(x[row], m.weight[number])
        out.index_add_(0, row, y * weights[row, nth, None])
    return out


def unless_empty(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        row, nth = torch.where(chosen == number)
        if row.numel() == 0:
            continue
        out[row] += weights[row, nth, None] * expert(x[row])
    return out


def where_any(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        mine = (chosen == number).any(-1)
        if mine.any():
            out[mine] += expert(x[mine]) * weights[mine].sum(-1, keepdim=True)
    return out


def not_in_place(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        row, nth = torch.where(chosen == number)
        if len(row) > 0:
            out = out.index_add(0, row, expert(x[row]) * weights[row, nth, None])
    return out


def by_a_count(m, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        mine = chosen == number
        if mine.sum().item() == 0:
            continue
        row, nth = torch.where(mine)
        out.index_add_(0, row, expert(x[row]) * weights[row, nth, None])
    return out


def one_in_another(m, x, weights, chosen):
    out = torch.zeros_like(x)
    if (chosen == 0).any():
        for number in range(2):
            mine = (chosen == number).any(-1)
            if mine.any():
                out[mine] += m.experts[number](x[mine]) * weights[mine].sum(-1, keepdim=True)
    if (weights > 2).any():
        out[chosen[:, 0] == 1] += 1
        for number in (chosen == 1).any(0).nonzero(as_tuple=True)[0]:
            row = torch.where(chosen[:, number] == 1)[0]
            out.index_add_(0, row, x[row])
    return out


SPELLINGS = [
    over_those_hit, with_one_class_more, by_plain_numbers, unless_empty, where_any, not_in_place, by_a_count,
    one_in_another,
]  # fmt: skip


def on_rank(go, lengths=(13, 10)):
    """At lengths of which the second opens it; loss and all gradients, of which those of an expert without tokens are
    None. What ringopt says of the graphs."""
    torch._dynamo.reset()
    model, before = Experts(go).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    wrong = [difference(run(compiled, model, {"x": batch(n)}), run(model, model, {"x": batch(n)})) for n in lengths]
    return worst_of(*wrong), [report.sharded_fraction for report in ringopt.reports()[before:]]


@pytest.mark.sample(8)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("go", SPELLINGS)
def test_each_rank_works_on_its_own_tokens_in_one_graph(ranks, go, p):
    for error, shares in ranks(p, on_rank, go):
        assert error < 1e-10
        assert shares == [1, 1]


def keeps_count(m, x, weights, chosen):
    """What Python holds differs by the data."""
    out, used = torch.zeros_like(x), 0
    for number, expert in enumerate(m.experts):
        mine = (chosen == number).any(-1)
        if mine.any():
            used += 1
            out[mine] += expert(x[mine]) * weights[mine].sum(-1, keepdim=True)
    return out / used


def reasons(go):
    error, _ = on_rank(go, [13])
    return error, [note for report in ringopt.reports() for note in report.notes]


def test_the_report_says_why_a_branch_is_no_part_of_the_graph(ranks):
    for error, notes in ranks(2, reasons, keeps_count):
        assert error < 1e-10
        assert any("; a branch changes what Python holds: used; " in note for note in notes)
