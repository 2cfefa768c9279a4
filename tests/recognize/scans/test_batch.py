"""What a step computes of its own row alone is computed for all rows at once: the same numbers, whatever dims it asks
for, and of numbers that have none."""

from __future__ import annotations

import pytest
import torch

from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, ops, results

# A row of a step -> what is added to its state.
NUMBERS = {
    "softmax": lambda r: r.sin().softmax(-1),
    "cumsum": lambda r: r.sin().cumsum(0),
    "flip": lambda r: r.cos().flip(0),
    "sum of no dims": lambda r: torch.sum(r.sin(), []) * r,
    "in a new dim": lambda r: r.sin()[None].expand(3).sum(0),
    "wider than the state": lambda r: (r.sin().double() * torch.ones(1, dtype=torch.float32))[0].to(r.dtype),
}
VECTORS = {
    "sum of all dims": lambda r: torch.sum(r.sin(), []) * r,
    "maximum of all dims": lambda r: torch.amax(r.sin(), ()) * r,
    "sums": lambda r: r.sin().sum(0, keepdim=True) + r.cos().mean(-1, keepdim=True) + r.cumsum(1),
    "softmax": lambda r: r.softmax(0) * r.sin().softmax(-1),
    "moved": lambda r: r.sin().t().unsqueeze(1).transpose(0, -1).squeeze(1) + r.flip(0, -1),
    "joined": lambda r: torch.cat([r.sin(), r.cos()], 1)[:, 1:5] + torch.stack([r, r], -1).sum(-1),
    "products": lambda r: r.sin() @ r.cos().mT @ r,
    "einsum": lambda r: torch.einsum("ij,kj->ik", r.sin(), r) @ r,
    "padded": lambda r: torch.nn.functional.pad(r.sin(), (1, 0))[:, :-1],
    "argmax": lambda r: r * r.sin().argmax(-1, keepdim=True),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, sizes", [*((name, ()) for name in NUMBERS), *((name, (4, 4)) for name in VECTORS)])
def test_of_all_steps_as_of_each(name, sizes):
    add = (VECTORS if sizes else NUMBERS)[name]

    def program(x):
        state, states = torch.zeros(sizes, dtype=x.dtype), []
        for row in x.unbind(0):
            state = state * 0.9 + add(row)
            states.append(state)
        return torch.stack(states)

    x = torch.randn(7, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    original, _ = after([Normalize()], program, x)
    gm, _ = after([Normalize(), FindScan()], program, x)
    assert ops(gm).count("scan") == 1
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, original.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_dtypes_of_numbers_and_of_rows_are_promoted_as_in_a_step():
    """A number does not widen a vector; as one of a column it would."""

    def program(g, x):
        state, states = torch.zeros(4), []
        for t in range(7):
            state = state * 0.9 + g[t].sin() * x[t].cos()
            states.append(state)
        return torch.stack(states)

    given = torch.randn(7, dtype=torch.float64), torch.randn(7, 4)
    gm, _ = after([Normalize(), FindScan()], program, *given)
    (found,) = results(gm, gm.meta["inputs"])[:1]
    assert ops(gm).count("scan") == 1 and found.dtype == torch.float32
    torch.testing.assert_close(found, program(*given))
