"""Unrolled loops, rolled up: the same numbers and gradients, in a graph whose size the length has no part in."""

from __future__ import annotations

import pytest
import torch

from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from ringopt.recognize.scans.find import judged, loops
from ringopt.recognize.scans.recurrence import NotRolled
from tests.harness.capturing import after, ops, results
from tests.harness.recurrences import AFFINE, ROWS, WIDTH

PASSES = [Normalize(), FindScan()]
# Of these, elements are computed in other groups of a vector unit, which rounds exp and its kin otherwise.
ROUNDED = {"GLA", "GLA, filled", "in place", "trapezoids", "backwards", "begun by the first", "LRU"}


def refusals(context):
    return [note for note in context.notes if "no scan" in note]


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", AFFINE)
def test_a_loop_is_one_scan_of_the_same_numbers(name):
    given = AFFINE[name]
    gm, context = after(PASSES, given.call, *given.inputs())
    assert ops(gm).count("scan") == 1 and not refusals(context)
    original, _ = after([Normalize()], given.call, *given.inputs())
    outputs = len(gm.graph.output_node().args[0])
    found, expected = results(gm, gm.meta["inputs"]), results(original, original.meta["inputs"])
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None)
        if one is not None and place < outputs and name not in ROUNDED:
            assert torch.equal(one, other)
        elif one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["GDN", "Mamba", "RWKV"])
def test_the_size_of_the_graph_is_the_same_at_any_length(name):
    short, long = (after(PASSES, AFFINE[name].call, *AFFINE[name].inputs(rows))[0] for rows in (ROWS, ROWS + 4))
    assert ops(short) == ops(long)


@pytest.mark.parametrize("name", AFFINE)
def test_what_steps_hand_on_matters(name):
    """Otherwise the test above would see nothing of it: the last row reads the first."""
    given = AFFINE[name]
    first, last = (-1, 0) if name == "backwards" else (0, -1)
    inputs = [x.detach() for x in given.inputs()]
    changed = [x.clone() for x in inputs]
    for x in changed:
        if ROWS in x.shape:
            x.select(x.shape.index(ROWS), first).add_(1)
    outs = [given.call(*each) for each in (inputs, changed)]
    one, other = (out[0] if isinstance(out, tuple) else out for out in outs)
    one, other = (out.select(out.shape.index(ROWS), last) for out in (one, other))
    assert float((one - other).abs().max()) > 1e-6


def scanned(x, step, state=None):
    state, out = torch.zeros_like(x[:, 0]) if state is None else state, []
    for t in range(x.shape[1]):
        state = step(state, x[:, t], t)
        out.append(state)
    return torch.stack(out, 1)


def blocks(x, f):
    """What is written is wider than a row, and no step is as long as it."""
    out, state = torch.zeros(2, ROWS + 3, WIDTH, dtype=x.dtype), x[:, 0]
    for t in range(0, ROWS, 4):
        state = state * f[:, t].sigmoid() + x[:, t + 3]
        out[:, t + 2 : t + 6] = state.unsqueeze(1) * x[:, t : t + 4]
    return out


def two_loops(x, f):
    once = scanned(x, lambda s, x_t, t: s * f[:, t].sigmoid() + x_t)
    return scanned(once, lambda s, x_t, t: s * f[:, t].sigmoid() * 0.5 + x_t)


def windows(x, f):
    """Steps that overlap."""
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(ROWS - 3):
        state = state * f[:, t].sigmoid() + x[:, t : t + 4].sum(1)
        out.append(state)
    return torch.stack(out, -1)


def list_before(x, f):
    """What the steps take was made in a loop of its own."""
    gates = [f[:, t].sigmoid() for t in range(x.shape[1])]
    return scanned(x, lambda s, x_t, t: s * gates[t] + x_t)


def split(x, f):
    """Chunks of which each is read whole, and its last row."""
    state, out = torch.zeros_like(x[:, 0]), []
    for x_c, f_c in zip(x.split(4, 1), f.chunk(ROWS // 4, 1), strict=True):
        out.append(x_c * state.unsqueeze(1))
        state = state * f_c[:, -1].sigmoid() + x_c.sum(1)
    return torch.cat(out, 1)


def some_read(x, f):
    """Of the states one in the middle and the last."""
    states = scanned(x, lambda s, x_t, t: s * f[:, t].sigmoid() + x_t).unbind(1)
    return states[5] * states[-1]


def number_first(x, f):
    """The state begins as a number, and then has a row for each of the batch."""
    state, out = torch.zeros((), dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * f[:, t].sigmoid() + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


def every_second(x, f):
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(1, ROWS - 1, 2):
        state = state * f[:, t].sigmoid() + x[:, t + 1] * x[:, t - 1]
        out.append(state)
    return torch.stack([x[:, 0], *out, x[:, 1]], 1)


def downwards(x, f):
    """From the last row to the first, written as it goes."""
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for t in range(ROWS - 1, -1, -1):
        state = state * f[:, t].sigmoid() + x[:, t]
        out[:, t] = state
    return out


def rows_behind(x, f):
    """A tensor that is written behind rows of its own, which stay."""
    out, state = x * 2, torch.zeros_like(x[:, 0])
    for t in range(4, ROWS - 4):
        state = state * f[:, t].sigmoid() + x[:, t]
        out[:, t] = state
    return out


def parts_written(x, f):
    """A row is written in two parts, through a view of what the loop finds there."""
    out, state = x.clone(), torch.zeros_like(x[:, 0])
    for t in range(ROWS):
        state = state * f[:, t].sigmoid() + x[:, t]
        out[:, t, :2] = state[:, :2]
    return out


def written_as_cast(x, f):
    """The tensor that is filled comes out of a cast which had nothing to do, and is that one."""
    out, state = torch.zeros(x.shape, dtype=x.dtype).to(x), torch.zeros_like(x[:, 0])
    for t in range(ROWS):
        state = state * f[:, t].sigmoid() + x[:, t]
        out[:, t] = state
    return out


def before_each(x, f, across=False):
    """Each state is written as it was before the step, and the last one behind them, as xLSTM does."""
    out, state = torch.zeros(2, (ROWS + 1) * WIDTH, dtype=x.dtype), torch.zeros_like(x[:, 0])
    for t in range(ROWS):
        out[:, t * WIDTH : (t + 1) * WIDTH] = state
        state = state * f[:, t].sigmoid() + x[:, t]
    out[:, -WIDTH:] = state
    if across:
        return out[:, 2:-2]
    return out[:, :-WIDTH].unflatten(1, (ROWS, WIDTH)) * out[:, -WIDTH:].unsqueeze(1)


def read_across(x, f):
    """What is read of them begins and ends within a part."""
    return before_each(x, f, across=True)


def before_and_behind(x, f):
    """A first state that is no zeros."""
    before, behind, state = torch.zeros_like(x), torch.zeros_like(x), x[:, 3]
    for t in range(ROWS):
        before[:, t] = state
        state = state * f[:, t].sigmoid() + x[:, t]
        behind[:, t] = state
    return before * 2 + behind


LOOPS = (blocks, two_loops, windows, list_before, split, some_read, number_first, every_second, downwards, rows_behind,
         parts_written, written_as_cast, before_each, read_across, before_and_behind)  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
def test_loops_of_every_kind(program):
    torch.manual_seed(0)
    inputs = [torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    gm, context = after(PASSES, program, *inputs)
    assert ops(gm).count("scan") == 1 + (program is two_loops) and not refusals(context)
    assert len(ops(gm)) < 45
    original, _ = after([Normalize()], program, *inputs)
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, original.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for found, expected in zip(gm(*gm.meta["inputs"]), original(*original.meta["inputs"]), strict=True):
        assert found.stride() == expected.stride()


def sum_of_experts(x, f):
    """No order, and no state."""
    total = torch.zeros_like(x[:, 0])
    for e in range(8):
        total = total + f[:, e].sigmoid() * x[:, 0]
    return total


def taps(x, f):
    return sum(x[:, tap : tap + 8] * f[0, tap] for tap in range(5))


def casts(x, f):
    """Three times the same, none of which reads another."""
    return [x[:, i].unsqueeze(1).float().transpose(0, 1) for i in range(4)]


def maps(x, f):
    out = torch.zeros_like(x)
    for t in range(ROWS):
        out[:, t] = x[:, t] * f[:, t]
    return out


def layers(x, f):
    w = [f[0, :4] * i for i in range(1, 5)]
    for each in w:
        x = (x @ each).relu() + x
    return x


def another_at_first(x, f):
    """Angles that are computed once and read from a table from then on."""
    angles, found = x[0], []
    for part in x.split(1, -1):
        found.append(part @ f[0, :1] * angles.cos())
        angles = f[1].detach()
    return torch.cat(found, -1)


NO_LOOPS = (sum_of_experts, taps, casts, maps, layers, another_at_first)


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", NO_LOOPS, ids=lambda program: program.__name__)
def test_what_is_no_recurrence_is_left_without_a_word(program):
    torch.manual_seed(0)
    inputs = [torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    before, _ = after([Normalize()], program, *inputs)
    gm, context = after(PASSES, program, *inputs)
    assert ops(gm) == ops(before) and not context.notes


def test_a_state_that_is_read_where_it_was_written_before_the_step_stays():
    def program(x, f):
        out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for t in range(1, ROWS):
            seen = out[:, t - 1] * 1.5
            out[:, t] = state
            state = state * f[:, t].sigmoid() + x[:, t] + seen
        return out

    torch.manual_seed(0)
    inputs = [torch.randn(2, ROWS, WIDTH, dtype=torch.float64) for _ in range(2)]
    gm, context = after(PASSES, program, *inputs)
    assert "scan" not in ops(gm) and refusals(context)
    torch.testing.assert_close(gm(*gm.meta["inputs"])[0], program(*inputs))


def test_parts_are_read_where_they_were_written():
    """Of the tensor that holds the states nothing is left, in the layer that reads them and in the next."""

    def program(x, f):
        return before_each(before_each(x, f), f)

    gm, _ = after(PASSES, program, *(torch.randn(2, ROWS, WIDTH, dtype=torch.float64) for _ in range(2)))
    assert ops(gm).count("scan") == 2 and not {"slice_scatter", "select_scatter"} & set(ops(gm))


def test_the_border_of_an_iteration_is_where_least_is_carried():
    """At the state of [2, 4], and not within the chunk that is made of it."""
    inputs = [torch.randn(2, ROWS, WIDTH, dtype=torch.float64) for _ in range(2)]
    gm, _ = after([Normalize()], split, *inputs)
    (loop,) = loops(gm.graph)
    found = judged(loop)
    assert not isinstance(found, NotRolled) and found is not None
    (carry,) = found.recurrence.inputs[0]
    assert tuple(carry.meta["val"].shape) == (2, WIDTH) and found.recurrence.steps == ROWS // 4


def last_state(x, f):
    state = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = state * f[:, t].sigmoid() + x[:, t]
    return state


def judgement(program):
    gm, _ = after([Normalize()], program, *(torch.ones(2, 6, WIDTH) for _ in range(2)))
    (loop,) = loops(gm.graph)
    return judged(loop)


def test_what_is_carried_decides_that_it_is_a_recurrence():
    """And not what else a step gives: of one whose last state alone is read, that is nothing."""
    found = judgement(last_state)
    assert not isinstance(found, NotRolled) and found is not None
    carries, outputs = found.recurrence.outputs
    assert (len(carries), outputs) == (1, [])


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_states_that_are_joined_backwards_are_turned_at_once(join):
    def backwards(x, f):
        return join(scanned(x, lambda s, x_t, t: s * f[:, t].sigmoid() + x_t).unbind(1)[::-1], 1)

    def listed(x, f):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * f[:, t].sigmoid() + x[:, t]
            out.append(state)
        return join(out[::-1], 1)

    given = torch.randn(2, ROWS, WIDTH), torch.randn(2, ROWS, WIDTH)
    gm, _ = after(PASSES, listed, *given)
    assert ops(gm).count("flip") == 1 and "select" not in ops(gm)[ops(gm).index("scan") :]
    torch.testing.assert_close(gm(*given)[0], listed(*given))


def test_parts_of_one_size_between_parts_of_another_are_no_even_places():
    def program(x, f):
        parts, state, out = x.split([2, 1] * 4 + [ROWS - 12], 1), torch.zeros_like(x[:, 0]), []
        for t in range(4):
            state = state * f[:, t].sigmoid() + parts[2 * t].sum(1)
            out.append(state)
        return torch.stack(out, 1)

    given = [torch.randn(2, ROWS, WIDTH, dtype=torch.float64) for _ in range(2)]
    gm, _ = after(PASSES, program, *given)
    assert ops(gm).count("scan") == 1
    torch.testing.assert_close(gm(*given)[0], program(*given))


def test_a_last_state_lies_in_memory_as_that_of_the_loop():
    given = [torch.randn(WIDTH, ROWS, 2, dtype=torch.float64).transpose(0, 2) for _ in range(2)]
    gm, _ = after(PASSES, last_state, *given)
    (found,), expected = gm(*given), last_state(*given)
    assert ops(gm).count("scan") == 1 and found.stride() == expected.stride() == (1, 2)
    torch.testing.assert_close(found, expected)
