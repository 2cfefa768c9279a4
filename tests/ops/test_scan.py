"""`ringopt::scan`: a recurrence as one operator equals the loop, its gradients too."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.fx as fx
from torch.utils.flop_counter import FlopCounterMode

from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators as ops
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traits import TABLE
from ringopt.scans.body import NoBody
from ringopt.scans.call import ScanCall
from ringopt.scans.steps import AT_ONCE, Recurrence, ResultGradients
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.tensors import TorchDispatchMode
from tests.scans.bodies import Scan, delta_rule, diagonal, drawn, stabilised

SCANS = {"delta rule": delta_rule, "diagonal": diagonal, "stabilised": stabilised}


@pytest.mark.sample(2)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("at_once", [0, 2**22])
@pytest.mark.parametrize("name", SCANS)
def test_a_scan_and_its_gradients_are_those_of_the_loop(name, at_once, keeps, monkeypatch):
    scan = SCANS[name](7)
    monkeypatch.setitem(AT_ONCE, "cpu", at_once)
    found, expected = ops.scan(scan.init, scan.xs, scan.consts, scan.text, keeps), scan.loop()
    found, states = found[: len(expected)], found[len(expected) :]
    assert [x.shape[0] for x in states] == [7] * len(scan.init) * keeps
    if keeps:
        monkeypatch.setattr(Recurrence, "states", None)  # nobody makes them again
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    weights = [torch.randn_like(x) for x in expected]
    learned = [x for x in scan.operands if x.requires_grad]
    grads = [torch.autograd.grad(outs, learned, weights, allow_unused=True) for outs in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


class Called(TorchDispatchMode):
    """How often each operator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at_once", [0, 2**22])
def test_only_what_is_carried_goes_step_by_step(at_once, monkeypatch):
    """s = a * s + x; y = s * w: one product a step, and those of all outputs and of all gradients at once."""
    monkeypatch.setitem(AT_ONCE, "cpu", at_once)
    scan = diagonal(32)
    given = ResultGradients([torch.ones(2, 3).double()], [drawn(32, 2, 3).detach()], [scan.init[0].detach()])
    own = Recurrence(scan.text, [x.detach() for x in scan.xs], [x.detach() for x in scan.consts])
    with Called() as forward:
        own.run([x.detach() for x in scan.init])
    with Called() as states:
        before = own.states([x.detach() for x in scan.init])
    with Called() as backward:
        own.gradients(before, given, [1, 2, 3])
    assert states.times["mul"] == 32
    if at_once:
        assert forward.times["mul"] == 32 + 2 and backward.times["mul"] < 32 + 8
    else:
        assert forward.times["mul"] == 64 and backward.times["mul"] > 64


@pytest.mark.parametrize("name", SCANS)
def test_without_a_step_the_carries_are_as_they_were(name):
    scan = SCANS[name](0 + 1)
    scan = Scan(scan.step, scan.init, [x.detach()[:0].requires_grad_() for x in scan.xs], scan.consts)
    text = SCANS[name](1).text
    found = ops.scan(scan.init, scan.xs, scan.consts, text)
    for x, of_init in zip(found, scan.init, strict=False):
        assert torch.equal(x, of_init) and x.data_ptr() != of_init.data_ptr()
    assert all(y.shape[0] == 0 for y in found[len(scan.init) :])
    sum(x.sum() for x in found).backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in scan.init)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCANS)
def test_what_torch_asks_of_an_operator(name):
    scan = SCANS[name](3)
    found = torch.library.opcheck(ops.scan.default, (scan.init, scan.xs, scan.consts, scan.text))
    assert set(found.values()) == {"SUCCESS"}
    wanted = [0, len(scan.init)]
    grads = [torch.ones_like(x) for x in scan.operator()]
    given = [[x.detach() for x in part] for part in (grads, scan.init, scan.xs, scan.consts)]
    found = torch.library.opcheck(ops.scan_backward.default, (*given, scan.text, wanted))
    assert set(found.values()) == {"SUCCESS"}


def test_a_result_is_no_view_of_an_operand():
    scan = Scan(lambda s, x: (x, s, x), [drawn(3)], [drawn(4, 3)], [])
    assert len({x.untyped_storage().data_ptr() for x in (*scan.operator(), *scan.operands)}) == 5


def test_sums_of_16_bits_are_added_up_in_32():
    """A weight that every step uses alike has the sum of all their gradients."""
    w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    xs = torch.ones(1024, 1, dtype=torch.bfloat16)
    scan = Scan(lambda s, x, w: (s + 0, x * w), [torch.zeros(1, dtype=torch.bfloat16)], [xs], [w])
    scan.operator()[1].float().sum().backward()
    assert w.grad.item() == 1024


def test_the_number_of_steps_may_be_open():
    scan = diagonal(5)
    compiled = torch.compile(lambda init, xs, consts: ops.scan(init, xs, consts, text), dynamic=True, fullgraph=True)
    text = scan.text
    for steps in (5, 9):
        scan = diagonal(steps)
        torch.testing.assert_close(compiled(scan.init, scan.xs, scan.consts), scan.operator())


def test_inductor_compiles_a_scan_and_its_backward():
    scan = delta_rule(6)
    text, learned = scan.text, scan.operands
    compiled = torch.compile(lambda init, xs: ops.scan(init, xs, [], text), fullgraph=True)
    found, expected = compiled(scan.init, scan.xs), scan.loop()
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(sum(x.sum() for x in outs), learned) for outs in (found, expected)]
    torch.testing.assert_close(*grads)


def test_a_carry_that_changes_its_kind_is_an_error():
    scan = Scan(lambda s, x: (s + x,), [drawn(1)], [drawn(4, 3)], [])
    with pytest.raises(NoBody, match=r"carry 0 is \[1\] float64 before a step and \[3\] float64 behind it"):
        scan.operator()


def scan_node(scan: Scan) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
    graph, text, given = fx.Graph(), scan.text, [x.detach() for x in scan.operands]
    with FakeTensorMode() as mode:
        operands = []
        for place, x in enumerate(given):
            operands.append(graph.placeholder(f"x{place}"))
            operands[-1].meta["val"] = mode.from_tensor(x)
        init, xs = len(scan.init), len(scan.init) + len(scan.xs)
        finals, ys = ScanCall(operands[:init], operands[init:xs], operands[xs:], text).emit(graph, operands[0])
    return finals[0].args[0], finals, ys


def test_a_call_is_read_and_written_by_names():
    scan = stabilised(4)
    node, finals, ys = scan_node(scan)
    call = ScanCall.of(node)
    assert (len(call.init), len(call.xs), len(call.consts), call.text) == (3, 2, 2, scan.text)
    assert [list(map(at_hand, x.meta["val"].shape)) for x in (*finals, *ys)] == [[2, 3]] * 3 + [[4, 2, 3]]


def test_flops_are_those_of_a_step_times_the_steps():
    scan = delta_rule(6)
    with FlopCounterMode(display=False) as counter:
        scan.loop()
    node = scan_node(scan)[0]
    assert TABLE["scan"].flops(SizedCall.of(node, 1, 0)) == counter.get_total_flops()
