"""A scan of few steps is its steps again on one process, so that Inductor fuses them; others stay one node."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch._higher_order_ops.scan import scan
from torch.profiler import profile

from ringopt.backend import reports
from ringopt.drivers.compiled import Compiled
from ringopt.ir.printer import short
from ringopt.passes.find_scan import FindScan
from ringopt.passes.lower import Lower
from ringopt.passes.normalize import Normalize
from ringopt.passes.unroll_scan import FEW, UnrollScan
from tests.harness.capturing import after, ops, results

FOUND = [Normalize(), FindScan(), Lower()]
PASSES = [*FOUND, UnrollScan()]


def given(steps, width=4):
    torch.manual_seed(0)
    return [torch.randn(steps, width, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def decayed(x, w):
    """All states, and the last."""
    state, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        state = state * w[0].sigmoid() + x[t]
        out.append(state * w[1])
    return torch.stack(out), state


def turned(x, w):
    """Its last carry lies in memory as a step gives it, and not as the scan's."""
    state, out = torch.zeros_like(w), []
    for t in range(x.shape[0]):
        state = (state.t() * x[t, 0]).contiguous().t() + w
        out.append(state.sum())
    return torch.stack(out), state.reshape(-1)


def largest(x, w):
    """A step takes one of two results of an operator, and carries its first state on."""
    state, out = x[0], []
    for t in range(x.shape[0]):
        state = state + torch.max(x * x[t], 0)[0] * w[0]
        out.append(state)
    return torch.stack(out), state


def test_the_steps_stand_in_the_place_of_the_scan():
    gm, context = after(PASSES, decayed, *given(3))
    assert_expected_inline(
        short(gm.graph),
        """\
%x = input
%w = input
%select = select(%x, 0, 0)
%zeros_like = zeros_like(%select, pin_memory=False)
%select_1 = select(%w, 0, 0)
%sigmoid = sigmoid(%select_1)
%select_3 = select(%w, 0, 1)
%select_13 = select(%x, 0, 0)
%mul_6 = mul(%zeros_like, %sigmoid)
%add_4 = add(%mul_6, %select_13)
%mul_7 = mul(%add_4, %select_3)
%select_14 = select(%x, 0, 1)
%mul_8 = mul(%add_4, %sigmoid)
%add_5 = add(%mul_8, %select_14)
%mul_9 = mul(%add_5, %select_3)
%select_15 = select(%x, 0, 2)
%mul_10 = mul(%add_5, %sigmoid)
%add_6 = add(%mul_10, %select_15)
%mul_11 = mul(%add_6, %select_3)
%clone = clone(%add_6, memory_format=torch.contiguous_format)
%stack_1 = stack([%mul_7, %mul_9, %mul_11])
return [%stack_1, %clone]""",
    )
    assert context.improved


@pytest.mark.parametrize("program", [decayed, turned, largest], ids=lambda program: program.__name__)
@pytest.mark.parametrize("steps", [3, FEW])
def test_numbers_gradients_and_memory_are_those_of_the_scan(program, steps):
    inputs = given(steps)
    if program is turned:
        inputs[1] = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    gm, _ = after(PASSES, program, *inputs)
    scanned, _ = after(FOUND, program, *inputs)
    assert "scan" in ops(scanned) and "scan" not in ops(gm)
    inputs = gm.meta["inputs"]
    for found, expected in zip(results(gm, inputs), results(scanned, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for found, expected in zip(gm(*inputs), scanned(*inputs), strict=True):
        assert found.stride() == expected.stride()


def as_torch_has_it(x, w):
    """`decayed`, of any number of steps in one graph."""
    factors, states = w[0].sigmoid(), torch.zeros_like(x[0])
    last, out = scan(lambda state, row: ((new := state * factors + row), new * w[1]), states, x, dim=0)
    return out, last


@pytest.mark.parametrize(
    "program, steps, more",
    [
        (decayed, FEW + 1, {}),
        (decayed, 3, {"inner_backend": "aot_eager"}),
        (decayed, 3, {"ranks": 2}),
        (as_torch_has_it, 4, {"dynamic": True}),
    ],
    ids=["many steps", "nothing fuses them", "ranks", "any number of steps"],
)
def test_other_scans_stay(program, steps, more):
    gm, context = after(PASSES, program, *given(steps), **more)
    assert ops(gm).count("scan") == 1 and not context.improved


def test_one_process_calls_no_operator_for_few_steps(monkeypatch):
    """And takes the graph of the passes: that of Dynamo may hold torch's scan, which Inductor runs step by step."""
    made = []
    of = Compiled.of
    monkeypatch.setattr(Compiled, "of", lambda *given: made.append(of(*given)) or made[-1])
    for steps, calls in ((FEW, 0), (FEW + 1, 1)):
        torch._dynamo.reset()
        inputs = given(steps)
        compiled = torch.compile(decayed, backend="ring", dynamic=False)
        for found, expected in zip(results(compiled, inputs), results(decayed, inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        with profile() as seen:
            compiled(*inputs)
        assert sum(event.name == "ringopt::scan" for event in seen.events()) == calls
        assert len(made) == 1 and made.pop().report is reports()[-1]
        assert any("compiled together" in note for note in reports()[-1].notes) == (calls == 0)
