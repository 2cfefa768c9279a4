"""A product that is summed over is an einsum, where its numbers are used often; others stay sums."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from ringopt.backend import reports
from ringopt.ir.printer import short
from ringopt.passes.canonicalize import Canonicalize
from ringopt.passes.contract import Contract
from ringopt.passes.lower import Lower
from ringopt.passes.normalize import Normalize
from ringopt.tools.benchmarks.models.recurrent_layers import layer_of
from tests.harness.capturing import after, ops, results
from tests.harness.lengths import run_over

PASSES = [Normalize(), Canonicalize(), Contract(), Lower()]


def given(*sizes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(*size, dtype=dtype, requires_grad=dtype.is_floating_point) for size in sizes]


def scores(q, k):
    return (q[:, :, None] * k[:, None]).sum(-1)


def chunks(m, x):
    """As Mamba2 sums over the tokens of a chunk: [b, c, l, s, h] by [b, c, s, h, p] to [b, c, l, h, p]."""
    return (m[..., None] * x[:, :, None]).sum(dim=3)


def repeated(q, k):
    """Both are expanded before they meet."""
    rows, columns = q.shape[1], k.shape[1]
    return (q[:, :, None].expand(-1, -1, columns, -1) * k[:, None].expand(-1, rows, -1, -1)).sum(-1)


def over_two_dims(x, w):
    return torch.sum(x[:, None] * w, (2, 3))


def one_after_the_other(q, k):
    return (scores(q, k)[..., None] * k[:, None]).sum(2)


PROGRAMS = {
    one_after_the_other: ((2, 20, 16), (2, 24, 16)),
    scores: ((2, 20, 16), (2, 24, 16)),
    chunks: ((2, 3, 16, 16, 2), (2, 3, 16, 2, 16)),
    repeated: ((2, 20, 16), (2, 24, 16)),
    over_two_dims: ((16, 5, 4), (16, 5, 4)),
}


def test_a_sum_of_products_is_one_node():
    gm, context = after(PASSES, scores, *given(*PROGRAMS[scores]))
    assert_expected_inline(
        short(gm.graph),
        """\
%q = input
%k = input
%unsqueeze = unsqueeze(%q, 2)
%unsqueeze_1 = unsqueeze(%k, 1)
%squeeze = squeeze(%unsqueeze, [2])
%squeeze_1 = squeeze(%unsqueeze_1, [1])
%einsum = einsum('abd,acd->abc', [%squeeze, %squeeze_1])
return [%einsum]""",
    )
    assert context.improved and context.notes == ["1 products that are summed over are matrix products"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_numbers_gradients_and_memory_are_those_of_the_sum(program):
    inputs = given(*PROGRAMS[program])
    gm, _ = after(PASSES, program, *inputs)
    assert "einsum" in ops(gm) and not {"mul", "sum"} & set(ops(gm))
    inputs = gm.meta["inputs"]
    for found, expected in zip(results(gm, inputs), results(program, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (found,), expected = gm(*inputs), program(*inputs)
    assert found.stride() == expected.stride()


SIZES = ((2, 20, 16), (2, 24, 16))


@pytest.mark.parametrize(
    "program, sizes, dtype",
    [
        (scores, ((2, 8, 8), (2, 8, 8)), torch.float64),
        (scores, SIZES, torch.int64),
        (lambda q, k: (q[:, :, None] * k[:, None].double()).sum(-1), SIZES, torch.float32),
        (lambda q, k: (q[:, :, None] * k[:, None]).sum(-1, dtype=torch.float64), SIZES, torch.float32),
        (lambda q, k: (pairs := q[:, :, None] * k[:, None]).sum(-1) + pairs.amax(-1), SIZES, torch.float64),
        (lambda q, k: (q[:, :, None] * k[:, None]).sum(2), SIZES, torch.float64),
        (lambda q, k: (q * k[:, :1]).sum(-1), SIZES, torch.float64),
    ],
    ids=["few numbers", "integers", "two dtypes", "summed in another", "used elsewhere", "of one alone", "a vector"],
)
def test_other_sums_stay(program, sizes, dtype):
    inputs = [x.round().to(dtype) if dtype == torch.int64 else x.detach().to(dtype) for x in given(*sizes)]
    gm, context = after(PASSES, program, *inputs)
    assert "einsum" not in ops(gm) and "sum" in ops(gm) and not context.improved


def test_float32_stays_a_sum_where_matrix_products_are_less_exact():
    inputs = given(*SIZES, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "einsum" not in ops(after(PASSES, scores, *inputs)[0])
    finally:
        torch.set_float32_matmul_precision(before)
    assert "einsum" in ops(after(PASSES, scores, *inputs)[0])


def test_autocast_leaves_its_precision():
    """Multiplication and sum are in float32 under autocast, and so is the matrix product."""
    torch._dynamo.reset()
    compiled, inputs = torch.compile(scores, backend="ring"), given(*SIZES, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(*inputs)
    assert any("matrix products" in note for note in reports()[-1].notes)
    torch.testing.assert_close(found, scores(*inputs), rtol=1e-5, atol=1e-5)


def test_what_is_expanded_twice_is_summed_as_often():
    def twice(q, k):
        q, k = (x.unsqueeze(-1).expand(*x.shape, 5) for x in (q[:, :, None], k[:, None]))
        return (q * k).sum((-2, -1))

    inputs = given(*SIZES)
    gm, _ = after(PASSES, twice, *inputs)
    for found, expected in zip(results(gm, inputs), results(twice, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_one_process_compiles_it_for_any_length():
    torch._dynamo.reset()
    compiled = torch.compile(scores, backend="ring", dynamic=True)
    for rows in (20, 33):
        inputs = given((2, rows, 16), (2, rows + 3, 16))
        for found, expected in zip(results(compiled, inputs), results(scores, inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert any("matrix products" in note for note in reports()[-1].notes)


@pytest.mark.parametrize("p", [2, 3])
def test_sums_over_chunks_are_matrix_products_of_each_rank(p):
    """Mamba2 as transformers 4 has it."""
    layer = layer_of("mamba2, multiplied", 1).double()
    for chunks in (3, 4):
        (report,) = run_over(layer, [given((1, chunks * 64, 64))], p).reports
        assert report.sharded_fraction == 1 and "4 products that are summed over are matrix products" in report.notes
        assert [gather.op for gather in report.gathers] == ["output"]
