"""The legacy profiler."""

from __future__ import annotations

import torch

from ringopt.torch_compat.profiler import allocations


def test_what_is_allocated_and_freed_is_told_in_its_order() -> None:
    with allocations() as found:
        x = torch.empty(1000, dtype=torch.float64)
        y = torch.empty(500, dtype=torch.float64)
        del x
    assert found == [8000, 4000, -8000]
    del y
