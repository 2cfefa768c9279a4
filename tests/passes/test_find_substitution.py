"""Forward substitution in any spelling becomes one triangular solve; other writes to a square matrix stay."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from ringopt.ir.printer import short
from ringopt.passes.find_scan import FindScan
from ringopt.passes.find_substitution import FindSubstitution
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, ops, results

PASSES = [Normalize(), FindSubstitution()]
CHUNK = 5
ABOVE = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu()


def matrices(*batch, rows=CHUNK, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*batch, rows, rows, dtype=dtype, generator=generator).mul_(0.4).requires_grad_()


def kimi(a):
    """As transformers has it."""
    a = -a.masked_fill(ABOVE, 0)
    for i in range(1, CHUNK):
        row = a[..., i, :i].clone()
        sub = a[..., :i, :i].clone()
        a[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    return a + torch.eye(CHUNK, dtype=a.dtype)


def in_products(a):
    """Of a matrix with a diagonal, which stays; rows from the first on, and the other sign."""
    kept, a = a.triu(), a.tril(-1)
    for i in range(CHUNK):
        before = a.clone()
        a[..., i, :i] -= (before[..., i : i + 1, :i] @ before[..., :i, :i]).squeeze(-2)
    return a + kept


def in_sums(a):
    """Column by column of each row, masked by a product with constants."""
    a = a * (~ABOVE).to(a.dtype)
    for i in range(1, CHUNK):
        before = a.clone()
        a[..., i, :] = before[..., i, :] + torch.einsum("...j,...jk->...k", before[..., i, :], before)
    return a


SPELLINGS = [kimi, in_products, in_sums]


def test_rows_are_one_solve():
    gm, _ = after(PASSES, kimi, matrices(2))
    assert_expected_inline(
        short(gm.graph),
        """\
%a = input
%g_above = input
%masked_fill = masked_fill(%a, %g_above, 0)
%neg = neg(%masked_fill)
%tril = tril(%neg, -1)
%neg_1 = neg(%tril)
%linalg_solve_triangular = linalg_solve_triangular(%neg_1, %tril, upper=False, unitriangular=True)
%clone_8 = clone(%linalg_solve_triangular, memory_format=torch.contiguous_format)
%eye = eye(5, dtype=float64, device=device(type='cpu'), pin_memory=False)
%add_4 = add(%clone_8, %eye)
return [%add_4]""",
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("batch", [(), (2,), (CHUNK, 3)], ids=str)
@pytest.mark.parametrize("program", SPELLINGS)
def test_same_numbers_and_gradients(program, batch):
    original, _ = after([], program, matrices(*batch))
    gm, _ = after(PASSES, program, matrices(*batch))
    assert ops(gm).count("linalg_solve_triangular") == 1 and "select_scatter" not in ops(gm)
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, gm.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_few_bits(dtype):
    """What has 16 bits is solved in 32, nearer to the numbers of 64."""
    x = matrices(3, dtype=dtype)
    gm, _ = after(PASSES, kimi, x)
    found, exact = gm(*gm.meta["inputs"])[0], kimi(x.double())
    assert "linalg_solve_triangular" in ops(gm) and found.dtype == dtype
    assert (found - exact).abs().max() <= (kimi(x) - exact).abs().max() + torch.finfo(dtype).eps


def test_each_layer_has_its_own():
    gm, _ = after(PASSES, lambda a, b: kimi(a) @ kimi(kimi(a) @ b), matrices(2), matrices(2))
    assert ops(gm).count("linalg_solve_triangular") == 3


def test_within_a_loop_over_chunks_it_is_solved_for_all_chunks():
    """And the recurrence is found as if the solve had been written."""

    def program(a, v):
        state, out = torch.zeros_like(v[:, 0]), []
        for t in range(a.shape[1]):
            state = state * 0.9 + kimi(a[:, t]) @ v[:, t]
            out.append(state)
        return torch.stack(out, 1)

    v = torch.randn(2, 4, CHUNK, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    original, _ = after([], program, matrices(2, 4), v)
    gm, _ = after([*PASSES, FindScan()], program, matrices(2, 4), v)
    assert ops(gm).count("linalg_solve_triangular") == ops(gm).count("scan") == 1
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, gm.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# ---- what is no such system ------------------------------------------------------------------------------------------
def with_a_row_left_out(a):
    a = a.tril(-1)
    for i in range(1, CHUNK - 1):
        a[..., i, :i] += (a[..., i : i + 1, :i] @ a[..., :i, :i]).squeeze(-2)
    return a


def with_a_factor(a):
    a = a.tril(-1)
    for i in range(1, CHUNK):
        a[..., i, :i] += 0.5 * (a[..., i : i + 1, :i] @ a[..., :i, :i]).squeeze(-2)
    return a


def with_its_diagonal(a):
    a = a.tril()
    for i in range(1, CHUNK):
        a[..., i, :i] += (a[..., i : i + 1, :i] @ a[..., :i, :i]).squeeze(-2)
    return a


def of_some_of_the_batch(a):
    """At any size of the batch but one it is another function."""
    a = a.tril(-1)
    for i in range(1, CHUNK):
        a[:2, i, :i] += (a[:2, i : i + 1, :i] @ a[:2, :i, :i]).squeeze(-2)
    return a


def over_the_batch(a):
    a = a.tril(-1)
    for i in range(1, CHUNK):
        a[..., i, :i] += (a[..., i : i + 1, :i] @ a[..., :i, :i]).squeeze(-2).flip(0)
    return a


def clipped(a):
    a = a.tril(-1)
    for i in range(1, CHUNK):
        a[..., i, :i] += (a[..., i : i + 1, :i] @ a[..., :i, :i]).squeeze(-2).clamp(-9, 9)
    return a


ALIKE = [with_a_row_left_out, with_a_factor, with_its_diagonal, of_some_of_the_batch, over_the_batch, clipped]


@pytest.mark.parametrize("program", ALIKE)
def test_other_writes_stay(program):
    assert "linalg_solve_triangular" not in ops(after(PASSES, program, matrices(3))[0])
