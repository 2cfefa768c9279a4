"""Gathers and sums over the ranks that start as soon as their operand is there: when, that they are right, and how much
may be under way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import ringopt
from ringopt.dims.products import is_product
from ringopt.ir.nodes import op_name
from ringopt.overlap import in_flight
from ringopt.overlap.async_collectives import Budget, collect_early
from ringopt.overlap.reorder import product_flops
from tests.harness.alone import step_of
from tests.harness.models import difference as error_of
from tests.harness.models import run
from tests.harness.translation import difference, values_and_gradients
from tests.overlap.test_start_early import (
    KV_HEADS,
    WIDTH,
    Block,
    Delayed,
    Model,
    by_start,
    data,
    on_ranks,
    ordered,
    shown,
)


class Outputs(nn.Module):
    """Returns what it has before each block, and rows of its last one beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.first(x)
        b = self.second(a)
        y = self.head(b)
        return y.square().mean(), y, a * 2


class Beside(nn.Module):
    """A perceptron beside its attention, as in GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.up, self.down = Block(), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.block.attend(x) + self.down(F.gelu(self.up(x))) + x).square().mean()


class Routed(nn.Module):
    """The weight of the chosen expert is picked before a block and used behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.router = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        weights = self.router(y).softmax(-1)
        best = weights.gather(-1, weights.argmax(-1, keepdim=True))
        return (self.second(y) * best).square().mean()


@pytest.mark.zoo
def test_a_gather_of_torch_is_no_message() -> None:
    found, _ = on_ranks(2, Routed().double(), data(), values_and_gradients, strategy="ring")
    for values, expected in found:
        assert not difference(expected, values)


@pytest.mark.zoo
def test_what_is_returned_is_gathered_behind_the_layers_that_follow() -> None:
    found, _ = on_ranks(2, Outputs().double(), data(), ordered, strategy="ring")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        names = shown(ran)
        started, ended = names.index("gather"), names.index("gathered")
        assert names[:started].count("ring") == 1 and names[:ended].count("ring") == 2, names
        assert len({names.count(name) for name in ("gather", "gathered")}) == 1


@pytest.mark.zoo
def test_gathers_around_attention_alone() -> None:
    """Each rank computes the rest whole: what attention gives travels behind the branch beside it, and the gradients
    of K and V behind each other's products."""
    found, _ = on_ranks(3, Beside().double(), data(), ordered, strategy="ring", shard="attention")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        names = shown(ran)
        assert names[names.index("ring") :][:4] == ["ring", "gather", "mm", "gathered"], names
        behind = names[names.index("ring backward" if "ring backward" in names else "whole ring backward") :]
        assert behind.count("gather") >= 2, names


@pytest.mark.zoo
def test_random_delays() -> None:
    def runner(compiled: Any, inputs: Any) -> list[Any]:
        with Delayed():
            return [values_and_gradients(compiled, inputs) for _ in range(3)]

    for model, options in ((Outputs(), {}), (Beside(), {"shard": "attention"})):
        found, _ = on_ranks(2, model.double(), data(13), runner, strategy="ring", **options)
        for runs, expected in found:
            assert not any(difference(expected, values) for values in runs)


def trained(inner_backend: str, dynamic: bool | None) -> tuple[float, list[str]]:
    torch._dynamo.reset()
    model, inputs = Outputs(), {"x": data(8, torch.float32)}  # ranks of equally many rows share their kernels
    options = {"inner_backend": inner_backend, "strategy": "ring"}
    compiled = torch.compile(model, backend="ring", options=options, dynamic=dynamic)
    run(compiled, model, {"x": data(12, torch.float32)} if dynamic else inputs)
    with torch.profiler.profile() as profile:
        found = run(compiled, model, inputs)
    told = ("ringopt::", "aten::addmm", "aten::mm")
    ran = sorted((event for event in profile.events() if event.name.startswith(told)), key=by_start)
    return error_of(found, run(model, model, inputs)), shown([event.name.split("::")[1] for event in ran])


@pytest.mark.parametrize(
    ("inner_backend", "dynamic"),
    [
        ("aot_eager", None),
        *(pytest.param(*each, marks=pytest.mark.zoo) for each in (("aot_eager", True), ("inductor", None))),
    ],
)
def test_on_ranks(ranks: Any, inner_backend: str, dynamic: bool | None) -> None:
    """Inductor keeps the order; also with lengths that are open."""
    for error, names in ranks(2, trained, inner_backend, dynamic):
        assert error < 1e-4
        started, ended = names.index("gather"), names.index("gathered")
        assert names[:started].count("ring") == 1 and names[:ended].count("ring") == 2, names


# ---- what a bucket of gradients holds --------------------------------------------------------------------------------
class Wide(nn.Module):
    """Nearly all that it holds are its parameters: a block, of the `first` width, and layers behind it."""

    def __init__(self, first: int, *widths: int):
        super().__init__()
        torch.manual_seed(0)
        self.lift = nn.Linear(WIDTH, first, bias=False)
        self.lower = nn.Linear(first, WIDTH, bias=False)
        self.block = Block()
        self.after = nn.ModuleList(nn.Linear(WIDTH, width, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.lower(self.lift(x)))
        return torch.stack([layer(y).square().mean() for layer in self.after]).sum()


@pytest.mark.parametrize("widths", [(9000, 8, 8), (8, 9000, 9000)])
def test_a_bucket_holds_two_copies_whatever_is_behind_it(widths: tuple[int, ...]) -> None:
    """Its gradients and their message, then the sums and theirs, beside the parameters; also where it is complete when
    nothing is left to be computed."""
    parameters = sum(parameter.nbytes for parameter in Wide(*widths).parameters())
    build = lambda: (Wide(*widths), {"x": data(2, torch.float32).detach()})  # noqa: E731
    ran = step_of(build, 0, 2, training=True, strategy="ring", inner_backend="aot_eager")
    assert ran.memory == pytest.approx(3 * parameters, rel=0.01)


# ---- what may be in flight -------------------------------------------------------------------------------------------
@pytest.mark.zoo
def test_the_bound_holds_back_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values of 2 x 11 rows of 16 float64, beside 6 rows of keys and values, 2 heads of 4 each."""
    whole, keys = 2 * 11 * WIDTH * 8, 2 * 6 * KV_HEADS * 8 * 8
    for bound, early in ((whole + keys - 1, 0), (whole + keys, 1)):
        monkeypatch.setattr(in_flight, "UNKNOWN", bound)
        found, report = on_ranks(2, Twice().double(), data(), ordered, strategy="ring")
        for (values, ran), expected in found:
            assert not difference(expected, values)
            names = shown(ran)
            assert names.count("gather") == early, names
        assert any("held back: gather of mul" in note for note in report.notes)


class Twice(nn.Module):
    """Returns two values of its first block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.first(x)
        return self.second(a).square().mean(), a * 2, a * 3


def test_the_note_of_a_site_says_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "UNKNOWN", 1000)
    report = ringopt.explain(Model(), data(12, torch.float32), world_size=2, options={"strategy": "ring"})
    assert re.sub(r"[0-9.]+ [mu]?s", "T", report.sites[0].notes[-1]) == (
        "its exchange starts behind q (T); in the backward behind the gradients of o, up, down and 1 more (T), and "
        "ends with it, for 1.1 KiB would be under way behind q (T), and at most 1.0 KiB may be"
    )


def test_the_report_says_which_gathers_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 1.5 KiB: one fits, and both do not. The sum of the loss could not start earlier, and is not told."""
    monkeypatch.setattr(in_flight, "UNKNOWN", 3000)
    options = {"strategy": "ring", "layout": "contiguous"}
    report = ringopt.explain(Twice(), data(12, torch.float32), world_size=2, options=options)
    assert report.notes[0] == (
        "held back: gather of mul_3 (1.5 KiB), for up to 3.0 KiB would be under way, and at most 2.9 KiB may be"
    )
    eager = {**options, "inner_backend": "eager"}
    notes = ringopt.explain(Twice(), data(12, torch.float32), world_size=2, options=eager).notes
    assert not any("held back" in note for note in notes)


@pytest.mark.zoo
def test_of_a_backward_the_report_tells_what_alone_is_more_than_may_be_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of the input is gathered from all ranks: 1.5 KiB."""
    for bound, told in ((1000, True), (1536, False)):
        monkeypatch.setattr(in_flight, "UNKNOWN", bound)
        report = ringopt.explain(Twice(), data(12, torch.float32), world_size=2, options={"strategy": "ring"})
        note = (
            "held back in the backward: gather of the gradient of x (1.5 KiB), for at most 1.0 KiB may be under way; "
            "others may be too"
        )
        assert (note in report.notes) == told, report.notes


# ---- what it is hidden behind ----------------------------------------------------------------------------------------
def halved(*behind: Any) -> list[str]:
    """What is called in a graph where a gather is read at once, and then each of `behind` and a product of other values
    is computed; after collectives were started early."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    whole = graph.call_function(torch.ops.ringopt.gather.default, (x, 0, 1, 6, 4, "contiguous", "some"))
    read = graph.call_function(torch.ops.aten.relu.default, (whole,))
    more = [graph.call_function(target, (x,)) for target in behind]
    product = graph.call_function(torch.ops.aten.mm.default, (x, w))
    graph.output((read, *more, product))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(6 if node in (whole, read) else 3, 4)
    collect_early(graph, Budget(), {})
    return [op_name(node) for node in graph.nodes if node.op == "call_function"]


def test_a_gather_is_its_halves_around_a_product_that_stood_behind_its_reader() -> None:
    assert halved() == ["gather_start", "mm", "gather_finish", "relu"]
    assert halved(torch.ops.aten.sin.default) == ["gather_start", "sin", "mm", "gather_finish", "relu"]


def test_nothing_is_brought_past_random_numbers() -> None:
    assert halved(torch.ops.aten.bernoulli.default) == ["gather", "relu", "bernoulli", "mm"]


def test_one_attention_over_the_ranks_is_enough_to_hide_behind_and_nothing_is_not() -> None:
    graph, ours = torch.fx.Graph(), torch.ops.ringopt
    relu, attention = (graph.call_function(op) for op in (torch.ops.aten.relu.default, ours.ring_attention.default))
    assert Budget().pays([relu, attention])
    assert not Budget().pays([relu]) and not Budget().pays([])


def test_products_of_a_convolution_whose_input_wants_no_gradient() -> None:
    graph = torch.fx.Graph()
    operands = [torch.ones(1, 2, 6), torch.ones(1, 3, 8), torch.ones(2, 3, 3)]
    nodes = [graph.placeholder(name) for name in ("grad", "x", "weight")]
    backward = graph.call_function(torch.ops.aten.convolution_backward.default, tuple(nodes))
    for node, value in zip((*nodes, backward), (*operands, (None, operands[2], None)), strict=True):
        node.meta["val"] = value
    assert product_flops(backward) == 2 * 18 * 6


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: torch.ops.prims.convert_element_type(x, torch.bfloat16),
        lambda x, w: torch.ops.aten.conv1d(x, w),
        lambda x, w: torch.ops.aten.convolution(x, w, None, [1], [0], [1], False, [0], 1),
    ],
)
def test_convolutions_are_counted_and_what_begins_like_them_is_none(call: Callable[..., Tensor]) -> None:
    """Inductor has a conversion of dtypes in each graph with bfloat16."""
    gm = make_fx(call, tracing_mode="fake")(torch.ones(1, 3, 8), torch.ones(2, 3, 3))
    counted = [product_flops(node) for node in gm.graph.nodes if is_product(node)]
    assert counted == ([] if "convert" in str(gm.graph) else [2 * 2 * 6 * 3 * 3])
