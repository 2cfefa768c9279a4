"""Branches that data decide, as mixtures of experts have them, in one graph: what one that is not taken picks has no
rows, and what would be felt all the same is left to a graph break."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.frontend.data_sizes.traced_again import trace_with_sizes, traces_sizes


# ---- the graph -------------------------------------------------------------------------------------------------------
def traced(program, x, caplog):
    """The graph that comes of it, or None, after its values were compared with those of eager; and what was refused."""
    graphs = []

    @traces_sizes(lambda: True)
    def backend(gm, _inputs):
        trace_with_sizes(gm, 2)
        graphs.append(gm)
        return gm

    teach_dynamo()
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, logger="ringopt"):
        compiled = torch.compile(program, backend=backend)
        for values in (x, -x, x.abs(), torch.zeros_like(x)):
            assert torch.equal(compiled(values), program(values))
    return graphs, caplog.text


def adds_where_positive(x):
    y = torch.zeros_like(x)
    for number in (x.sum(1) > 0).nonzero():
        row = torch.where(x[number].squeeze(0) > 0)[0]
        y.index_add_(0, row, x[row] * 2)
    return y


def test_what_a_turn_picks_has_no_rows_where_it_is_not_taken(caplog):
    (graph,), _ = traced(adds_where_positive, torch.randn(2, 2), caplog)
    lines = [line.partition(";")[0].strip() for line in graph.code.splitlines()]
    begin = lines.index("y = torch.zeros_like(l_x_)")
    assert lines[begin : begin + 9] == [
        "y = torch.zeros_like(l_x_)",
        "sum_1 = l_x_.sum(1)",
        "gt = sum_1 > 0",
        "getitem_8 = gt[0]",
        "getitem = l_x_[slice(0, 1, None)]",
        "squeeze = getitem.squeeze(0)",
        "gt_1 = squeeze > 0",
        "logical_and = torch.logical_and(gt_1, getitem_8)",
        "where = torch.where(logical_and)",
    ]


def adds_where_some(asked):
    def program(x):
        y, row = torch.zeros_like(x), torch.where(x[:, 0] > 0)[0]
        if asked(len(row)):
            y.index_add_(0, row, x[row] * 2)
        return y

    return program


@pytest.mark.parametrize("asked", [lambda n: n > 0, lambda n: n >= 1, lambda n: n != 0, lambda n: 2 * n > 1])
def test_whether_there_is_a_row_may_be_asked_in_many_ways(asked, caplog):
    """A number of rows is whole: at least 1 where it is more than 0."""
    graphs, said = traced(adds_where_some(asked), torch.tensor([[0.5, 2.0], [-1.0, -3.0]]), caplog)
    assert len(graphs) == 1 and not said


# ---- what is felt where a branch is not taken ------------------------------------------------------------------------
def counts(x):
    count = 0
    for row in range(2):
        if (x[row] > 0).any():
            count += 1
    return x * count


def collects(x):
    found = [x]
    for row in range(2):
        if (x[row] > 0).any():
            found.append(x[row : row + 1])
    return torch.cat(found)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        if (x > 1).any():
            self.calls = self.calls + 1
        return x * 2


def writes_all(x):
    y = torch.zeros_like(x)
    if (x > 1).any():
        y.add_(1)
    return y


def writes_other_rows(x):
    y = torch.zeros_like(x)
    if (x > 1).any():
        y[torch.tensor([0])] += 1
    return y


def writes_several(x):
    y = torch.zeros_like(x)
    if (x > 1).any():
        torch._foreach_add_([y], 1.0)
    return y


def writes_through_a_view(x):
    y = torch.zeros_like(x)
    rows = y.view(-1)
    if (x > 1).any():
        F.relu(rows.sub_(1), inplace=True)
    return y


def returns(x):
    if (x > 1).any():
        return x + 1
    return x


def other_in_both(x):
    if (x > 1).any():
        x = x * 2
        y = x + 1
    else:
        y = x - 1
    return y


def leaves_a_loop(x):
    y = torch.zeros_like(x)
    for number in (x.sum(1) > 0).nonzero():
        row = torch.where(x[number].squeeze(0) > -9)[0]
        y.index_add_(0, row, x[row])
        break
    return y


def numbers_its_turns(x):
    y = torch.zeros_like(x)
    for turn, number in enumerate((x.sum(1) > 0).nonzero()):
        row = torch.where(x[number].squeeze(0) > 0)[0]
        y.index_add_(0, row, x[row] + turn)
    return y


def lists_them(x):
    return x * len([number for number in (x.sum(1) > 0).nonzero()])


def reads_them_apart(x):
    found = list((x.sum(1) > 0).nonzero())
    return x * len(found)


def largest_of_none(x):
    y = torch.zeros_like(x)
    mine = x[:, 0] > 0
    if mine.any():
        y[mine] += x[mine] / x[mine].max()
    return y


def needs_two_rows(x):
    y, row = torch.zeros_like(x), torch.where(x[:, 0] > 0)[0]
    if len(row) >= 2:
        y.index_add_(0, row, x[row])
    return y


def until_small(x):
    while x.abs().max() > 0.1:
        x = x / 2
    return x


def forgets_what_was_hit(x):
    y, positive = torch.zeros_like(x), x.sum(1) > 0
    hit = positive.nonzero()
    positive.logical_not_()
    for number in hit:
        row = torch.where(x[number].squeeze(0) > -9)[0]
        y.index_add_(0, row, x[row])
    return y


def counts_again(x):
    y, found = torch.zeros_like(x), (x > 0).sum()
    some = found.item() > 0
    found.zero_()
    if some:
        y.index_add_(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0])
    return y


def writes_its_mask(x):
    y, mine = torch.zeros_like(x), x[:, 0] > 0
    if (x > 1).any():
        y[mine] += x[mine]
        mine.logical_not_()
        y[mine] -= x[mine]
    return y


def another_mode(x):
    x = x.detach().requires_grad_()
    if (x > 1).any():
        torch.set_grad_enabled(False)
    y = x * 2
    graph = float(y.requires_grad)
    torch.set_grad_enabled(True)
    return y.detach() * graph


@pytest.mark.parametrize(
    "program, why",
    [
        (counts, "changes what Python holds: count"),
        (collects, "changes what Python holds: a list"),
        (Remembers(), "changes what Python holds: calls"),
        (writes_all, "other than to rows that it picks: add"),
        (writes_other_rows, "other than to rows that it picks: setitem"),
        (writes_several, "calls _foreach_add, of which it is not known what it writes"),
        (writes_through_a_view, "other than to rows that it picks: sub"),
        (returns, "does not go on where the program goes on without it"),
        (other_in_both, "does not go on where the program goes on without it"),
        (leaves_a_loop, "the loop ends early, or its rows are not read one by one"),
        (numbers_its_turns, "changes what Python holds: start"),
        (lists_them, "changes what Python holds: a listiterator, a list"),
        (reads_them_apart, "the loop ends early, or its rows are not read one by one"),
        (largest_of_none, "calls max, which has no result without rows"),
        (needs_two_rows, "has a condition on a number that is read from data"),
        (until_small, "does not go on where the program goes on without it"),
        (forgets_what_was_hit, "that is written in place: positive"),
        (counts_again, "that is written in place: found"),
        (writes_its_mask, "that is written in place: mine"),
        (another_mode, "changes autocast or grad mode"),
    ],
)
def test_what_is_felt_all_the_same_breaks_the_graph_as_ever(program, why, caplog):
    _, said = traced(program, torch.tensor([[0.5, 2.0], [-1.0, -3.0]]), caplog)
    assert why in said


def test_the_rest_is_traced_without_the_branch(caplog):
    """Dynamo ends the graph there, and not where the sizes are."""

    def program(x):
        y = torch.zeros_like(x)
        y.index_add_(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0])
        if (x > 1).any():
            y = y @ y
        return y

    graphs, said = traced(program, torch.tensor([[0.5, 2.0], [-1.0, -3.0]]), caplog)
    assert "has a name stand for another tensor after it" in said
    assert any(node.target == torch.where for node in graphs[0].graph.nodes)


def test_a_branch_that_is_decided_by_an_element_of_an_arange_is_decided(caplog):
    """As in Qwen3-Next of transformers 4."""

    def program(x):
        places = torch.arange(0, x.shape[0])
        if places[0] > 0 or torch.all(x == 1):
            x = x + 1
        return x

    _, said = traced(lambda x: x * 2 if torch.arange(0, len(x))[0] > 0 else x, torch.randn(2, 2), caplog)
    assert not said
    traced(program, torch.randn(2, 2), caplog)
