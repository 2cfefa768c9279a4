"""Programs with recurrences on real ranks: outputs and gradients are those of one process, compiled by Inductor too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringopt
from tests.harness.errors import worst_of
from tests.sharding.test_scans import WIDTH, Chunks, Tokens, data

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
        found.append((worst_of(*errors), ringopt.reports()[-1]))
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


def drawn(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of 3."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(3, n, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.randint(3, (3, n), generator=generator)


def outcome(run: Any, model: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The scores, and the gradients of the input and of all parameters, in 64 bits."""
    loss, scores = run(x, labels)
    return [part.detach().double() for part in (scores, *torch.autograd.grad(loss, [x, *model.parameters()]))]


def distances(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[float]:
    """Of each, relative to the largest number: 0 of zeros (a decay has no gradient where there is one chunk)."""
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(some, others, strict=True)]


def lengths_of_chunks(dtype: torch.dtype, lengths: list[int]) -> list[tuple[float, float, str | None]]:
    """At each length the largest error, the same over eager's own in that dtype, and why the scan is on no shard."""
    torch._dynamo.reset()
    found, model, exact = [], Chunks(8).to(dtype), Chunks(8)
    exact.load_state_dict(model.state_dict())
    model.text = model.text.replace("float64", str(dtype).removeprefix("torch."))
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for n in lengths:
        x, labels = drawn(n, dtype)
        wanted = outcome(exact, exact, x.detach().double().requires_grad_(), labels)
        own = distances(outcome(model, model, x, labels), wanted)
        errors = distances(outcome(compiled, model, x, labels), wanted)
        over = max(error / max(eager, 2**-9) for error, eager in zip(errors, own, strict=True))
        found.append((worst_of(*errors), over, ringopt.reports()[-1].sites[0].refusal))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.zoo)])
def test_lengths_one_after_the_other(ranks, dtype):
    """3 chunks for 2 ranks, and 1, which every rank computes."""
    for of_rank in ranks(2, lengths_of_chunks, dtype, [24, 8]):
        if dtype == torch.bfloat16:
            assert max(over for _error, over, _why in of_rank) < 2
        else:
            assert max(error for error, _over, _why in of_rank) < 1e-10
        assert [why is None for _error, _over, why in of_rank] == [True, False]
