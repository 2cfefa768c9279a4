"""What the caller gets lies in memory as the program had it: views that follow are made for that."""

from __future__ import annotations

import pytest
import torch

import ringopt
from ringopt.calls import OpCall
from ringopt.passes import UNDERSTAND
from ringopt.passes.lower import Lower
from ringopt.scans.call import is_scan
from tests.harness.capturing import after
from tests.harness.translation import validate_function

BATCH, ROWS, HEADS, DEPTH = 2, 7, 3, 4


def given():
    torch.manual_seed(0)
    sizes = (ROWS, HEADS, DEPTH), (ROWS, DEPTH), (ROWS, DEPTH)
    return [torch.randn(BATCH, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


def multi_query(q, k, v):
    weights = torch.einsum("bnhd,bmd->bhnm", q, k).softmax(-1)
    return (torch.einsum("bhnm,bmd->bnhd", weights, v),)


def heads_first(q, k, v):
    q, k, v = q.transpose(1, 2), k[:, None], v[:, None]
    out = (q @ k.mT).softmax(-1) @ v
    return out, out.mT


@pytest.mark.parametrize("program", (multi_query, heads_first))
@pytest.mark.parametrize("p", (2, 3))
def test_outputs_of_attention_that_was_spelled_out_keep_their_strides(program, p):
    verdict = validate_function(p, program, given())
    assert verdict.wrong == "" and [site.refusal for site in verdict.report.sites] == [None]
    expected = [out.stride() for out in program(*given())]
    for found, _gradients in verdict.found:
        assert [out.stride() for out in found[: len(expected)]] == expected


def strided(q, k, v):
    """What as_strided reads depends on the order that its operand has in memory."""
    y, _ = heads_first(q, k, v)
    z = (y * 2).transpose(1, 3).clone(memory_format=torch.preserve_format)
    read = y.as_strided((BATCH, 5), (ROWS, 1), 1).sin(), torch.as_strided(z, (3, ROWS), (ROWS, 2)).cos()
    copied = torch.as_strided_copy(y, (3, ROWS), (ROWS, 2))
    rows = copied.detach(), (3, ROWS), (ROWS, 2), 5
    written = torch.as_strided_scatter(y.contiguous(), *rows), torch.as_strided_scatter(z.detach(), *rows)
    return y, *read, copied, *written


def test_elements_by_their_places_in_memory():
    verdict = validate_function(2, strided, given())
    assert verdict.wrong == "" and [site.refusal for site in verdict.report.sites] == [None]
    compiled = torch.compile(strided, backend="ring", options={"inner_backend": "eager"})
    for found, expected in zip(compiled(*given()), strided(*given()), strict=True):
        assert (found - expected).abs().max() < 1e-12


def test_a_gradient_that_counts_otherwise_is_refused():
    """Torch's own, of what is scattered into an operand that is not contiguous."""

    def scattered(q, k, v):
        turned = heads_first(q, k, v)[0].detach().transpose(1, 3) * 2
        return torch.as_strided_scatter(turned, q[0, 0], (HEADS, DEPTH), (DEPTH, 1))

    assert "as_strided_scatter has a gradient" in validate_function(2, scattered, given()).report.refusal


def test_memory_around_an_operand_is_not_read():
    around = lambda q, k, v: heads_first(q, k, v)[0][:, 1:].as_strided((2, 2), (1, 1), 0)  # noqa: E731
    refusal = validate_function(2, around, given()).report.refusal
    assert "as_strided reads memory around its operand" in refusal


def test_a_view_behind_a_graph_break_on_one_process():
    """SDPA lays its output out as queries were given, and matmul does not."""

    def program(q, k, v):
        out, _ = heads_first(q, k, v)
        torch._dynamo.graph_break()
        return out.view(BATCH * HEADS, ROWS, DEPTH)

    expected = program(*given())
    compiled = torch.compile(program, backend="ring", options={"inner_backend": "eager"})
    assert (compiled(*given()) - expected).abs().max() < 1e-12


def test_outputs_that_lay_apart_still_do():
    """A scan gives all states at once, of which the last one is a part. Who writes to it writes to nothing else."""

    def program(x):
        state, states = torch.zeros_like(x[0]), []
        for row in x:
            state = state * 0.5 + row
            states.append(state)
        return torch.stack(states), state

    compiled = torch.compile(program, backend="ring", options={"inner_backend": "eager"})
    states, last = compiled(torch.ones(5, 2))
    assert any("is one scan" in note for note in ringopt.reports()[-1].notes)
    last.zero_()
    assert states[-1].tolist() == [1.9375, 1.9375]


def narrow(x):
    """Of a step's row the state is an eighth."""
    state, states = x[:, 0, 0], []
    for t in range(1, ROWS):
        state = (state[:, None] * x[:, t]).sum(1)
        states.append(state)
    return torch.stack(states, 1)


def wide(x):
    state, states = x[:, 0], []
    for t in range(1, ROWS):
        state = state * x[:, t]
        states.append(state)
    return torch.stack(states, 1)


@pytest.mark.parametrize("program, learns, kept", [(narrow, True, True), (narrow, False, False), (wide, True, False)])
def test_states_that_are_small_are_kept_for_a_backward(program, learns, kept):
    gm, _ = after([*UNDERSTAND, Lower()], program, torch.randn(BATCH, ROWS, 8, requires_grad=learns))
    (scan,) = filter(is_scan, gm.graph.nodes)
    assert OpCall.of(scan)["keeps"] == kept


def test_what_reads_numbers_in_cpp_is_traced_in_its_python_form():
    """istft, which reads whether its window covers everything."""
    x = torch.randn(4, 24, dtype=torch.float64, requires_grad=True)

    def program(x):
        attended = torch.nn.functional.scaled_dot_product_attention(x[..., None], x[..., None], x[..., None])[..., 0]
        window = torch.hann_window(8, dtype=torch.float64)
        found = torch.stft(attended, 8, 2, window=window, return_complex=True)
        return (torch.istft(found * 0.5, 8, 2, window=window, length=24),)

    verdict = validate_function(2, program, [x])
    assert verdict.wrong == "" and verdict.report.refusal is None
