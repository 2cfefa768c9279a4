"""A term of batch, head and row as a tensor, which an attention reads in place of what it was made of."""

from __future__ import annotations

import json

import torch

from ringopt.expr.simplify import apply
from ringopt.expr.terms import axis, dumps, load
from ringopt.ops import operators as ops

BATCH, HEADS, ROWS = 2, 3, 5


def test_each_element_is_the_term_at_its_batch_head_and_row():
    table, weights = torch.randn(BATCH, ROWS), torch.randn(HEADS)
    for row in ("q", "k"):
        term = apply(
            "mul",
            [load(0, [axis("b"), axis(row)], torch.float32), load(1, [axis("h")], torch.float32)],
            torch.float32,
        )
        found = ops.tabulate([table, weights], json.dumps(dumps(term)), row, [BATCH, HEADS, ROWS])
        assert torch.equal(found, (table[:, None] * weights[:, None])[..., None])


def test_an_axis_that_the_term_does_not_depend_on_has_size_1():
    text = json.dumps(dumps(load(0, [axis("h")], torch.float32)))
    weights = torch.randn(HEADS)
    assert torch.equal(ops.tabulate([weights], text, "q", [1, HEADS, 1]), weights.view(1, HEADS, 1, 1))
