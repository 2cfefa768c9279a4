"""Recurrences in every spelling become one scan; what only looks like one stays, with a reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._higher_order_ops.scan import scan

from ringopt.backend import reports
from ringopt.calls import OpCall
from ringopt.ir.printer import short
from ringopt.passes.find_scan import FindScan
from ringopt.passes.lower import Lower
from ringopt.passes.normalize import Normalize
from ringopt.scans.call import is_scan
from tests.harness.capturing import after, ops, results
from tests.harness.recurrences import gated_linear_attention

PASSES = [Normalize(), FindScan()]
TOKENS, WIDTH = 6, 4


def given(*shapes):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def stepped(step, state, x):
    out = []
    for t in range(x.shape[1]):
        state = step(state, x[:, t])
        out.append(state)
    return torch.stack(out, 1)


def assert_same_numbers(program, inputs, loop=None, ranks=1):
    """What the pass makes of a program gives its numbers, and its gradients; or those of the same as a loop."""
    gm, context = after(PASSES, program, *inputs, ranks=ranks)
    original, _ = after([], loop or program, *inputs)
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, gm.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    return gm, context


def decayed(x, w):
    return stepped(lambda s, x_t: s * w.sigmoid() + x_t.tanh(), torch.zeros_like(x[:, 0]), x)


def test_a_loop_becomes_one_scan_behind_what_does_not_read_the_state():
    gm, context = assert_same_numbers(decayed, given((2, TOKENS, WIDTH), (WIDTH,)))
    assert_expected_inline(
        short(gm.graph),
        """\
%x = input
%w = input
%select = select(%x, 1, 0)
%zeros_like = zeros_like(%select, pin_memory=False)
%sigmoid = sigmoid(%w)
%permute = permute(%x, [1, 0, 2])
%tanh_6 = tanh(%permute)
%scan = scan([%zeros_like], [%tanh_6], [%sigmoid], '{"carries":1,"xs":1,"consts":1,"nodes":[["mul.Tensor",[{"%":0},{"%":2}]],["add.Tensor",[{"%":3},{"%":1}]]],"out":[4,4]}')
%getitem_1 = getitem(%scan, 1)
%permute_1 = permute(%getitem_1, [1, 0, 2])
%clone = clone(%permute_1, memory_format=torch.contiguous_format)
return [%clone]""",  # noqa: E501
    )
    assert context.notes == [
        "a recurrence of 6 steps is one scan (test_find_scan.py:50: return stepped(lambda s, x_t: s * w.sigmoid() + "
        "x_t.tanh(), torch.zeros_like(x[:, 0]), x))"
    ]


def of_matrices(x, a):
    """A step reads five times what it hands on."""
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(TOKENS):
        state = (a[:, t] @ state.unsqueeze(-1)).squeeze(-1) * 0.5 + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


@pytest.mark.parametrize("learns", [True, False])
def test_small_states_are_kept_for_the_backward(learns):
    small = given((2, TOKENS, WIDTH), (2, TOKENS, WIDTH, WIDTH))
    with torch.set_grad_enabled(learns):
        kept, large = (
            after([*PASSES, Lower()], program, *inputs)[0]
            for program, inputs in ((of_matrices, small), (decayed, given((2, TOKENS, WIDTH), (WIDTH,))))
        )
    keeps = [OpCall.of(node)["keeps"] for gm in (kept, large) for node in gm.graph.nodes if is_scan(node)]
    assert keeps == [learns, False]
    if learns:
        original, _ = after([], of_matrices, *small)
        found, expected = (results(gm, gm.meta["inputs"]) for gm in (kept, original))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# ---- recurrences that are no scan ------------------------------------------------------------------------------------
def tanh_rnn(x, w):
    return stepped(lambda s, x_t: torch.tanh(s @ w + x_t), torch.zeros_like(x[:, 0]), x)


def clipped(x, w):
    return stepped(lambda s, x_t: (s * w[0] + x_t).relu(), torch.zeros_like(x[:, 0]), x)


def gate_reads_the_state(x, w):
    return stepped(lambda s, x_t: torch.sigmoid(s + x_t) * s + x_t, torch.zeros_like(x[:, 0]), x)


def square(x, w):
    state = torch.eye(WIDTH, dtype=x.dtype).expand(2, -1, -1)
    return stepped(lambda s, x_t: s @ s * x_t.unsqueeze(-1), state, x)


def random(x, w):
    return stepped(lambda s, x_t: s * w[0] + F.dropout(x_t, 0.5), torch.zeros_like(x[:, 0]), x)


def gru(x, w):
    def step(s, x_t):
        z, r = torch.sigmoid(x_t + s @ w), torch.sigmoid(x_t - s @ w)
        return (1 - z) * s + z * torch.tanh(x_t + (r * s) @ w)

    return stepped(step, torch.zeros_like(x[:, 0]), x)


def of_complex_numbers(x, w):
    """A diagonal state space in complex numbers (S4D, LRU)."""
    rate = torch.polar(w[0].sigmoid(), w[1])
    return stepped(lambda s, x_t: s * rate + x_t, torch.zeros_like(x[:, 0], dtype=rate.dtype), x).real


def of_their_parts(x, w):
    """The same as rotations of the real and the imaginary part."""
    real, imaginary = w[0].sigmoid() * w[1].cos(), w[0].sigmoid() * w[1].sin()
    rows = torch.stack([real, -imaginary], -1), torch.stack([imaginary, real], -1)
    x = torch.stack([x, torch.zeros_like(x)], -1)[..., None]
    return stepped(lambda s, x_t: torch.stack(rows, -2) @ s + x_t, torch.zeros_like(x[:, 0]), x)[..., 0, 0]


LEFT = {
    tanh_rnn: "tanh", clipped: "relu", gate_reads_the_state: "sigmoid", square: "matmul", random: "random numbers",
    gru: "sigmoid",
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", LEFT, ids=lambda program: program.__name__)
def test_what_is_not_affine_stays_a_loop_and_the_report_says_why_and_where(program):
    inputs = given((2, TOKENS, WIDTH), (WIDTH, WIDTH))
    before, _ = after([Normalize()], program, *inputs)
    gm, context = after(PASSES, program, *inputs)
    assert ops(gm) == ops(before)
    (note,) = context.notes
    assert note.startswith("a recurrence is no scan: ") and LEFT[program] in note and "test_find_scan.py:" in note


def test_complex_numbers_are_pairs_of_real_ones():
    inputs = given((2, TOKENS, WIDTH), (WIDTH, WIDTH))
    for program in (of_complex_numbers, of_their_parts):
        gm, _ = assert_same_numbers(program, inputs, of_complex_numbers)
        assert ops(gm).count("scan") == 1
    assert "view_as_real" in ops(assert_same_numbers(of_complex_numbers, inputs)[0])


def test_over_ranks_it_is_one_where_they_can_share_it_all_the_same():
    """Of two sequences each of two ranks has one, and three run one after the other. Random numbers of a step stay in
    their order."""
    inputs = given((2, TOKENS, WIDTH), (WIDTH, WIDTH))
    for program in (tanh_rnn, gru, square):
        gm, context = after(PASSES, program, *inputs, ranks=2)
        assert ops(gm).count("scan") == 1 and "is one scan" in context.notes[0]
    assert "scan" in ops(after(PASSES, tanh_rnn, *inputs, ranks=3)[0])
    assert "scan" not in ops(after(PASSES, random, *inputs, ranks=2)[0])


# ---- torch's scan ----------------------------------------------------------------------------------------------------
# Before 2.13 the gradients of torch's own operator are wrong, so numbers are compared with those of a loop.
def by_loop(step, state, xs, dim):
    assert dim == 0
    out = []
    for t in range(len(xs[0])):
        state, y = step(state, [x[t] for x in xs])
        out.append(y)
    return state, torch.stack(out)


def gated(run, x, g, w):
    def step(state, given):
        x_t, g_t = given
        state = state * g_t.sigmoid() + x_t @ w
        return state, state * 2 + g_t.amax(-1, keepdim=True)

    return run(step, torch.zeros_like(x[0]), (x, g), dim=0)


def test_the_scan_operator_is_the_same_node():
    inputs = given((TOKENS, 2, WIDTH), (TOKENS, 2, WIDTH), (WIDTH, WIDTH))
    gm, _ = assert_same_numbers(partial(gated, scan), inputs, partial(gated, by_loop))
    assert ops(gm).count("scan") == 1 and torch.ops.ringopt.scan.default in {node.target for node in gm.graph.nodes}
    assert ops(gm).index("sigmoid") < ops(gm).index("scan") and ops(gm).index("matmul") < ops(gm).index("scan")


def test_a_scan_operator_that_is_not_affine_is_the_same_node():
    """Inductor compiles no gradient of torch's on CPUs. Ranks run it whole."""

    def program(run, x):
        return run(lambda s, xs: (torch.tanh(s + xs[0]), s * 2), torch.zeros_like(x[0]), (x,), dim=0)

    gm, context = assert_same_numbers(partial(program, scan), given((TOKENS, 2, WIDTH)), partial(program, by_loop))
    assert torch.ops.ringopt.scan.default in {node.target for node in gm.graph.nodes}
    assert "is one scan" in context.notes[0]


# ---- sums with decays between chunks ---------------------------------------------------------------------------------
def lower(n, diagonal=0):
    return torch.ones(n, n, dtype=torch.bool).tril(diagonal)


def masked_first(a):
    """transformers' segment_sum."""
    n = a.shape[-1]
    a = a[..., None].expand(*a.shape, n).masked_fill(~lower(n, -1), 0).cumsum(-2)
    return a.masked_fill(~lower(n), -torch.inf).exp()


def of_differences(a):
    total = a.cumsum(-1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(~lower(a.shape[-1]), -torch.inf).exp()


def by_tril(a):
    total = a.cumsum(-1)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()


def mamba2(a, states, decays):
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    new = torch.einsum("bzch,bzhpn->bchpn", decays(F.pad(a, (1, 0))).transpose(1, 3), states)
    return new[:, :-1], new[:, -1]


def by_sum(a, states, decays):
    return (decays(a).permute(0, 3, 2, 1)[..., None, None] * states[:, :, None]).sum(1)


def by_matmul(a, states, decays):
    return decays(a) @ states.permute(0, 2, 1, 3, 4).flatten(3)


CHUNKED = ((2, 3, 5), (2, 5, 3, 4, 6))


@pytest.mark.parametrize(
    "product, decays",
    [(mamba2, masked_first), (mamba2, of_differences), (by_sum, by_tril), (by_matmul, masked_first)],
    ids=lambda each: each.__name__,
)
def test_a_sum_with_decays_is_a_scan(product, decays):
    gm, _ = assert_same_numbers(lambda a, states: product(a, states, decays), given(*CHUNKED), ranks=2)
    assert ops(gm).count("scan") == 1 and "cumsum" not in ops(gm)


def test_one_process_multiplies_a_matrix_of_few_decays_as_it_is_written():
    def program(a, states):
        return by_sum(a, states, masked_first)

    gm, context = after(PASSES, program, *given(*CHUNKED))
    assert "scan" not in ops(gm) and "up to 128 steps" in context.notes[0]
    gm, _ = assert_same_numbers(program, given((1, 1, 129), (1, 129, 1, 1, 1)))
    assert ops(gm).count("scan") == 1


def test_decays_and_what_they_multiply_may_have_other_dtypes_than_the_sum():
    """Exponents are often summed in a wider dtype; and of two dtypes the product has the wider one."""
    a, states = given(*CHUNKED)
    programs = {
        torch.float32: lambda a, states: by_sum(a, states.float(), lambda a: masked_first(a).float()),
        torch.float64: lambda a, states: by_sum(a, states.float(), masked_first),
    }
    for dtype, program in programs.items():
        gm, _ = after(PASSES, program, a, states, ranks=2)
        assert ops(gm).count("scan") == 1 and "cumsum" not in ops(gm)
        (found,) = gm(*gm.meta["inputs"])
        expected = program(a, states)
        assert found.dtype == expected.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [torch.zeros_like, lambda row: row.sin()], ids=["zeros", "given"])
@pytest.mark.parametrize(
    "read, steps",
    [
        (lambda new: (new[:, :-1], new[:, -1]), 5),
        (lambda new: (new[:, :5],), 5),
        (lambda new: (new[:, 1:], new[:, -1]), 6),
        (lambda new: (new[:, :-1], new.sum()), 6),
        (lambda new: (new[:, :-2],), 6),
        (lambda new: (new[:, :, :-1],), 6),
    ],
    ids=["before and last", "before", "behind", "all", "fewer", "another dim"],
)
def test_the_states_before_each_chunk_take_no_step_more_than_there_are_chunks(read, steps, first):
    """Else ranks would hold the scan's rows elsewhere than the chunks they are made of."""

    def program(a, states):
        joined = torch.cat([first(states[:, :1]), states], 1)[:, :, None]
        decays = masked_first(F.pad(a, (1, 0))).transpose(1, 3)
        return read((decays[..., None, None] * joined).sum(1))

    gm, _ = assert_same_numbers(program, given(*CHUNKED), ranks=2)
    (call,) = (OpCall.of(node) for node in gm.graph.nodes if is_scan(node))
    assert {x.meta["val"].shape[0] for x in call["xs"]} == {steps}
    assert ("cat" in ops(gm)) == (steps == 6)


NO_DECAYS = {
    "one position off": lambda a: (t := a.cumsum(-1)).sub(a)[..., :, None].sub(t[..., None, :]).exp().tril(),
    "growing": lambda a: masked_first(a) * 2,
    "later positions": lambda a: masked_first(a).mT,
    "of another function": lambda a: masked_first(a.tanh()).square(),
    "whole": lambda a: ((t := a.cumsum(-1))[..., :, None] - t[..., None, :]).exp(),
}


@pytest.mark.parametrize("name", NO_DECAYS)
def test_another_matrix_is_none(name):
    gm, context = after(PASSES, lambda a, states: by_sum(a, states, NO_DECAYS[name]), *given(*CHUNKED), ranks=2)
    assert "scan" not in ops(gm) and not context.notes


# ---- as users have it ------------------------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_one_process_runs_it_with_gradients(inner):
    inputs = given(*[(2, 8, WIDTH)] * 4)
    torch._dynamo.reset()
    compiled = torch.compile(gated_linear_attention, backend="ring", options={"inner_backend": inner})
    for found, expected in zip(results(compiled, inputs), results(gated_linear_attention, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert any("a recurrence of 8 steps is one scan" in note for note in reports()[-1].notes)


def rows_written_over(x, w):
    """The second loop takes what the first has made for room: each of its rows is written before it is read."""
    room, state, out = torch.zeros_like(x), torch.zeros_like(x[0]), []
    for t in range(TOKENS):
        room = (room * w + x[t].sin()) * w - (room * 2).cos() * w + x[t].exp()
    for t in range(TOKENS):
        state = state * w + x[t]
        room[t] = state
        out.append(room[t] * 2)
    return torch.stack(out, 1)


def test_a_loop_that_nobody_reads_once_another_is_a_scan_is_passed_over():
    """The loop of more ops comes second, and then is a recurrence of no result."""
    gm, context = assert_same_numbers(rows_written_over, given((TOKENS, WIDTH), (WIDTH,)))
    assert ops(gm).count("scan") == 1 and "cos" not in ops(gm)
    (note,) = context.notes
    assert "state = state * w + x[t]" in note


def test_it_can_be_switched_off():
    inputs = given((2, TOKENS, WIDTH), (WIDTH,))
    torch._dynamo.reset()
    chosen = {"disable_passes": ["find_scan"], "inner_backend": "eager"}
    torch.testing.assert_close(torch.compile(decayed, backend="ring", options=chosen)(*inputs), decayed(*inputs))
    assert not any("is one scan" in note for note in reports()[-1].notes)


def test_what_no_gradient_comes_to_has_none_as_in_the_program():
    def program(x, w, v):
        return stepped_and_given(lambda s, x_t: s * w + x_t * v, lambda s, x_t: s.detach() * x_t, x)

    gm, _ = assert_same_numbers(program, given((2, TOKENS, WIDTH), (WIDTH,), (WIDTH,)))
    assert "scan" in ops(gm) and ops(gm).count("detach") == 3  # the first state, x * v, and w


def stepped_and_given(step, give, x):
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = step(state, x[:, t])
        out.append(give(state, x[:, t]))
    return torch.stack(out, 1)
