"""Programs with recurrences on real ranks: outputs and gradients are those of one process, compiled by Inductor too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringopt
from tests.sharding.test_scans import Chunks, Tokens, data

MODELS = {
    "tokens": lambda: Tokens(last=True),
    "tokens behind attention": lambda: Tokens(attends=True, last=True),
    "chunks": lambda: Chunks(4),
}


def found_by(run: Any, model: torch.nn.Module, n: int) -> list[torch.Tensor]:
    """Outputs, and the gradients of the input and of all parameters."""
    x, labels = data(n)
    outputs = run(x, labels)
    leaves = [x, *model.parameters()]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(sum(out.sum() for out in outputs), leaves)]


def compared(name: str, lengths: list[int], **options: Any) -> list[tuple[float, ringopt.Report]]:
    """The largest error relative to the largest number, at each length, and the report."""
    torch._dynamo.reset()
    model, found = MODELS[name](), []
    compiled = torch.compile(model, backend="ring", options=options)
    for n in lengths:
        pairs = zip(found_by(compiled, model, n), found_by(model, model, n), strict=True)
        errors = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]
        found.append((max(errors), ringopt.reports()[-1]))
    return found


@pytest.mark.parametrize(
    "name", ["tokens", *(pytest.param(name, marks=pytest.mark.zoo) for name in MODELS if name != "tokens")]
)
def test_on_ranks(ranks, name):
    for of_rank in ranks(2, compared, name, [20]):
        ((error, report),) = of_rank
        assert error < 1e-10
        assert report.sites[-1].strategy == "states" and report.sharded_fraction > 0.9
        assert [gather.op for gather in report.gathers] == ["output"]


@pytest.mark.zoo
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_on_three_ranks(ranks, layout):
    for of_rank in ranks(3, in_layout, layout):
        assert of_rank[0] < 1e-10 and of_rank[1].sites[0].layout == layout


def in_layout(layout: str) -> tuple[float, ringopt.Report]:
    return compared("tokens", [17], layout=layout)[0]


def lengths_in_turn(lengths: list[int]) -> list[tuple[float, ringopt.Report]]:
    return compared("tokens", lengths, inner_backend="aot_eager")


@pytest.mark.zoo
def test_lengths_that_change(ranks):
    for of_rank in ranks(2, lengths_in_turn, [12, 17, 23]):
        assert max(error for error, _report in of_rank) < 1e-10
        assert all(report.sites[0].strategy == "states" for _error, report in of_rank)
