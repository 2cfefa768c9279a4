"""Dilated attention as modules: torch's layouts and names, torchscale's numbers, and sites of compiled models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringopt
from ringopt.errors import OptionError
from ringopt.nn import DilatedAttention, MultiheadDilatedAttention
from tests.context_parallel.dilated.reference import Patterns, dilated, torchscale
from tests.context_parallel.reference import problem
from tests.harness.translation import validate
from tests.programs.test_lengths import run_over

LENGTHS, RATES = (8, 23, 60), (1, 2, 4)
N = 50
F64: Any = {"dtype": torch.float64}


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_definition(is_causal: bool) -> None:
    case, seen = problem(N), torch.arange(N).expand(2, N) % 7 != 3
    found = DilatedAttention(LENGTHS, RATES)(
        case.q, case.k, case.v, seen[:, None, None], is_causal=is_causal, enable_gqa=True
    )
    right = dilated(case.q, case.k, case.v, Patterns(LENGTHS, RATES, is_causal), seen)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
def test_torchscale(is_causal: bool) -> None:
    case = problem(N, heads=(6, 6))
    whole = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    found = DilatedAttention(LENGTHS, RATES, compat="torchscale")(*whole, is_causal=is_causal)
    right = torchscale(*whole, Patterns(LENGTHS, RATES, is_causal, "torchscale"))
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
    for a, b in zip(*(torch.autograd.grad(out, whole, case.dout) for out in (found, right)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch_first", [False, True])
def test_layouts_and_parameters_are_those_of_torch(batch_first: bool) -> None:
    """One segment of rate 1 is attention as torch has it."""
    theirs = nn.MultiheadAttention(16, 4, batch_first=batch_first, **F64)
    ours = MultiheadDilatedAttention(16, 4, (1000,), (1,), batch_first=batch_first, **F64)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x, padding = torch.randn(5, 5, 16, **F64), torch.rand(5, 5) > 0.7
    padding[:, 0] = False
    for mask in (padding, torch.zeros(5, 5, **F64).masked_fill(padding, -torch.inf)):
        (a, _), (b, _) = (module(x, x, x, key_padding_mask=mask) for module in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    (a, _), (b, _) = (module(x, x, x, attn_mask=future, is_causal=True) for module in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours(x[0], x[0], x[0])[0], theirs(x[0], x[0], x[0])[0], rtol=1e-9, atol=1e-9)


def test_gradcheck() -> None:
    module = MultiheadDilatedAttention(4, 2, (3, 8), (1, 2), batch_first=True, **F64)
    assert torch.autograd.gradcheck(lambda x: module(x, x, x)[0], torch.randn(1, 9, 4, **F64).requires_grad_())


class Encoder(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, **F64)
        layer.self_attn = MultiheadDilatedAttention(16, 4, LENGTHS, RATES, batch_first=True, **F64, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out: Tensor = self.layers(x, src_key_padding_mask=padding)
        return out.mean(1)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("p", "compat"), [(2, None), (3, "torchscale")])
def test_a_compiled_encoder_is_sharded(p: int, compat: str | None) -> None:
    x, padding = torch.randn(2, N, 16, **F64), torch.rand(2, N) > 0.8
    for inputs in ((x,), (x, padding)):
        verdict = validate(p, Encoder(compat=compat), *inputs)
        assert verdict.wrong == ""
        assert [(site.form, site.strategy) for site in verdict.report.sites] == [("ringopt", "gather")] * 2
        assert all(site.pattern.startswith("dilated(8:1,23:2,60:4") for site in verdict.report.sites)
        assert verdict.report.gathers == ()


@pytest.mark.zoo
def test_one_compilation_serves_all_lengths() -> None:
    calls = [(torch.randn(2, n, 16, **F64),) for n in (50, 67, 33)]
    assert len(run_over(Encoder(), calls, 3).reports) == 2  # the first length, then all


@pytest.mark.zoo
def test_padding_of_any_length() -> None:
    run_over(Encoder(), [(torch.randn(2, n, 16, **F64), torch.rand(2, n) > 0.8) for n in (50, 67, 33)], 2)


@pytest.mark.zoo
def test_an_exported_encoder_is_converted() -> None:
    """On one process; numbers on several are those of the same passes above."""
    x = torch.randn(2, N, 16, **F64)
    program = torch.export.export(Encoder(), (x,))
    torch.testing.assert_close(ringopt.convert(program).module()(x), program.module()(x), rtol=1e-9, atol=1e-9)


def test_torchs_fast_path_does_not_pass_the_module_by() -> None:
    encoder, x = Encoder(), torch.randn(2, N, 16, **F64)
    with torch.no_grad():
        expected = encoder(x)
        torch.testing.assert_close(encoder.eval()(x), expected, rtol=1e-9, atol=1e-9)


def test_refusals() -> None:
    x = torch.ones(1, 4, 8)
    module = MultiheadDilatedAttention(8, 2, (4,), (1,), batch_first=True)
    with pytest.raises(OptionError, match="need_weights=True"):
        module(x, x, x, need_weights=True)
    with pytest.raises(OptionError, match="no attn_mask but with is_causal=True"):
        module(x, x, x, attn_mask=torch.zeros(4, 4))
    with pytest.raises(OptionError, match="expected bool, True for padding, or numbers that are 0 and -inf"):
        module(x, x, x, key_padding_mask=torch.ones(1, 4))
    with pytest.raises(OptionError, match="tensors of one S"):
        module(x, x[:, :3], x[:, :3])
    with pytest.raises(OptionError, match="compat='fkodom': expected one of None, 'torchscale'"):
        DilatedAttention((4,), (1,), compat="fkodom")
    with pytest.raises(OptionError, match="2 lengths and 1 rates"):
        ringopt.nn.DilatedAttention((4, 8), (1,))


def test_places_that_no_pattern_keeps_are_told() -> None:
    x = torch.ones(1, 2, 8, 4)
    with pytest.warns(UserWarning, match=r"dilated\(8:2\) keeps 0 of 8 tokens in no head, and leaves 8 of 16 places"):
        DilatedAttention((8,), (2,))(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DilatedAttention((8, 8), (1, 2))(x, x, x)
