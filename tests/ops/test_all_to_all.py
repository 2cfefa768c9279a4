"""From rows to columns and back: forward, its transpose, and what torch.library asks of an operator."""

from __future__ import annotations

import pytest
import torch

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ops import all_to_all
from ringopt.ops.reshard import places
from tests.harness.threads import run_on_threads

ops = torch.ops.ringopt
ROWS, COLUMNS = (2, 9, 2), (1, 7, 1)


@pytest.mark.parametrize(
    "p, layouts", [(2, ("zigzag", "contiguous")), (3, ("contiguous", "zigzag")), (1, ("zigzag",) * 2)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_turn_moves_every_element_once(p, layouts, dtype):
    whole = torch.randn(2, 36, 3, 7, dtype=dtype)
    weight = torch.randn_like(whole)

    def body(mesh):
        rows, columns = (
            places(factors, layout, p, mesh.rank) for factors, layout in zip((ROWS, COLUMNS), layouts, strict=True)
        )
        x = whole[:, rows].clone().requires_grad_()
        out = ops.turn(x, 1, ROWS, 3, COLUMNS, len(columns), *layouts, mesh.name)
        assert torch.equal(out, whole[..., columns]) and out.is_contiguous()
        back = ops.turn(out, 3, COLUMNS, 1, ROWS, len(rows) // 4, *layouts[::-1], mesh.name)
        assert torch.equal(back, x)
        (out * weight[..., columns].conj()).real.sum().backward()
        assert torch.equal(x.grad, weight[:, rows])

    run_on_threads(p, body)


def test_what_does_not_leave_a_rank_is_not_sent():
    counts = [sum(map(len, layout_of("contiguous", 7, 3).ranges(rank))) for rank in range(3)]
    sent = [all_to_all.bytes_turned(70, COLUMNS, "contiguous", 3, rank) for rank in range(3)]
    assert sent == [70 - 10 * n for n in counts]


def test_what_torch_asks_of_an_operator():
    def body(mesh):
        x = torch.randn(2, 8, 6, requires_grad=True)
        args = (1, (1, 8, 1), 2, (1, 6, 1), 6, "zigzag", "contiguous", mesh.name)
        return torch.library.opcheck(ops.turn.default, (x, *args))

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
