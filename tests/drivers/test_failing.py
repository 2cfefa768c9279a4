"""A pass that fails leaves the program as it was, on all ranks alike, and says so."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from ringopt.distributed.lookup import mesh_of
from ringopt.drivers import compile as compile_driver
from ringopt.drivers import failing
from ringopt.drivers.compile import transform, warn_of_limit
from ringopt.errors import OptionError, PlanError, RefusedError
from ringopt.ir.nodes import value_of
from ringopt.options import Options
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.lower import Lower
from ringopt.passes.shard_sequence import ShardSequence
from ringopt.report import Report
from tests.harness.errors import worst_of
from tests.harness.translation import captured


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(20, 8), nn.Linear(8, 24)

    def forward(self, ids):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(self.embed(ids)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean((1, 3))


def ids(n: int) -> torch.Tensor:
    return torch.arange(2 * n).view(2, n) % 20


def fails(monkeypatch, step, error, when=lambda gm: True):
    """`step` raises `error` on graphs of which `when` holds."""
    run = step.run

    def broken(self, gm, context):
        if when(gm):
            raise error
        run(self, gm, context)

    monkeypatch.setattr(failing, "RAISES", False)
    monkeypatch.setattr(step, "run", broken)


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", [FindAttention, ShardSequence, Lower])
@pytest.mark.parametrize(
    "error", [AssertionError("u0 is not u1"), PlanError("no such plan"), KeyError("node"), IndexError()]
)
def test_the_graph_is_refused_with_the_pass_and_its_error(monkeypatch, caplog, step, error):
    fails(monkeypatch, step, error)
    with caplog.at_level(logging.WARNING):
        made = transform(*captured(Causal(), ids(12)), Options(), mesh_of("pretend:0/2"))
    assert made.graph is None and made.report.refusal is not None
    assert made.report.refusal.startswith(f"{step.name} failed with {type(error).__name__}")
    (record,) = [record for record in caplog.records if record.exc_info is not None]
    assert record.levelno == logging.WARNING and record.exc_info[1] is error


@pytest.mark.parametrize(
    "error", [OptionError("no"), MemoryError(), KeyboardInterrupt(), torch._dynamo.exc.SkipFrame("no")]
)
def test_what_is_not_ours_is_raised(monkeypatch, error):
    fails(monkeypatch, Lower, error)
    with pytest.raises(type(error)):
        transform(*captured(Causal(), ids(12)), Options(), mesh_of("pretend:0/2"))


def of_open_length(gm) -> bool:
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return any(isinstance(size, torch.SymInt) for x in values for size in getattr(x, "shape", ()))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def call_over_lengths(step, alone: bool, when: str, option: str = "warn"):
    """What three lengths give where a pass fails, on rank 1 `alone` or on all: the largest error of values and
    gradients, and what became of each graph."""
    model, again, error, notes = Causal(), Causal(), 0.0, []
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1 or not alone:
            fails(patched, step, AssertionError("planted"), of_open_length if when == "open" else lambda gm: True)
        patched.setattr(failing, "RAISES", False)
        before = len(ringopt.reports())
        options = {"inner_backend": "eager", "on_refusal": option}
        compiled = torch.compile(again, backend="ring", options=options)
        for n in (12, 20, 15, 20):
            for one in (model, again):
                one.zero_grad()
            expected, found = model(ids(n)), compiled(ids(n))
            expected.sum().backward()
            found.sum().backward()
            pairs = [(expected, found), *zip(gradients(model), gradients(again), strict=True)]
            error = worst_of(error, *(float((a - b).abs().max()) for a, b in pairs))
        notes = [(report.refusal or "", report.notes) for report in ringopt.reports()[before:]]
    return error, notes


@pytest.mark.sample(4)
@pytest.mark.parametrize("step", [FindAttention, Lower])
@pytest.mark.parametrize("alone", [False, True])
def test_ranks_decide_alike(ranks, step, alone):
    """FindAttention knows of no rank, so it cannot fail on one."""
    if alone and step is FindAttention:
        return
    found = ranks(2, call_over_lengths, step, alone, "always")
    for rank, (error, told) in enumerate(found):
        assert error < 1e-6 and len(told) == 3  # a graph a length: they were fixed before it was refused
        said = "failed on ranks [1]" if alone and rank == 0 else f"{step.name} failed with AssertionError: planted"
        assert all(said in refusal for refusal, _ in told)


@pytest.mark.sample(2)
@pytest.mark.parametrize("alone", [False, True])
def test_open_sizes_are_fixed_where_a_pass_fails_with_them(ranks, alone):
    for error, told in ranks(2, call_over_lengths, Lower, alone, "open"):
        assert error < 1e-6 and [refusal for refusal, _ in told] == [""] * 3
        assert all("compiled for these sizes only" in notes[-1] for _, notes in told[1:])


def refused(alone: bool) -> str:
    try:
        call_over_lengths(Lower, alone, "always", "error")
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return f"{type(inner).__name__}: {inner}"
    return "nothing"


@pytest.mark.parametrize("alone", [False, True])
def test_on_refusal_error_raises_on_all_ranks(ranks, alone):
    assert all(said.startswith(RefusedError.__name__) and "failed" in said for said in ranks(2, refused, alone))


class Fixed(Causal):
    """Reads its length as a number, so every length is another graph."""

    def forward(self, ids):
        return super().forward(ids) * int(ids.shape[1] ** 2 % 97 > 3) + len(str(int(ids.shape[1])))


def over_the_limit() -> tuple[float, list[str], int]:
    """Errors of six lengths with room for three graphs; warnings; graphs."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    listener, error, model, before = Listener(logging.WARNING), 0.0, Fixed(), len(ringopt.reports())
    logging.getLogger("ringopt.drivers.compile").addHandler(listener)
    limits = {"recompile_limit": 3, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(limits):
        compiled = torch.compile(model, backend="ring", dynamic=False, options={"inner_backend": "eager"})
        for n in (8, 12, 9, 20, 12, 31):
            error = worst_of(error, float((compiled(ids(n)) - model(ids(n))).abs().max()))
    logging.getLogger("ringopt.drivers.compile").removeHandler(listener)
    return error, said, len(ringopt.reports()) - before


def test_the_last_graph_that_dynamo_makes_is_told_of(ranks):
    for error, said, graphs in ranks(2, over_the_limit):
        (told,) = [message for message in said if "recompile_limit" in message]
        assert error < 1e-6 and graphs == 3
        assert "graph 3 of one function" in told and "Raise the limit" in told


def test_the_last_graph_is_an_error_where_refusals_are(monkeypatch):
    monkeypatch.setattr("ringopt.drivers.compile.compilation_of_frame", lambda: 2)
    with torch._dynamo.config.patch(recompile_limit=3):
        with pytest.raises(RefusedError, match=r"graph 3 of one function.*pad_to_multiple_of"):
            warn_of_limit(Report(2), Options(on_refusal="error"))
        warn_of_limit(Report(1), Options(on_refusal="error"))


class Drops(Causal):
    """Weights of attention."""

    def forward(self, ids):
        x = self.embed(ids).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.5)


@pytest.fixture
def a_pass_asks_for_a_length(monkeypatch):
    """So that on one process, too, each length of a program that draws is compiled by itself."""
    original = ClassifyMask.run

    def run(self, gm, context):
        inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        [int(size) for value in inputs for size in getattr(value, "shape", ())]
        return original(self, gm, context)

    monkeypatch.setattr(ClassifyMask, "run", run)


def test_one_process_says_that_draws_are_compiled_for_each_length(caplog, a_pass_asks_for_a_length):
    torch._dynamo.reset()
    compiled = torch.compile(Drops(), backend="ring", options={"inner_backend": "eager"})
    with torch._dynamo.config.patch(recompile_limit=3), caplog.at_level(logging.WARNING):
        for n in (8, 12, 20):
            compiled(ids(n))
    notes = [[note for note in report.notes if "these sizes only" in note] for report in ringopt.reports()[-3:]]
    assert [len(each) for each in notes] == [0, 1, 1]
    (told,) = [message for message in caplog.messages if "recompile_limit" in message]
    assert notes[-1][0] in told


def test_an_error_where_draws_are_looked_for_does_not_end_the_program(monkeypatch, caplog, a_pass_asks_for_a_length):
    torch._dynamo.reset()
    model = Drops()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "eager"})
    compiled(ids(8))
    monkeypatch.setattr(failing, "RAISES", False)
    monkeypatch.setattr(compile_driver, "draws", lambda node: 1 / 0)
    with caplog.at_level(logging.WARNING):
        torch.manual_seed(3)
        found = compiled(ids(12))
    torch.manual_seed(3)
    assert torch.equal(found, model(ids(12)))
    assert "capture failed with ZeroDivisionError" in ringopt.reports()[-1].refusal
    assert any("ZeroDivisionError" in message for message in caplog.messages)


class ChannelsLast(nn.Module):
    """As in ConvNeXt: a norm of rows that lie transposed in memory, whose strides torch decides by their number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.norm, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 8)
        self.double()

    def forward(self, x):
        return self.out(self.norm(self.wide(x).permute(0, 2, 3, 1)))


def pictures_of_two_sizes() -> tuple[float, list[tuple[str, ...]]]:
    model, error, before = ChannelsLast(), 0.0, len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for rows in (14, 20):
        x = torch.randn(2, 3, rows, 9, dtype=torch.float64, requires_grad=True)
        found, expected = (
            [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])] for y in (compiled(x), model(x))
        )
        error = worst_of(error, *(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
    return error, [report.notes for report in ringopt.reports()[before:]]


def test_a_compiler_that_asks_for_the_rows_of_a_rank_has_a_graph_for_each_size(ranks):
    for error, told in ranks(2, pictures_of_two_sizes):
        assert error < 1e-10 and len(told) == 2
        assert "compiled for these sizes only: the compiler behind ringopt asks for a number" in told[-1][-1]
