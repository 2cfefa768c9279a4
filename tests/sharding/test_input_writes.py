"""What is computed from an input before it is written reads a copy of it; what is returned of it does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ringopt.ir.nodes import op_name, outputs_of
from ringopt.ops import operators
from ringopt.passes.canonicalize import Canonicalize
from ringopt.passes.normalize import Normalize
from ringopt.sharding.input_writes import keep_before_writes
from tests.harness.capturing import after


class Counted(nn.Module):
    """`count` is read before it is written, through a view, and that view and one of it are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = self.count[1:]
        product = x * self.weight * rows
        self.count += 1
        return product, rows, rows.mT


def test_a_copy_is_computed_with_and_views_of_the_input_are_returned() -> None:
    gm, _ = after((Normalize(), Canonicalize()), Counted(), torch.ones(2, 4))
    assert keep_before_writes(gm.graph)
    gm.graph.lint()
    (before,) = gm.graph.find_nodes(op="call_function", target=operators.snapshot.default)
    count = before.args[0]
    assert sorted(map(op_name, before.users)) == ["add", "slice"]
    product, rows, columns, *_ = outputs_of(gm.graph)
    assert op_name(product) == "mul" and rows.args[0] is count and columns.args[0] is rows
