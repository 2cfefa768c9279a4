"""Recurrences in log(n) rounds are one scan: any tree, proved by its numbers; one with a mistake stays as it is."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from ringopt.ir.printer import short
from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from ringopt.recognize.scans import parallel_scan
from tests.harness.capturing import after, ops, results
from tests.harness.translation import validate

PASSES = [Normalize(), FindScan()]
WIDTH = 3


def doubling(a, b, until=None, back=1):
    """Hillis and Steele: in each round, rows twice as far apart."""
    far = 1
    while far < (until or b.shape[1]):
        b = torch.cat([b[:, :far], b[:, far:] + a[:, far:] * b[:, :-far]], 1)
        a = torch.cat([a[:, :far], functools.reduce(torch.mul, [a[:, :-far]] * back, a[:, far:])], 1)
        far *= 2
    return b


def combine(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def halving(parts, combine=combine):
    """As jax.lax.associative_scan: pairs are combined and scanned, what stands between them is filled in."""
    rows = parts[0].shape[1]
    if rows < 2:
        return parts
    odd = halving(combine([x[:, :-1:2] for x in parts], [x[:, 1::2] for x in parts]), combine)
    even = combine([x[:, :-1] if rows % 2 == 0 else x for x in odd], [x[:, 2::2] for x in parts])
    return [between(torch.cat([x[:, :1], e], 1), o) for x, e, o in zip(parts, even, odd)]  # noqa: B905


def between(even, odd):
    """Rows by turns."""
    left = even[:, odd.shape[1] :]
    return torch.cat([torch.stack([even[:, : odd.shape[1]], odd], 2).flatten(1, 2), left], 1)


def in_rounds(a, b):
    return doubling(a.sigmoid(), b).sin()


def padded(a, b):
    """Rows before the first are zeros."""
    a, far = a.sigmoid(), 1
    while far < b.shape[1]:
        b = b + a * F.pad(b, (0, 0, far, 0))[:, :-far]
        a = a * F.pad(a[:, :-far], (0, 0, far, 0), value=1.0)
        far *= 2
    return b.sin()


def written_in_place(a, b):
    a, b, far = a.sigmoid().clone(), b.clone(), 1
    while far < b.shape[1]:
        old = a.clone()
        b[:, far:] += old[:, far:] * b[:, :-far].clone()
        a[:, far:] = old[:, far:] * old[:, :-far]
        far *= 2
    return b.sin()


def padded_and_cut(a, b):
    a, far = a.sigmoid(), 1
    while far < b.shape[1]:
        b = b + a * F.pad(b, (0, 0, far, -far))
        a = a * F.pad(a, (0, 0, far, -far), value=1.0)
        far *= 2
    return b.sin()


def in_halves(a, b):
    return halving([a.sigmoid(), b])[1].sin()


def from_the_end(a, b):
    return halving([a.sigmoid().flip(1), b.flip(1)])[1].flip(1).sin()


def shared_decay(a, b):
    return halving([a[:1].sigmoid(), b])[1].sin()


def complex_numbers(a, b):
    """S5 (Smith, Warrington, Linderman 2023)."""
    return halving([torch.polar(a[:1].sigmoid(), b[:1]), torch.complex(b, a)])[1].real.sin()


def tokens_in_front(a, b):
    """Along another dim than the second."""
    return halving([x.transpose(0, 1).unsqueeze(0) for x in (a.sigmoid(), b)])[1].sin()


TREES = [
    in_rounds, padded, padded_and_cut, written_in_place, in_halves, from_the_end, shared_decay, complex_numbers,
    tokens_in_front,
]  # fmt: skip


def given(rows, width=WIDTH):
    torch.manual_seed(0)
    return [torch.randn(2, rows, width, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.fixture
def large(monkeypatch):
    """As tensors of which not all elements are looked at."""
    monkeypatch.setattr(parallel_scan, "SMALL", 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [4, 7, 16])
@pytest.mark.parametrize("program", TREES)
def test_a_tree_is_one_scan_of_the_same_numbers(large, program, rows):
    gm, context = after(PASSES, program, *given(rows))
    assert ops(gm).count("scan") == 1 and not {"cat", "stack"} & set(ops(gm))
    assert len(context.notes) == 1 and "is one scan" in context.notes[0]
    original, _ = after([Normalize()], program, *given(rows))
    found, expected = (results(each, each.meta["inputs"]) for each in (gm, original))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_graph_has_one_size():
    gm, _ = after(PASSES, in_rounds, *given(33))
    assert_expected_inline(
        short(gm.graph),
        """\
%a = input
%b = input
%sigmoid = sigmoid(%a)
%movedim = movedim(%sigmoid, -2, 0)
%movedim_1 = movedim(%b, -2, 0)
%select = select(%movedim, 0, 0)
%zeros_like = zeros_like(%select)
%select_1 = select(%movedim_1, 0, 0)
%zeros_like_1 = zeros_like(%select_1)
%select_scatter = select_scatter(%movedim, %zeros_like, 0, 0)
%scan = scan([%zeros_like_1], [%select_scatter, %movedim_1], [], '{"carries":1,"xs":2,"consts":0,"nodes":[["mul.Tensor",[{"%":0},{"%":1}]],["add.Tensor",[{"%":3},{"%":2}]]],"out":[4,4]}')
%getitem_1 = getitem(%scan, 1)
%movedim_2 = movedim(%getitem_1, 0, -2)
%clone = clone(%movedim_2, memory_format=torch.contiguous_format)
%sin = sin(%clone)
return [%sin]""",  # noqa: E501
    )


def test_nothing_comes_before_the_first_row():
    """Whose decay no round reads, and may be infinite."""
    a, b = given(8)
    with torch.no_grad():
        a[:, 0] = torch.inf
    (gm, _), (original, _) = after(PASSES, doubling, a, b), after([], doubling, a, b)
    found, (expected, *_) = (results(each, each.meta["inputs"]) for each in (gm, original))
    assert ops(gm).count("scan") == 1 and torch.isfinite(expected).all()
    torch.testing.assert_close(found[0], expected)


def with_constants(a, b):
    """Rows before the first, which have all elements: no two of them are looked at alone."""
    far = 1
    while far < b.shape[1]:
        none = torch.zeros(2, far, WIDTH, dtype=b.dtype)
        b = b + a * torch.cat([none, b[:, :-far]], 1)
        a = a * torch.cat([none, a[:, :-far]], 1)
        far *= 2
    return b


def test_all_elements_are_looked_at_where_they_are_few(monkeypatch):
    assert ops(after(PASSES, with_constants, *given(8))[0]).count("scan") == 1
    monkeypatch.setattr(parallel_scan, "SMALL", 0)
    assert "scan" not in ops(after(PASSES, with_constants, *given(8))[0])


def turned(x):
    """The halves of what stands beside the rows change places: of two elements they would not."""
    return torch.cat([x[..., 4:], x[..., :4]], -1)


def a_round_less(a, b):
    return doubling(a, b, until=8)


def squared_decays(a, b):
    return doubling(a, b, back=2)


def other_side(a, b):
    return halving([a, b], lambda left, right: (left[0] * right[0], left[0] * left[1] + right[1]))[1]


def with_a_bound(a, b):
    return halving([a, b], lambda left, right: (left[0] * right[0], (right[0] * left[1] + right[1]).clamp(-50, 50)))[1]


def shifted(a, b):
    """No tree: a token and the one before (RWKV)."""
    return torch.cat([b[:, :1], b[:, 1:] + a[:, 1:] * b[:, :-1]], 1)


def elements_that_are_turned(a, b):
    return halving([a, b], lambda left, right: (left[0] * right[0], right[0] * left[1] + turned(right[1])))[1]


def elements_that_are_merged(a, b):
    """And split otherwise."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1].mT.flatten(1).view_as(right[1])

    return halving([a, b], combine)[1]


@pytest.mark.parametrize("program", [elements_that_are_turned, elements_that_are_merged])
def test_elements_that_read_others_are_no_tree(program):
    inputs = given(16, width=8)
    assert ops(after(PASSES, program, *inputs)[0]) == ops(after([Normalize()], program, *inputs)[0])


def times_a_weight(a, b):
    """One that has no rows: fewer dims than these are counted from the last."""
    return b.repeat(2, 1, 1)[::2] * a[0, 0]


@pytest.mark.parametrize("program", [a_round_less, squared_decays, other_side, with_a_bound, shifted, times_a_weight])
def test_what_is_no_such_tree_stays(program):
    """Though 9 rows of 16 are right in one of them, and all of them at small numbers in another."""
    gm, _ = after(PASSES, program, *given(16))
    assert ops(gm) == ops(after([Normalize()], program, *given(16))[0])


class Layer(torch.nn.Module):
    def __init__(self, program):
        super().__init__()
        torch.manual_seed(0)
        self.program, self.layer = program, torch.nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.program(*self.layer(x).chunk(2, -1))


@pytest.mark.parametrize("p, layout, program", [(2, "contiguous", in_rounds), (3, "zigzag", complex_numbers)])
def test_on_shards(p, layout, program):
    verdict = validate(p, Layer(program), given(13)[0], layout=layout)
    assert verdict.wrong == "" and verdict.report.refusal is None
    assert [site.strategy for site in verdict.report.sites] == ["states"] and verdict.report.sharded_fraction == 1.0
