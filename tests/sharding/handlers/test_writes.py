"""Rows written by number, strided or through views of a part: nothing is gathered but as many rows as are written."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from tests.harness.translation import validate, validate_function
from tests.sharding.programs import B, D, H, Model, case, check, inputs

N = 13
EACH = torch.arange(B)[:, None]
BACK = torch.arange(N - 1, -1, -1)

T = lambda x: x.transpose(1, 2)  # noqa: E731


def put(m, x, at, rows):
    y = m.linear(x)
    y[at] = rows
    return y


def every_second(m, x):
    y = torch.empty_like(x)
    y[:, ::2], y[:, 1::2] = m.linear(x[:, ::2]), x[:, 1::2]
    return y


def twice_as_many(m, x):
    y = x.new_zeros(B, 2 * N, D)
    y[:, ::2] = m.linear(x)
    return y[:, 5 : 5 + N]


def every_second_of_heads(m, x):
    y = torch.empty_like(x)
    heads, new = (t.view(B, -1, H, D // H).transpose(1, 2) for t in (y, m.linear(x)))
    heads[:, :, ::2], heads[:, :, 1::2] = new[:, :, ::2], 0.5
    return y


def narrowed(m, x):
    y = torch.zeros_like(x)
    y.narrow(1, -7, 6).copy_(m.linear(x)[:, :6])
    y.movedim(1, 0)[2:4] += 1
    return y + x


def among(rows, *numbers):
    return torch.tensor(numbers).view(1, -1, 1).expand_as(rows)


def windows_added(add):
    def step(m, x):
        seen = T(m.linear(T(x[:, :12].unfold(1, 4, 2).flatten(0, 1)).contiguous())).reshape(B, 5, D, 4)
        at = (2 * torch.arange(5)[:, None] + torch.arange(4)).flatten()
        return torch.cat([add(x.new_zeros(B, 12, D), at, seen.transpose(2, 3).reshape(B, 20, D)), x[:, 12:]], 1)

    return step


STEPS = {
    "every second row": every_second,
    "between zeros": twice_as_many,
    "every second row of heads": every_second_of_heads,
    "every fourth, one for all": lambda m, x: put(m, x, (slice(None), slice(2, None, 4)), m.vector),
    "every third, a number": lambda m, x: put(m, x, (slice(None), slice(1, None, 3)), 0.5),
    "few rows": lambda m, x: put(m, x, (slice(None), slice(1, None, 6)), x[:, :2]),
    "narrowed": narrowed,
    "index_fill": lambda m, x: m.linear(x).index_fill(1, torch.tensor([0, 3, 12]), 0.5),
    "index_fill by a value": lambda m, x: m.linear(x).index_fill(1, torch.tensor([0, 3]), m.vector[0]),
    "index_copy": lambda m, x: m.linear(x).index_copy(1, torch.tensor([5, 1]), x[:, :2]),
    "index_copy, a row twice": lambda m, x: x.index_copy(1, torch.tensor([5, 5]), m.vector.expand(B, 2, D)),
    "put, from the end": lambda m, x: put(m, x, (slice(None), torch.tensor([-1, 5])), m.vector),
    "put, for each of the batch": lambda m, x: put(m, x, (EACH, torch.tensor([[1, -2], [0, 7]])), x[:, 3:5]),
    "put, one index for both": lambda m, x: (lambda i: put(m, x, (i, i), m.vector))(torch.arange(B)),
    "put and added": lambda m, x: x.index_put((EACH, torch.tensor([[1, 1], [0, 7]])), m.vector, accumulate=True),
    "put into channels": lambda m, x: put(m, x, (..., torch.tensor([1, 3])), x[..., :2]),
    "filled channels": lambda m, x: m.linear(x).index_fill(2, torch.tensor([1, 3]), 0.5),
    "scattered number": lambda m, x: x.scatter(1, among(x[:, :2], 2, 4), 0.0),
    "scattered rows": lambda m, x: x.scatter(1, among(x[:, :2], 2, 4), m.linear(x[:, :2])),
    "windows by index_add": windows_added(lambda y, at, rows: y.index_add(1, at, rows)),
    "windows by scatter_add": windows_added(lambda y, at, rows: y.scatter_add(1, at[:, None].expand_as(rows), rows)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    p, layout = case(STEPS, name)
    verdict = check(STEPS[name], p=p, layout=layout, n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


ALL_ROWS = {
    "index_copy": lambda m, x: torch.zeros_like(x).index_copy(1, BACK, m.linear(x)),
    "index_put": lambda m, x: torch.zeros_like(x).index_put((EACH, BACK), m.linear(x)),
    "scatter": lambda m, x: torch.zeros_like(x).scatter(1, BACK.view(1, -1, 1).expand_as(x), m.linear(x)),
}


@pytest.mark.parametrize("op", ALL_ROWS)
def test_of_as_many_rows_as_there_are_only_what_is_written_is_gathered(op):
    p, layout = case(ALL_ROWS, op)
    verdict = check(ALL_ROWS[op], p=p, layout=layout, n=N)
    assert [gather.op for gather in verdict.report.gathers] == [op, "output"]


def test_a_table_in_which_rows_are_looked_up_stays_whole():
    """It is no sequence, and every rank would have it gathered again."""

    def seen_before(m, x):
        tokens = m.linear(x).argmax(-1)
        return x * (1 + x.new_zeros(B, 4 * N).scatter(1, tokens, 1.0)[:, None, :D])

    verdict = check(seen_before, p=2, n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["scatter", "output"]


def test_a_table_of_which_rows_are_written_stays_whole():
    """It has the rows that are written gathered, and is not spread for those."""

    def looked_up(m, x):
        table = x.new_zeros(9, D).index_copy(0, torch.arange(5), m.linear(x)[0, :5])
        return x + table[torch.arange(N) % 9]

    verdict = check(looked_up, p=2, n=N, layout="contiguous")
    assert [gather.op for gather in verdict.report.gathers] == ["index_copy", "output"]


def halves(x):
    y = torch.empty_like(x)
    first, second = y.chunk(2, 1)
    first.copy_(x[:, -first.shape[1] :])
    second.copy_(x[:, : second.shape[1]])
    return y


def thirds(x):
    y = x * 2
    y.split((2, 8, N - 10), 1)[1].mul_(3)
    y.tensor_split(3, 1)[-1].add_(1)
    return y


def pairs(x):
    y = torch.zeros_like(x)
    even, odd = y[:, 1:].view(B, (N - 1) // 2, 2, D).unbind(2)
    even.copy_(x[:, 1::2])
    odd.add_(x[:, :-1:2])
    return y


def interleaved(x):
    y = x.clone()
    first, second = y.chunk(2, -1)
    first.copy_(-second)
    return y


class WithoutGradient(nn.Module):
    """Autograd forbids writes through one of many views."""

    def __init__(self, step):
        super().__init__()
        self.model, self.step = Model(), step

    def forward(self, x, ids):
        x = self.model.attention(x + self.model.table(ids))
        with torch.no_grad():
            y = self.step(x)
        return self.model.attention(x + y)


@pytest.mark.sample(4)
@pytest.mark.parametrize("p, layout", [(2, "zigzag"), (3, "contiguous")])
@pytest.mark.parametrize("step", (halves, thirds, pairs, interleaved))
def test_through_one_of_many_views(step, p, layout):
    torch.manual_seed(0)
    verdict = validate(p, WithoutGradient(step).double(), *inputs(N), layout=layout)
    assert not verdict.wrong, verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_views_that_overlap_are_no_parts():
    def program(x):
        y = x * 2
        y.tensor_split((3, 1), 1)[2].mul_(2)
        return (y,)

    refusal = validate_function(2, program, [torch.randn(B, N, D, dtype=torch.float64)]).report.refusal
    assert "writes to memory that several views share" in refusal
