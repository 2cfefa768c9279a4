"""What an exchange has under way when it is started early."""

from __future__ import annotations

import torch

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
