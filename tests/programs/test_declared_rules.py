"""Rules that users declare for operators of their libraries (ringopt/rules/declare.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.errors import RuleError
from ringopt.ir.nodes import op_name
from ringopt.rules.declare import OF_PLUGINS, REGISTRY, AttentionRule, Gathered
from ringopt.rules.plugins import GROUP, load_rules
from tests.harness import kernels
from tests.harness.translation import Verdict, validate

LIBRARY = "ringopt_test_rules"
OPS = getattr(torch.ops, LIBRARY)


def defined(schema: str, forward: Callable[..., Any]) -> None:
    """An operator whose fake kernel is `forward` too."""
    name = schema.split("(")[0]
    kernels.defined(f"{LIBRARY}::{name}", schema.removeprefix(name), forward, forward)


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> Tensor:
    """B S H D."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    places = torch.arange(q.shape[2])
    seen = (places[:, None] >= places) | (not causal)
    if window >= 0:
        seen = seen & (places >= places[:, None] - window)
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=0.5, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


defined("scaled(Tensor x, Tensor weight) -> Tensor", lambda x, w: (x * w).tanh() + x)
defined("turned(Tensor x, Tensor angles) -> (Tensor, Tensor)", lambda x, a: (x * a, (x + a).mT.contiguous()))
defined("scaled_here(Tensor x, Tensor weight) -> Tensor", lambda x, w: (x * w).tanh() + x * x.new_ones(x.shape))
defined("scaled_wrong(Tensor x, Tensor weight) -> Tensor", lambda x, w: (x * w).tanh() + 2 * x)
defined("mixed(Tensor x) -> Tensor", lambda x: x.cumsum(1))
defined("halves(Tensor x) -> Tensor", lambda x: x.view(x.shape[0], 13, 8) * 2)
defined("attend(Tensor q, Tensor k, Tensor v, bool causal, int window) -> Tensor", attended)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Rules are for one test."""
    with kernels.rules_forgotten():
        yield


class Model(nn.Module):
    """An operator before attention, and behind it."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.op = nn.Linear(8, 8), nn.Linear(8, 8), op
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.op(self.first(x), self.weight)
        q = x[:, None]
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0] + x
        return self.last(self.op(y, self.weight))


def verdict(op: Callable[[Tensor, Tensor], Tensor], p: int = 2) -> Verdict:
    torch.manual_seed(0)
    found = validate(p, Model(op).double(), {"x": torch.randn(2, 13, 8, dtype=torch.float64)})
    assert found.wrong == ""
    return found


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return OPS.scaled(x, weight)


@pytest.mark.parametrize("p", [2, 3])
def test_an_operator_that_is_declared_token_by_token_stays_on_shards(p: int) -> None:
    ringopt.rule(f"{LIBRARY}::scaled", tokenwise={"x": 1})
    assert [gather.op for gather in verdict(scaled, p).report.gathers] == ["output"]


def test_a_pointwise_operator_stays_on_shards() -> None:
    ringopt.rule(f"{LIBRARY}::scaled", pointwise=True)
    assert [gather.op for gather in verdict(scaled).report.gathers] == ["output"]


def test_another_operator_takes_its_place_on_shards() -> None:
    """And its numbers are those of the program, if it is right."""
    ringopt.rule(f"{LIBRARY}::scaled", tokenwise={"x": 1}, local=OPS.scaled_here)
    found = verdict(scaled)
    assert f"{LIBRARY}::scaled_here" in {op_name(node) for node in found.graph.graph.nodes}
    ringopt.rule(f"{LIBRARY}::scaled", tokenwise={"x": 1}, local=OPS.scaled_wrong)
    with pytest.raises(AssertionError, match="relative error"):
        verdict(scaled)


def test_without_a_rule_the_report_names_the_line_that_would_help() -> None:
    report, line = verdict(scaled).report, f'ringopt.rule("{LIBRARY}::scaled", tokenwise={{"x": 1}})'
    assert report.gathers[0].op == f"{LIBRARY}::scaled" and line in report.gathers[0].why
    assert [note for note in report.notes if "has no rule, so every rank computes it whole" in note and line in note]


@pytest.mark.parametrize("p", [2, 3])
def test_results_may_run_along_with_dims_of_their_own(p: int) -> None:
    ringopt.rule(OPS.turned, tokenwise={"x": 1, "angles": 0}, returns=(1, 2))

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        one, other = OPS.turned(x, torch.arange(x.shape[1], dtype=x.dtype)[:, None] * weight)
        return one + other.mT

    assert [gather.op for gather in verdict(turned, p).report.gathers] == ["output"]


CONTRADICTED = {
    "weight has 8 tokens along dim 0, and the result has 13": ("scaled", {"x": 1, "weight": 0}, 1, scaled),
    "result 0 has no dim 3": ("scaled", {"x": 3}, None, scaled),
    "arguments run along different dims": ("scaled", {"x": 1, "weight": 0}, None, scaled),
    "on 6 of 13 tokens it fails": ("halves", 1, None, lambda x, w: OPS.halves(x * w)),
    "result 1 has 8 tokens along dim 1": ("turned", {"x": 1, "angles": 1}, 1, lambda x, w: OPS.turned(x, x * w)[1].mT),
    "result 1 is read": ("turned", {"x": 1, "angles": 1}, (1, None), lambda x, w: OPS.turned(x, x * w)[1].mT),
}


@pytest.mark.parametrize("said", CONTRADICTED)
def test_what_the_shapes_contradict_is_gathered_with_a_sentence(said: str) -> None:
    name, dims, returns, op = CONTRADICTED[said]
    ringopt.rule(f"{LIBRARY}::{name}", tokenwise=dims, returns=returns)
    gathers = verdict(op).report.gathers
    assert any(said in gather.why for gather in gathers), [gather.why for gather in gathers]


def test_a_rule_that_the_schema_contradicts_is_an_error_where_it_is_written() -> None:
    with pytest.raises(RuleError, match="it names y, and the arguments of the operator are x, weight"):
        ringopt.rule(f"{LIBRARY}::scaled", tokenwise={"y": 1})
    with pytest.raises(RuleError, match="its tensors are x, weight: say which run along"):
        ringopt.rule(f"{LIBRARY}::scaled", tokenwise=1)
    with pytest.raises(RuleError, match="operators of torch and ringopt have theirs"):
        ringopt.rule("aten::relu", pointwise=True)
    with pytest.raises(RuleError, match="give one of"):
        ringopt.rule(f"{LIBRARY}::scaled", tokenwise={"x": 1}, pointwise=True)


class Attends(nn.Module):
    """Grouped heads, packed B S H D."""

    def __init__(self, causal: bool, window: int) -> None:
        super().__init__()
        self.qkv, self.causal, self.window = nn.Linear(8, 16), causal, window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 2)).split([4, 2, 2], 2)
        return OPS.attend(q, k, v, self.causal, self.window).flatten(2).sin()


ATTEND = AttentionRule(layout="BSHD", causal="causal", scale=0.5, window=("window", -1))


@pytest.mark.parametrize(("p", "causal", "window"), [(2, True, -1), (3, True, 4), (2, False, -1)])
def test_an_operator_that_is_declared_as_attention_is_a_site(p: int, causal: bool, window: int) -> None:
    ringopt.rule(f"{LIBRARY}::attend", ATTEND)
    torch.manual_seed(0)
    found = validate(p, Attends(causal, window).double(), {"x": torch.randn(2, 13, 8, dtype=torch.float64)})
    assert found.wrong == ""
    (site,) = found.report.sites
    assert (site.form, site.refusal) == (f"{LIBRARY}::attend", None)
    assert site.pattern.startswith("full" if not causal else "causal" if window < 0 else "window")
    assert [gather.op for gather in found.report.gathers] == ["output"]


def test_a_function_is_asked_of_every_call() -> None:
    @ringopt.rule(f"{LIBRARY}::attend")
    def attend(causal: bool, q: Tensor, **others: Any) -> AttentionRule | Gathered:
        assert q.shape[1:] == (13, 4, 2) and others["window"] == -1
        return ATTEND if causal else Gathered("all of it is seen")

    for causal, refusals in ((True, [None]), (False, [])):
        found = validate(2, Attends(causal, -1).double(), {"x": torch.randn(2, 13, 8, dtype=torch.float64)})
        assert found.wrong == "" and [site.refusal for site in found.report.sites] == refusals


def test_a_layout_that_the_shapes_contradict_is_refused() -> None:
    ringopt.rule(f"{LIBRARY}::attend", AttentionRule(layout="BHSD", causal="causal", scale=0.5))
    found = validate(2, Attends(True, -1).double(), {"x": torch.randn(2, 13, 8, dtype=torch.float64)})
    assert found.wrong == ""
    assert [site.refusal for site in found.report.sites] == [
        f"{LIBRARY}::attend: 4 queries, 2 keys, causal or in a window: its rule does not say which match (align)"
    ]


# ---- plugins ---------------------------------------------------------------------------------------------------------
def plugin() -> None:
    ringopt.rule(f"{LIBRARY}::scaled", tokenwise={"x": 1})


def broken() -> None:
    raise ImportError("no such library")


def test_plugins_are_read_once_and_a_failing_one_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [EntryPoint(name, f"{__name__}:{name}", GROUP) for name in ("broken", "plugin")]
    monkeypatch.setattr("ringopt.rules.plugins.entry_points", lambda group: points if group == GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.name])
    load_rules.cache_clear()
    try:
        report = verdict(scaled).report
        assert [gather.op for gather in report.gathers] == ["output"]
        said = f"rules of broken ({__name__}:broken) are left out: ImportError: no such library"
        assert said in report.notes and caplog.text.count(said) == 1
    finally:
        load_rules.cache_clear()


def test_a_rule_of_the_program_comes_before_that_of_a_plugin() -> None:
    ringopt.rule(f"{LIBRARY}::scaled", gathered="mine")
    with REGISTRY.filling(OF_PLUGINS):
        plugin()
    assert verdict(scaled).report.gathers[0].why.endswith(": mine")
