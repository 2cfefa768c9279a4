"""Real models on pretended ranks, some on real ones (gloo): outputs, loss, every gradient are those of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringopt
from tests.harness.models import MODELS, build, difference, run
from tests.harness.translation import validate

LENGTHS = (64, 67, 257)
INDUCTOR = {"llama": 68}  # ranks of equally many rows compile the same kernels, once
SITES = {"t5": 6}  # others have 2


def on_rank(name: str, length: int, dtype: torch.dtype, inner: str) -> dict[str, object]:
    """What one rank finds: its error against one process, its report."""
    model, inputs = build(name, length, dtype)
    expected = run(model, model, inputs)
    torch._dynamo.reset()
    before = len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner, "timeout": 60})
    found = run(compiled, model, inputs)
    exact = [float(x.double().sum()) for x in found]
    return {
        "error": difference(found, expected),
        "bits": exact,
        "floor": eager_error(name, length, expected) if dtype is not torch.float64 else 1e-10,
        "sites": [site for report in ringopt.reports()[before:] for site in report.sites],
        "refusal": [report.refusal for report in ringopt.reports()[before:] if report.refusal],
        "size": dist.get_world_size(),
    }


def eager_error(name: str, length: int, found: list[torch.Tensor]) -> float:
    """Eager's own error against float64."""
    model, inputs = build(name, length, torch.float64, own_loss=True)
    return difference(found, run(model, model, inputs))


def check(results: list[dict[str, object]], name: str, bound: float) -> None:
    for result in results:
        assert result["error"] <= bound * result["floor"] + 1e-12, result
        assert result["bits"] == results[0]["bits"], "gradients differ between ranks"
        assert len(result["sites"]) == SITES.get(name, 2)
        assert not [site.refusal for site in result["sites"] if site.refusal], result["sites"]


# Llama without padding runs with Inductor below; what the others are made of is in those that are left.
ALSO = ("llama", "encoder", "gpt2", "mistral", "bert", "encoder_causal")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo] if name in ALSO else []) for name in MODELS]
)
def test_float64_to_rounding(name):
    """A row lost, doubled or misplaced would show at once. Every rank has the same bits."""
    place = list(MODELS).index(name)
    model, inputs = build(name, LENGTHS[place % 3], torch.float64)
    verdict = validate(2 + place % 2, model, inputs, tolerance=1e-9)
    assert not verdict.wrong
    bits = [[x.double().sum() for x in (*values, *grads) if x is not None] for values, grads in verdict.found]
    assert all(own == bits[0] for own in bits), "values differ between ranks"
    assert [site.refusal for site in verdict.report.sites] == [None] * SITES.get(name, 2)


@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(ranks, name):
    """float32 through Inductor: within 3x of eager's own error against float64."""
    check(ranks(2, on_rank, name, INDUCTOR[name], torch.float32, "inductor", timeout=240), name, 3)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in MODELS if name not in INDUCTOR])
def test_inductor_on_all_others(ranks, name):
    check(ranks(2, on_rank, name, 67, torch.float32, "inductor", timeout=240), name, 3)


@pytest.mark.zoo
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=("float64", "float32"))
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("p", (2, 3, 4))
@pytest.mark.parametrize("name", MODELS)
def test_every_model_length_and_size(ranks, name, p, length, dtype):
    """In float64 1e-9 relative, in float32 within 3x of eager's own error; the same bits on every rank."""
    bound = 10 if dtype is torch.float64 else 3
    check(ranks(p, on_rank, name, length, dtype, "aot_eager"), name, bound)


@pytest.mark.zoo
def test_bfloat16(ranks):
    """Within 2x of bf16 eager's own error."""
    check(ranks(2, on_rank, "llama", 67, torch.bfloat16, "aot_eager"), "llama", 2)
