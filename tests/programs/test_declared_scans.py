"""Recurrences that operators of other libraries compute, by a rule (`ringopt.rule(op, ScanRule(...))`): each rank runs
the operator on its own tokens, and the states travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.errors import OptionError, RuleError
from ringopt.ir.nodes import op_name
from ringopt.rules.declare import ScanRule
from ringopt.scans.segment_map import Frame
from tests.harness.errors import worst_of
from tests.harness.kernels import DELTA, IN_TURN, LIBRARY, H, K, V, defined, rules_forgotten
from tests.harness.translation import Verdict, validate

OPS = getattr(torch.ops, LIBRARY)
defined(f"{LIBRARY}::sums", "(Tensor x) -> Tensor", lambda x: x.cumsum(1), torch.empty_like)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Rules are for one test."""
    with rules_forgotten():
        yield


class Layer(nn.Module):
    """As a gated linear attention is written, around an operator."""

    def __init__(self, bounded: bool = False, first: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, H * (2 * K + V + 1))
        self.out, self.decay, self.bounded = nn.Linear(H * V, 8), nn.Parameter(torch.rand(H) * 0.2), bounded
        self.first = nn.Parameter(torch.randn(1, H, K, V)) if first else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g = self.into(x).unflatten(-1, (H, -1)).split([K, K, V, 1], -1)
        state = None if self.first is None else self.first.expand(x.shape[0], -1, -1, -1)
        k = F.normalize(k, dim=-1)
        o, last = OPS.delta_rule(q, k, v, F.logsigmoid(g[..., 0]), self.decay, state, self.bounded)
        return x + self.out(o.flatten(-2)), last


def verdict(rule: ScanRule, p: int = 2, tokens: int = 13, **how: Any) -> Verdict:
    ringopt.rule(f"{LIBRARY}::delta_rule", rule)
    torch.manual_seed(0)
    found = validate(p, Layer(**how).double(), torch.randn(2, tokens, 8, dtype=torch.float64))
    assert found.wrong == ""
    return found


def operators_of(found: Verdict) -> set[str]:
    return {op_name(node) for node in found.graph.graph.nodes}


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("first", [False, True], ids=["from zeros", "from a state that learns"])
def test_states_travel_and_tokens_stay(p: int, first: bool) -> None:
    found = verdict(DELTA, p, first=first)
    assert "sharded_kernel_scan" in operators_of(found) and f"{LIBRARY}::delta_rule" not in operators_of(found)
    (site,) = found.report.sites
    assert (site.form, site.strategy, site.pattern) == ("scan", "states", "13 tokens")
    assert [gather.op for gather in found.report.gathers] == ["output"]


def test_what_is_sent_does_not_grow_with_the_tokens() -> None:
    sent = [verdict(DELTA, 2, tokens).report.sites[0].bytes_sent for tokens in (8, 40)]
    assert sent == [2 * 2 * H * (K * K + K * V) * 8 // 2] * 2  # (M, U) of each head and batch, to one other rank


@pytest.mark.sample(2)
@pytest.mark.parametrize("bounded", [False, True], ids=["affine", "not affine"])
@pytest.mark.parametrize("p", [2, 3])
def test_without_axes_the_ranks_run_one_after_the_other(p: int, bounded: bool) -> None:
    (site,) = verdict(IN_TURN, p, bounded=bounded, first=True).report.sites
    assert site.strategy == "in turn" and "one after the other" in site.notes[0]


@pytest.mark.parametrize("way", ["apply", "apply_back"])
def test_a_state_that_is_forgotten_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Frame, way)
    monkeypatch.setattr(Frame, way, lambda frame, of, x: original(frame, of, torch.zeros_like(x)))
    monkeypatch.setattr("ringopt.ops.kernel_scan.KernelScan.hold_against", lambda *_: None)
    with pytest.raises(AssertionError, match="relative error"):
        verdict(DELTA)


def test_a_state_that_is_not_affine_in_the_way_its_rule_says_is_an_error() -> None:
    with pytest.raises(OptionError, match="is not affine in the way that is told"):
        verdict(DELTA, bounded=True)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (ScanRule(("q", "k", "v", "g"), state="state", last=2), "result 2 is the last state, and it has 2"),
        (ScanRule(("q", "k", "v", "g"), state="state", axes=("free",)), "has 1 axes for a state of 4 dims"),
        (ScanRule(("q", "k", "v", "g"), state="state", dim=3), "not equally many tokens along dim 3"),
        (ScanRule(("q", "k", "v", "g"), state="state", dim=2), "of 1 tokens it gives a state of [2, 1, 4, 3]"),
    ],
)
def test_what_shapes_contradict_runs_whole_and_the_report_says_why(rule: ScanRule, why: str) -> None:
    (site,) = verdict(rule).report.sites
    assert site.refusal is not None and why in site.refusal


def test_too_few_tokens_run_whole() -> None:
    (site,) = verdict(DELTA, 4, tokens=3).report.sites
    assert "3 tokens for 4 ranks" in str(site.refusal)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (ScanRule(("x", "g")), "it names x, initial_state"),
        (ScanRule(("q",), state="state", additive=("v",)), "additive names v, and tokens are q"),
    ],
)
def test_a_rule_that_the_schema_contradicts_is_an_error(rule: ScanRule, sentence: str) -> None:
    with pytest.raises(RuleError, match=sentence):
        ringopt.rule(f"{LIBRARY}::delta_rule", rule)


def test_an_operator_that_gives_no_state_runs_whole() -> None:
    ringopt.rule(f"{LIBRARY}::sums", ScanRule(("x",), state="x"))
    summed: Callable[[Tensor], Tensor] = lambda x: OPS.sums(x)  # noqa: E731

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = summed(x)[:, None]
            return F.scaled_dot_product_attention(q, q, q)

    found = validate(2, Sums(), torch.randn(2, 13, 8, dtype=torch.float64))
    assert found.wrong == ""
    assert [site.refusal for site in found.report.sites if site.form == "scan"] == [
        f"{LIBRARY}::sums: its rule says that one result is the last state, and it does not give several tensors"
    ]


# ---- on real ranks ---------------------------------------------------------------------------------------------------
def on_ranks(lengths: list[int], dtype: torch.dtype, inner_backend: str) -> list[tuple[float, str]]:
    """The largest error of outputs and gradients at each length, relative to the largest number; and the strategy."""
    torch._dynamo.reset()
    ringopt.rule(f"{LIBRARY}::delta_rule", DELTA)
    torch.manual_seed(0)
    model, found = Layer(first=True).to(dtype), []
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner_backend})
    for n in lengths:
        x = torch.randn(2, n, 8, dtype=dtype, generator=torch.Generator().manual_seed(n))
        pairs = zip(values(compiled, model, x), values(model, model, x), strict=True)
        errors = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]
        found.append((worst_of(*errors), ringopt.reports()[-1].sites[0].strategy))
    return found


def values(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    outputs = run(x)
    return [*outputs, *torch.autograd.grad(sum(out.square().sum() for out in outputs), [x, *model.parameters()])]


@pytest.mark.parametrize(
    ("p", "dtype", "allowed", "inner_backend"),
    [
        (2, torch.float64, 1e-10, "aot_eager"),
        pytest.param(2, torch.float64, 1e-10, "inductor", marks=pytest.mark.zoo),
        pytest.param(3, torch.bfloat16, 3e-2, "inductor", marks=pytest.mark.zoo),
    ],
)
def test_several_lengths_on_real_ranks(
    ranks: Any, p: int, dtype: torch.dtype, allowed: float, inner_backend: str
) -> None:
    for of_rank in ranks(p, on_ranks, [13, 20, 13], dtype, inner_backend):
        for error, strategy in of_rank:
            assert error < allowed and strategy == "states"
