"""What an exchange has under way when it is started early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringopt.context_parallel.plan.exchange import Cargo, Message, Step
from ringopt.ops import traffic
from ringopt.ops.sized_call import Operand, SizedCall
from ringopt.ops.traits import TABLE


def test_keys_that_come_first_and_sums_that_come_last() -> None:
    """Round a ring of two ranks go 4 rows of 2 x 3 heads, of 5 + 6 numbers each. Sums of bfloat16 are in float32; while
    4 rows of them come, 4 go."""
    given = {name: Operand((2, 3, 4, size), torch.bfloat16) for name, size in (("q", 5), ("k", 5), ("v", 6))}
    lengths = {"q_length": 8, "kv_length": 8, "q_layout": "contiguous", "kv_layout": "contiguous"}
    how = {"pattern": "full", "mask": "", "strategy": "ring"}
    row, call = TABLE["ring_attention"], SizedCall("ring_attention", given | lengths | how, None, 2, 0)
    assert row.first is not None and row.first(call) == 4 * 2 * 3 * (5 + 6) * 2
    assert row.last is not None and row.last(call) == (4 + 4) * 2 * 3 * (5 + 6) * 4


@pytest.mark.parametrize(("ranks", "asked"), [(3, 3), (1000, traffic.LOOKED_AT)])
def test_only_ranks_that_there_are_and_a_few_of_many_are_looked_at(ranks: int, asked: int) -> None:
    """So that a plan of a thousand ranks is not unrolled for a number."""

    class Plan:
        def __init__(self) -> None:
            self.ranks, self.looked_at = ranks, list[int]()

        def forward(self, rank: int) -> tuple[Step, ...]:
            self.looked_at.append(rank)
            return (Step(receives=(Message(0, rank, Cargo.OUT, (range(rank + 1),)),)),)

        backward = forward

    for rows, most in ((traffic.first_rows, asked), (traffic.last_rows, 0)):
        plan: Any = Plan()
        assert rows(plan) == most and plan.looked_at == list(range(asked))
