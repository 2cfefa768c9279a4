"""A loop in a loop: several updates of one state for each token (DeltaProduct), or for each chunk.

    for t in range(rows):
        for j in range(2):
            S = S - k[:, t, j] (k[:, t, j] S - v[:, t, j])         # one step of the scan has both
        out.append(q[:, t] S)

The outer loop is the scan where it has more steps and goes on with what the inner one carries.
"""

from __future__ import annotations

import pytest
import torch

from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, ops, results

ROWS, WIDTH = 8, 4


def delta_product(updates, between=lambda state: state):
    def program(k, v, q):
        state, out = torch.zeros(2, WIDTH, WIDTH, dtype=k.dtype), []
        ks, vs, gates = k.unbind(2), v.unbind(2), v.mean(-1).sigmoid()
        for t in range(k.shape[1]):
            for j in range(updates):
                k_j = torch.nn.functional.normalize(ks[j][:, t], dim=-1)
                error = torch.einsum("bk,bkv->bv", k_j, state) - vs[j][:, t]
                state = state - gates[:, t, j, None, None] * k_j.unsqueeze(-1) * error.unsqueeze(1)
            state = between(state)
            out.append(torch.einsum("bk,bkv->bv", q[:, t], state))
        return torch.stack(out, 1)

    return program


def inputs(updates):
    torch.manual_seed(0)
    sizes = [(2, ROWS, updates, WIDTH)] * 2 + [(2, ROWS, WIDTH)]
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def scans(program, updates):
    """Those that are found, after a look at the numbers; and the report."""
    gm, context = after([Normalize(), FindScan()], program, *inputs(updates))
    original, _ = after([Normalize()], program, *inputs(updates))
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, original.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return ops(gm).count("scan"), context.notes


@pytest.mark.parametrize("updates", [1, 2, 3, 5])
def test_updates_of_a_token_are_one_step(updates):
    count, (note,) = scans(delta_product(updates), updates)
    assert count == 1 and note.startswith(f"a recurrence of {ROWS} steps is one scan")


def test_a_loop_of_more_steps_than_that_around_it_is_the_scan():
    count, _ = scans(delta_product(12), 12)
    assert count == ROWS


def test_the_inner_one_is_where_the_outer_one_is_not_affine():
    count, notes = scans(delta_product(4, torch.tanh), 4)
    assert count == ROWS
    assert [note.partition(" (")[0] for note in notes] == [
        "a recurrence is no scan: a step is not affine in what it carries: tanh of what a step carries",
        "a recurrence of 4 steps is one scan",
    ]


def test_what_starts_anew_in_each_turn_is_a_loop_of_its_own():
    """The inner state does not know of the outer one."""

    def program(k, v, q):
        state, out = torch.zeros(2, WIDTH, dtype=k.dtype), []
        for t in range(ROWS):
            inner = v[:, t, 0]
            for j in range(4):
                inner = inner * k[:, t, j].sigmoid() + v[:, t, j]
            state = state * q[:, t].sigmoid() + inner
            out.append(state)
        return torch.stack(out, 1)

    count, notes = scans(program, 4)
    assert count == ROWS, notes
