"""Custom autograd.Functions: their own gradient, sharded where the rules reach, exact everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import ringopt
from ringopt.frontend.capture import capture
from ringopt.ir.autograd_function import custom_gradients
from ringopt.ir.refusal import GraphRefused
from ringopt.sharding.handlers.autograd_function import Functions
from tests.harness.capturing import assert_same
from tests.harness.custom_functions import OTHERS, TOKEN_WISE, Both, Model, Silent, data
from tests.harness.errors import worst_of
from tests.harness.models import difference, run
from tests.harness.translation import captured, validate


def all_of(functions):
    each = tuple(functions.values())
    return lambda model, x: torch.stack([function(model, x) for function in each]).mean(0)


@pytest.mark.parametrize(
    "name, p",
    [(None, 2), *(pytest.param(name, p, marks=pytest.mark.zoo) for name in TOKEN_WISE for p in (2, 3))],
)  # fmt: skip
def test_token_by_token_it_stays_sharded(name, p):
    if (name is None or name in IN_PLACE) and torch.__version__ < (2, 13):
        pytest.skip("Dynamo does not say what the function writes; its graph is refused")
    model = Model(all_of(TOKEN_WISE), ("before",)) if name is None else Model(TOKEN_WISE[name])
    verdict = validate(p, model.double(), data())
    assert not verdict.wrong
    assert not verdict.report.gathers and "gathers" not in str(verdict.report.notes)
    assert verdict.report.sharded_fraction == 1.0


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="the graphs of a function come without what they save")
def test_no_value_of_a_norm_holds_all_tokens():
    """Nor what it saves: the rows that its backward wants are made in the forward, from rows of the input."""
    verdict = validate(2, Model(TOKEN_WISE["norm"], ("before",)).double(), data(), tolerance=1e-8)
    graphs = [verdict.graph, *(node.target.backward for node in custom_gradients(verdict.graph.graph))]
    assert len(graphs) == 2
    values = [node.meta["val"] for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert not [list(x.shape) for x in values if isinstance(x, torch.Tensor) and 11 in x.shape]


def test_a_gradient_that_is_not_linear_is_taken_once():
    """Of a value that is used in rows and whole: both uses are of one call."""
    verdict = validate(2, Model(OTHERS["clipped twice"]).double(), data())
    assert len(custom_gradients(verdict.graph.graph)) == 2
    assert {gather.op for gather in verdict.report.gathers} == {"renorm"}


class OfEach(Function):
    """A result of the rows and one of a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        return x.sin(), weight.cos()

    @staticmethod
    def backward(ctx, grad, of_weight):
        return grad.clamp(-1e-3, 2e-3), of_weight


def test_a_function_of_which_one_result_is_read_is_called_once_though_that_is_wanted_in_two_forms(monkeypatch):
    """Along the rows, as it is placed, and along columns; the other result is replicated."""
    monkeypatch.setattr(Functions, "twice", lambda self: {})  # where there are two, it asks for another walk, each time

    def step(model, x):
        y, _ = OfEach.apply(x, model.gain)
        return y + y.sort(1).values

    verdict = validate(2, Model(step, ("after",)).double(), data())
    assert verdict.wrong == "" and len(custom_gradients(verdict.graph.graph)) == 1


def test_what_the_backward_gathers_is_told():
    verdict = validate(2, Model(OTHERS["ordered"], ("after",)).double(), data())
    (note,) = verdict.report.notes
    assert "the backward of a custom autograd.Function (custom_functions.py" in note and "for renorm" in note


@pytest.mark.parametrize(
    "name, p", [(None, 2), *(pytest.param(name, p, marks=pytest.mark.zoo) for name in OTHERS for p in (2, 3))]
)
def test_what_mixes_rows_is_exact(name, p):
    step = all_of(OTHERS) if name is None else OTHERS[name]
    assert not validate(p, Model(step).double(), data()).wrong


IN_PLACE = ("changed in place", "written", "rows written", "columns written", "weighed", "written in a checkpoint")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in (*TOKEN_WISE, *OTHERS) if name not in IN_PLACE])
def test_the_captured_graph_is_the_program(name):
    gm, given = captured(Model({**TOKEN_WISE, **OTHERS}[name]).double(), data())
    assert_same(capture(gm, given).graph, gm, given)


# ---- through the compilers, and around the call --------------------------------------------------------------------
class Mixed(Function):
    """As torch.amp has it: an autocast of its own around the backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.to(grad.dtype).T, (x.flatten(0, -2).T.to(grad.dtype) @ grad.flatten(0, -2)) * 2


def mixed(model, x):
    return Mixed.apply(x, model.out.weight)


def on_rank(names, inner_backend, dtype):
    torch._dynamo.reset()
    found = []
    for name in names:
        model, inputs = Model({**TOKEN_WISE, **OTHERS, "mixed": mixed}[name]), {"x": data(12, torch.float32)}
        compiled = torch.compile(model, backend="ring", options={"inner_backend": inner_backend})
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            ours, theirs = run(compiled, model, inputs), run(model, model, inputs)
        report = ringopt.reports()[-1]
        found.append((difference(ours, theirs), report.refusal, report.sharded_fraction))
    return found


@pytest.mark.parametrize(
    "names, inner_backend, dtype, bound",
    [
        (("clipped twice",), "aot_eager", None, 1e-4),
        pytest.param(("written",), "aot_eager", None, 1e-4, marks=pytest.mark.zoo),
        pytest.param(("mixed", "norm"), "aot_eager", torch.bfloat16, 0.05, marks=pytest.mark.zoo),
        pytest.param(("projected",), "inductor", None, 1e-5, marks=pytest.mark.zoo),
        pytest.param(("split", "changed in place"), "aot_eager", None, 1e-4, marks=pytest.mark.zoo),
        pytest.param(("projected", "changed in place"), "aot_eager", torch.bfloat16, 0.05, marks=pytest.mark.zoo),
    ],
)  # fmt: skip
def test_on_ranks(ranks, names, inner_backend, dtype, bound):
    for results in ranks(2, on_rank, names, inner_backend, dtype, timeout=240):
        for error, refusal, sharded in results:
            assert error < bound and refusal is None and sharded == 1.0, results


def shared(x, other):
    y = x * 3
    return sum(Both.apply(y, y[..., :]))


WRITES = {
    "to an input of the graph": lambda x, other: Both.apply(other, x)[1],
    "to its input without saying so": lambda x, other: Silent.apply(x * 3) + 1,
    "to an input that shares memory with another one": shared,
}


@pytest.mark.parametrize("what", WRITES)
def test_writes_that_others_would_not_see_are_refused(what):
    gm, given = captured(WRITES[what], data(), data().detach())
    told = what if torch.__version__ >= (2, 13) else "to its input without saying so"  # which Dynamo does not hand on
    with pytest.raises(GraphRefused, match=rf"a custom autograd\.Function writes {told} \(mark_dirty\)"):
        capture(gm, given)


def lengths_in_turn():
    torch._dynamo.reset()
    model, worst = Model(TOKEN_WISE["inside a checkpoint"]), 0.0
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for n in (12, 17, 21):
        inputs = {"x": data(n, torch.float32)}
        worst = worst_of(worst, difference(run(compiled, model, inputs), run(model, model, inputs)))
    return worst, ringopt.reports()[-1].sharded_fraction


@pytest.mark.zoo
def test_lengths_in_turn(ranks):
    assert all(error < 1e-5 and sharded == 1.0 for error, sharded in ranks(2, lengths_in_turn))
