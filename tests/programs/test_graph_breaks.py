"""Programs of several graphs: each exact, what crosses a break is what the program says it is, the report says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference, run

WIDTH, HEADS = 16, 2


class Broken(nn.Module):
    """Attention, a break that Python needs, attention, and a loss behind another break."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.seen = []

    def attend(self, layer, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x):
        x = self.attend(self.layers[0], x)
        torch._dynamo.graph_break(msg="between the layers")
        self.seen.append(float(x.detach().sum()))  # a number of the whole value
        x = self.attend(self.layers[1], x)
        torch._dynamo.graph_break(msg="before the loss")
        return x.square().mean()


def data():
    return torch.randn(2, 13, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def on_rank(outputs):
    torch._dynamo.reset()
    model, before = Broken(), len(ringopt.reports())
    options = {"inner_backend": "aot_eager", "outputs": outputs}
    compiled = torch.compile(model, backend="ring", options=options)
    found, expected = run(compiled, model, {"x": data()}), run(model, model, {"x": data()})
    seen = abs(model.seen[0] / model.seen[1] - 1)
    return max(difference(found, expected), seen), [report.notes for report in ringopt.reports()[before:]]


def test_each_graph_is_exact_and_says_why_it_ends(ranks):
    for error, notes in ranks(2, on_rank, "gather"):
        assert error < 1e-5
        said = [note for part in notes for note in part if "graph break" in note]
        for note, line in zip((said[0], said[2]), ("between the layers", "before the loss"), strict=True):
            assert note.startswith("ends at a graph break: Call to `torch._dynamo.graph_break()` (test_graph_breaks.py")
            assert line in note and note.endswith("1 values cross it whole, gathered: 1.6 KiB")
        assert "Tensor.item()" in said[1] and said[1].endswith("nothing is gathered for it")


@pytest.mark.zoo
def test_lazy_outputs_cross_in_rows(ranks):
    for error, notes in ranks(2, on_rank, "lazy"):
        assert error < 1e-5
        assert "1 cross it in rows, gathered if they are read there" in str(notes[0])


def test_explain_says_it_too():
    report = ringopt.explain(Broken(), data(), world_size=4)
    assert sum("ends at a graph break" in note for note in report.notes) == 3
    assert "between the layers" in report.text(verbose=True).replace("\n", " ")


class Behind(Broken):
    """Behind each break no attention: a linear layer, then what a whole value and its first token are needed for."""

    def forward(self, x):
        x = self.attend(self.layers[0], x)
        torch._dynamo.graph_break(msg="before the linear layers")
        x = F.gelu(self.layers[1](x)).flatten(0, 1)
        if x.max() > 0:  # a number of all rows
            x = self.layers[0](x[:, :WIDTH].unflatten(0, (2, -1)))
        return x.square().mean() + x[:, 0].sum() / 100


def behind_on_rank():
    torch._dynamo.reset()
    model, before = Behind(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    found, expected = run(compiled, model, {"x": data()}), run(model, model, {"x": data()})
    return difference(found, expected), ringopt.reports()[before:]


def test_behind_a_break_values_that_were_rows_are_cut_again(ranks):
    for error, reports in ranks(2, behind_on_rank):
        assert error < 1e-5
        assert [report.sharded_fraction for report in reports] == [1.0, 1.0, 1.0]
        assert any("cut here again" in note for note in reports[1].notes)


class Sampled(nn.Module):
    """Deformable attention behind a break: rows that were cut end where a picture is sampled, and the layers work on
    those of an input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.values, self.places, self.last = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x):
        values, places = self.values(x), self.places(x)
        torch._dynamo.graph_break()
        picture = values.mT.unflatten(-1, (2, -1))
        return self.last(x + F.grid_sample(picture, places[:, :, None], align_corners=False).squeeze(-1).mT)


def sampled_on_rank():
    torch._dynamo.reset()
    model, before = Sampled(), len(ringopt.reports())
    compiled, x = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"}), torch.randn(2, 20, 8)
    found, expected = run(compiled, model, {"x": x}), run(model, model, {"x": x})
    return difference(found, expected), [report.sharded_fraction for report in ringopt.reports()[before:]]


def test_rows_that_reach_no_product_behind_a_break_leave_it_to_the_layers(ranks):
    for error, shares in ranks(2, sampled_on_rank):
        assert error < 1e-5 and shares == [1.0, 1.0]


def test_a_graph_that_would_gain_nothing_behind_a_break_cuts_nothing():
    """No products, or memory that is the program's: what is returned would be gathered for nothing."""

    def program(x, kind):
        y = F.scaled_dot_product_attention(x, x, x)
        torch._dynamo.graph_break()
        y.mul_(2)
        return y @ y.mT if kind == "written" else y

    for kind in ("written", "no products"):
        torch._dynamo.reset()
        report = ringopt.explain(program, torch.randn(1, 2, 8, 4), kind, world_size=2)
        assert not any("cut here again" in note for note in report.notes)


class Callee(Broken):
    """A break in what a function calls."""

    def broken(self, x):
        x = self.attend(self.layers[0], x)
        torch._dynamo.graph_break(msg="in a callee")
        return self.attend(self.layers[1], x)

    def forward(self, x):
        return self.layers[0](self.broken(x)).square().mean()


def callee_on_rank():
    torch._dynamo.reset()
    model, before = Callee(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    found, expected = run(compiled, model, {"x": data()}), run(model, model, {"x": data()})
    return difference(found, expected), [report.sharded_fraction for report in ringopt.reports()[before:]]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has it, but younger")
def test_a_caller_goes_on_in_the_graph_of_what_it_called(ranks):
    for error, shares in ranks(2, callee_on_rank):
        assert error < 1e-5 and shares == [1.0, 1.0]


def with_hooks(model):
    """What hooks of a backward were given, the first of which change it; Dynamo breaks where they are set up."""
    seen = []
    for layer in model.layers:
        layer.register_full_backward_pre_hook(lambda module, given: (given[0] * 2,))
        layer.register_full_backward_hook(lambda module, to, given: seen.extend(x.clone() for x in (*to, *given)))
    return seen


def hooks_on_rank():
    torch._dynamo.reset()
    models = Broken(), Broken()
    seen = [with_hooks(model) for model in models]
    compiled = torch.compile(models[0], backend="ring", options={"inner_backend": "aot_eager"})
    found, expected = (
        run(call, model, {"x": data()}) for call, model in zip((compiled, models[1]), models, strict=True)
    )
    return difference(found, expected), len(seen[1]), difference(*seen)


def test_hooks_of_a_modules_backward_see_whole_gradients_and_may_change_them(ranks):
    for error, count, of_hooks in ranks(2, hooks_on_rank):
        assert error < 1e-5 and of_hooks < 1e-5 and count == 4


class Cached(Broken):
    """Attention over all tokens so far: each layer adds the keys of the new ones to those that it gave before."""

    def forward(self, x, caches):
        grown = []
        for layer, cache in zip(self.layers, caches, strict=True):
            q, *new = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            k, v = (torch.cat(pair, 2) for pair in zip(cache, new, strict=True)) if cache else new
            causal = {"is_causal": q.shape[2] > 1}
            y = F.scaled_dot_product_attention(q, k, v, **causal).transpose(1, 2).flatten(2)
            x = x + F.linear(y, layer.weight[:WIDTH])
            grown.append((k, v))
        return x, grown


def decoded(compiled):
    """Of a prompt of 13 tokens and three more, one at a time."""
    found, caches = [], [(), ()]
    with torch.no_grad():
        for x in (data().detach(), *data().detach()[:, :3].split(1, 1)):
            x, caches = compiled(x, caches)
            found += [x, *(each for pair in caches for each in pair)]
    return found


def cached_on_rank():
    torch._dynamo.reset()
    before = len(ringopt.reports())
    found = decoded(torch.compile(Cached(), backend="ring", options={"inner_backend": "aot_eager"}))
    return found, ringopt.reports()[before:]


def test_a_cache_that_an_earlier_graph_gave_grows_whole(ranks):
    expected = decoded(Cached())
    for found, (prompt, *tokens) in ranks(2, cached_on_rank):
        assert all(torch.allclose(each, value, atol=1e-6) for each, value in zip(found, expected, strict=True))
        assert prompt.gathers and tokens
        for report in tokens:  # one of 14 tokens, and one of any number
            assert report.refusal is None and not report.gathers and report.sites[0].refusal is None


class Writes(nn.Module):
    """In place, to what crossed a break: no leaf, so torch allows it."""

    def __init__(self, made, write):
        super().__init__()
        self.qkv, self.out, self.made, self.write = nn.Linear(16, 48), nn.Linear(16, 16), made, write
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        y = self.made(2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        torch._dynamo.graph_break()
        self.write(y, self.out(x))
        return self.out(y.tanh())


@torch.compiler.disable
def part_of_another(y):
    """It lies in memory as no tensor that a graph makes."""
    return torch.cat([y, y], -1)[..., 8:24]


WRITTEN = {
    "to all of it": (lambda y: y, lambda y, x: y.add_(x)),
    "to a slice": (lambda y: y, lambda y, x: y[:, :, :4].mul_(3.0)),
    "to a row": (lambda y: y, lambda y, x: y[:, 0].copy_(x[:, 1])),
    "to a part of another": (part_of_another, lambda y, x: y[:, :, 4:].add_(x[..., :12])),
    "to what has no gradient yet": (lambda y: y.new_zeros(y.shape), lambda y, x: y[:, :, :4].add_(x[..., :4])),
}


def written(name):
    """Over two lengths: the error of outputs and gradients, and what is refused."""
    torch.manual_seed(0)
    model, error, before = Writes(*WRITTEN[name]), 0.0, len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for rows in (21, 29):
        x = torch.randn(2, rows, 16, dtype=torch.float64, requires_grad=True)
        found, expected = ([y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()], materialize_grads=True)]
                           for y in (compiled(x), model(x)))  # fmt: skip
        error = worst_of(error, *(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)))
    return error, [report.refusal for report in ringopt.reports()[before:]]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.zoo) if x in ("to all of it", "to a row") else x for x in WRITTEN]
)
def test_what_crosses_a_break_is_written_in_place_at_every_length(ranks, name):
    for error, refusals in ranks(2, written, name):
        assert error < 1e-10 and not any(refusals)
