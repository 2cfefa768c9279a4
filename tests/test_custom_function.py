"""Custom autograd.Functions: their own gradient, sharded where the rules reach, exact everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import ringopt
from ringopt.capture import capture
from ringopt.graph.custom_gradient import custom_gradients
from ringopt.pipeline import GraphRefused
from tests.capturing import assert_same
from tests.models import difference, run
from tests.translation import captured, validate

WIDTH, HEADS = 16, 2


class Rounded(Function):
    """Straight-through: no derivative of anything."""

    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Scaled(Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class Clipped(Function):
    """Not linear in its gradient: two halves of it clipped apart are not the whole clipped."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 2e-3)


class Norm(Function):
    """RMS norm with its true gradient, of the weight too: sums over the rows."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight = ctx.saved_tensors
        inner = grad * weight
        dx = inner * scale - x * scale.pow(3) * (inner * x).mean(-1, keepdim=True)
        return dx, (grad * x * scale).flatten(0, -2).sum(0)


class Projected(Function):
    """A linear layer, three times its gradient of the weight."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, 3 * rows.T @ x.flatten(0, -2), rows.sum(0)


class Split(Function):
    """Two results, and one that has no gradient."""

    @staticmethod
    def forward(ctx, x):
        top, place = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(place)
        ctx.save_for_backward(place)
        return x - top, top, place

    @staticmethod
    def backward(ctx, grad, of_top, _of_place):
        (place,) = ctx.saved_tensors
        return 2 * grad + torch.zeros_like(grad).scatter(-1, place, of_top)


class Normed(Function):
    """Its gradient is divided by its norm over all rows: known to no rule of one row."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class Sorted(Function):
    """Its forward mixes rows in a way no rule knows."""

    @staticmethod
    def forward(ctx, x):
        y, place = x.sort(1)
        ctx.save_for_backward(place)
        return y

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(1, place, grad) * 2


class Ordered(Function):
    """Its backward does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.sort(1).values


class Broadcast(Function):
    """Gradients larger than the operand are summed by autograd."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, grad * 2


class Doubled(Function):
    """Writes to its input, and has another gradient than that says."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Weighed(Function):
    """Writes to one of its inputs, and saves what it wrote."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x, x * weight

    @staticmethod
    def backward(ctx, grad, of_product):
        (x,) = ctx.saved_tensors
        return 3 * grad + of_product * x, (of_product * x).sum((0, 1))


class Silent(Function):
    """Writes to its input and does not say so: autograd takes it for what it was."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Both(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x + y

    @staticmethod
    def backward(ctx, grad, of_sum):
        return grad + of_sum, of_sum


class Model(nn.Module):
    """Attention with `step(self, value)` before it and after it."""

    def __init__(self, step, where=("before", "after")):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.where = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), where
        self.gain, self.bias, self.step = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1, 1, WIDTH)), step

    def forward(self, x):
        x = x * 2
        if "before" in self.where:
            x = self.step(self, x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if "after" in self.where:
            y = self.step(self, y)
        return self.out(y).square().mean()


def written(model, x):
    """All names of the memory stand for what was written, and for its gradient: a view made before too."""
    y = x / 3
    before = y[..., 1:]
    z = Doubled.apply(y)
    z.add_(x)
    return y * z + F.pad(before, (1, 0))


def rows_written(model, x):
    y = x * 3
    Doubled.apply(y[:, 2:7])
    return y


def columns_written(model, x):
    y = x * 3
    Doubled.apply(y[..., :4])
    return y


def weighed(model, x):
    y = x * 3
    a, b = Weighed.apply(y, model.gain)
    return a * b + y


def split(model, x):
    y, top, place = Split.apply(x)
    return y * top + place


TOKEN_WISE = {
    "rounded": lambda model, x: Rounded.apply(x),
    "scaled": lambda model, x: Scaled.apply(x, 0.1),
    "clipped": lambda model, x: Clipped.apply(x),
    "norm": lambda model, x: Norm.apply(x, model.gain),
    "projected": lambda model, x: Projected.apply(x, model.out.weight, model.out.bias),
    "broadcast": lambda model, x: Broadcast.apply(x, model.bias),
    "changed in place": lambda model, x: Clipped.apply(x).mul_(3).add_(x),
    "no gradient of the input": lambda model, x: Norm.apply(x.detach(), model.gain) + x,
    "inside a checkpoint": lambda model, x: checkpoint(Norm.apply, x, model.gain, use_reentrant=False),
    "written": written,
    "rows written": rows_written,
    "columns written": columns_written,
    "weighed": weighed,
    "written in a checkpoint": lambda model, x: checkpoint(written, model, x, use_reentrant=False),
    "norm of norm": lambda model, x: Norm.apply(Norm.apply(x, model.gain), model.gain),
}
OTHERS = {
    "split": split,
    "normed": lambda model, x: Normed.apply(x),
    "sorted": lambda model, x: Sorted.apply(x),
    "ordered": lambda model, x: Ordered.apply(x),
    "clipped twice": lambda model, x: (lambda y: y + y.sort(1).values)(Clipped.apply(x)),
}


def data(n=11, dtype=torch.float64):
    return torch.randn(2, n, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_token_by_token_it_stays_sharded(name):
    for p in (2, 3):
        verdict = validate(p, Model(TOKEN_WISE[name]).double(), data())
        assert not verdict.wrong
        assert not verdict.report.gathers and "gathers" not in str(verdict.report.notes)
        assert verdict.report.sharded_fraction == 1.0


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
    assert {gather.op for gather in verdict.report.gathers} == {"sort"}


def test_what_the_backward_gathers_is_told():
    verdict = validate(2, Model(OTHERS["ordered"], ("after",)).double(), data())
    (note,) = verdict.report.notes
    assert "the backward of a custom autograd.Function (test_custom_function.py" in note and "for sort" in note


@pytest.mark.parametrize("name", OTHERS)
def test_what_mixes_rows_is_exact(name):
    for p in (2, 3):
        assert not validate(p, Model(OTHERS[name]).double(), data()).wrong


IN_PLACE = ("changed in place", "written", "rows written", "columns written", "weighed", "written in a checkpoint")


@pytest.mark.parametrize("name", [name for name in (*TOKEN_WISE, *OTHERS) if name not in IN_PLACE])
def test_the_captured_graph_is_the_program(name):
    gm, given = captured(Model({**TOKEN_WISE, **OTHERS}[name]).double(), data())
    assert_same(capture(gm, given), gm, given)


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
        (("norm", "split", "clipped twice", "changed in place", "inside a checkpoint"), "aot_eager", None, 1e-4),
        (("written",), "aot_eager", None, 1e-4),
        (("projected",), "inductor", None, 1e-5),
        (("norm", "projected", "mixed", "changed in place"), "aot_eager", torch.bfloat16, 0.05),
    ],
    ids=["aot_eager", "written", "inductor", "autocast"],
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
    with pytest.raises(GraphRefused, match=rf"a custom autograd\.Function writes {what} \(mark_dirty\)"):
        capture(gm, given)


def lengths_in_turn():
    torch._dynamo.reset()
    model, worst = Model(TOKEN_WISE["inside a checkpoint"]), 0.0
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for n in (12, 17, 21):
        inputs = {"x": data(n, torch.float32)}
        worst = max(worst, difference(run(compiled, model, inputs), run(model, model, inputs)))
    return worst, ringopt.reports()[-1].sharded_fraction


def test_lengths_in_turn(ranks):
    assert all(error < 1e-5 and sharded == 1.0 for error, sharded in ranks(2, lengths_in_turn))
