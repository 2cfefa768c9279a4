"""A recurrence that is not affine in what it carries: each rank runs its steps when the one before it is done."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.backend import reports
from ringopt.ops.scan_segments import SegmentedScan
from tests.harness.capturing import results
from tests.harness.translation import validate
from tests.sharding.test_scan_heads import WIDTH, Cell, verdict

BYTES = 8  # of a number


class Cells(nn.Module):
    """torch's own cell of a GRU, in a loop behind an attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out[:, t] = h
        return out, h


class Layers(nn.Module):
    """A loop over times, of layers that share their weights: what it carries is the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        for at in range(times.shape[0]):
            x = self.mixed(x + times[at].sin()).tanh() - x.mean(2, keepdim=True)
        return x + F.scaled_dot_product_attention(x, x, x)


class Counts(nn.Module):
    """A whole number beside the state, larger than what float32 holds."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        count = torch.zeros(WIDTH, dtype=torch.int64)
        for t in range(x.shape[1]):
            h = (h.flip(-1) * 2 + x[:, t]).tanh()
            count = count.flip(-1) + (h[0] > 0) * (2**25 + 1)
            out[:, t] = h
        return out, count


@pytest.mark.parametrize(
    "kind, p, batch, layout",
    [
        ("tanh", 2, 3, "zigzag"),
        ("lstm", 3, 1, "contiguous"),
        ("lstm", 4, 1, "zigzag"),
        pytest.param("tanh", 3, 2, "zigzag", marks=pytest.mark.zoo),
        pytest.param("lstm", 2, 1, "zigzag", marks=pytest.mark.zoo),
        pytest.param("tanh", 4, 1, "contiguous", marks=pytest.mark.zoo),
    ],
)
def test_ranks_run_one_after_the_other_and_gather_nothing(kind: str, p: int, batch: int, layout: str) -> None:
    found = verdict(p, Cell(kind), batch, layout=layout)
    (site,) = found.report.sites
    assert (site.form, site.strategy, site.refusal) == ("scan", "in turn", None)
    assert any("one after the other, for a step is not affine in what it carries" in note for note in site.notes)
    assert found.report.sharded_fraction == 1.0
    assert [gather.op for gather in found.report.gathers] == ["output"]
    segments, carries = p * (1 + (layout == "zigzag")), {"tanh": 1, "lstm": 2}[kind]
    assert site.bytes_sent == (segments - 1) * carries * batch * WIDTH * BYTES * (p - 1)


def test_each_segment_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentedScan, "broadcast", lambda _self, _number, state, _run: state)
    with pytest.raises(AssertionError):
        verdict(2, Cell("tanh"), 1)


def test_a_loop_over_layers_is_none() -> None:
    """A state as large as the sequence is no less than what a step reads."""
    x, times = (torch.randn(*shape, WIDTH, dtype=torch.float64).requires_grad_() for shape in ((1, 1, 24), (6,)))
    found = validate(2, Layers(), x, times)
    assert found.wrong == "" and [site.form for site in found.report.sites] == ["sdpa"]
    assert any("a recurrence is no scan" in note for note in found.report.notes)


def test_whole_numbers_are_not_handed_on() -> None:
    x = torch.randn(1, 24, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = validate(2, Counts(), x)
    assert found.wrong == "" and not found.report.sites
    assert any("a recurrence is no scan" in note for note in found.report.notes)


def over_lengths(shapes: list[tuple[int, int]]) -> list[tuple[float, list[str], int]]:
    torch._dynamo.reset()
    module, found = Cells().double(), []
    compiled = torch.compile(module, backend="ring", options={"inner_backend": "aot_eager"})
    before = len(reports())
    for batch, tokens in shapes:
        torch.manual_seed(tokens)
        x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        of_both = []
        for run in (compiled, module):
            module.zero_grad()
            of_both.append([*results(run, [x]), *(weight.grad for weight in module.parameters())])
        error = max(float((a - b).abs().max()) for a, b in zip(*of_both, strict=True))
        found.append((error, [site.strategy for site in reports()[-1].sites], len(reports()) - before))
    return found


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_one_graph_serves_any_length(ranks: Any, p: int) -> None:
    shapes = [(1, 24), (1, 17), (1, 40), (1, 13)]
    for error, strategies, graphs in chain(*ranks(p, over_lengths, shapes)):
        assert error < 1e-12 and strategies[-1] == "in turn" and graphs <= 2
