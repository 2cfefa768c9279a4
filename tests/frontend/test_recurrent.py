"""torch.nn's RNN, GRU and LSTM are operators in the graph of several ranks, so that nothing around them is lost."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ringopt import explain
from ringopt.backend import reports
from ringopt.frontend.libraries.recurrent import FUNCTION, form
from tests.harness.capturing import largest_error, results
from tests.harness.translation import validate

WIDTH = 8
LAYERS = {
    "LSTM": {},
    "GRU": {},
    "RNN": {},
    "RNN of relu": {"nonlinearity": "relu"},
    "LSTM that projects": {"proj_size": 4},
    "two layers": {"num_layers": 2},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
}


def layer_of(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    kind = {"GRU": nn.GRU, "RNN": nn.RNN, "no bias": nn.GRU}.get(name.split(" of ")[0], nn.LSTM)
    return kind(WIDTH, WIDTH, **{"batch_first": True, **LAYERS[name], **more}).double()


class Tagger(nn.Module):
    """An attention behind a recurrent layer."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__()
        self.recurrent = layer_of(name, **more)
        states = (1 + self.recurrent.bidirectional) * (self.recurrent.proj_size or WIDTH)
        self.out, self.first = nn.Linear(states, WIDTH).double(), self.recurrent.batch_first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, last = self.recurrent(x.sin() if self.first else x.sin().transpose(0, 1))
        y = self.out(y if self.first else y.transpose(0, 1))
        y = y + F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return y, last[0] if isinstance(last, tuple) else last


class Packed(Tagger):
    """The layer is given sequences of unequal lengths, one after the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([x.shape[1], x.shape[1] - 3])
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        y = self.out(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])
        return y + F.scaled_dot_product_attention(y, y, y, is_causal=True), y


def on_ranks(name: str, shapes: list[tuple[int, int]], kind: Any = Tagger) -> list[tuple[float, list[Any]]]:
    torch._dynamo.reset()
    module, found, before = kind(name), [], len(reports())
    compiled = torch.compile(module, backend="ring", options={"inner_backend": "aot_eager"})
    for batch, tokens in shapes:
        torch.manual_seed(tokens)
        x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        error = largest_error(compiled, module, x)
        sites = reports()[-1].sites if len(reports()) > before else ()
        found.append((error, [(site.form, site.strategy) for site in sites]))
    return found


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_numbers_and_gradients_are_those_of_torch(name: str, batch_first: bool) -> None:
    layer = layer_of(name, batch_first=batch_first)
    kind = layer.mode.lower()
    torch.manual_seed(1)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    sizes = [layer.proj_size or WIDTH, *([WIDTH] if kind == "lstm" else [])]
    sides = layer.num_layers * (1 + layer.bidirectional), x.shape[1 - batch_first]
    states = [torch.randn(*sides, size, dtype=torch.float64, requires_grad=True) for size in sizes]
    weights = list(layer.parameters())
    dropout = 1.0 if name == "two layers" else 0.0  # of all numbers
    settings = (layer.bias, layer.num_layers, dropout, True, layer.bidirectional, batch_first)
    of_both = []
    for function in (form(kind), FUNCTION[kind]):
        found = function(x, states if kind == "lstm" else states[0], weights, *settings)
        total = torch.stack([(y.square() * (at + 1)).sum() for at, y in enumerate(found)]).sum()
        of_both.append([*found, *torch.autograd.grad(total, [x, *states, *weights])])
    for one, other in zip(*of_both, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


OTHERS = [pytest.param(name, marks=pytest.mark.zoo) for name in LAYERS if name not in ("LSTM", "GRU")]


@pytest.mark.parametrize("name", ["LSTM", "GRU", *OTHERS])
def test_what_is_around_it_stays_on_shards(ranks: Any, name: str) -> None:
    for p in (2, 3):
        for error, sites in chain(*ranks(p, on_ranks, name, [(1, 13), (1, 24)])):
            assert error < 1e-12 and "none" not in [strategy for _form, strategy in sites], sites
            assert "scan" in [form for form, _strategy in sites]


def test_a_batch_is_shared_where_its_samples_part_alike(ranks: Any) -> None:
    for found in ranks(2, on_ranks, "LSTM", [(4, 16), (8, 16), (8, 17), (3, 20)]):
        assert all(error < 1e-12 for error, _sites in found)
        assert [dict(sites)["scan"] for _error, sites in found] == ["heads", *["in turn"] * 3]


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_packed_sequences_are_left_to_torch(ranks: Any, name: str) -> None:
    for found in ranks(2, on_ranks, name, [(2, 12)], Packed):
        assert [error < 1e-12 for error, _sites in found] == [True] and found[0][1] == []


class UnderAutocast(nn.Module):
    """Given float32, or what a product gives there."""

    def __init__(self, name: str, behind: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.recurrent, self.behind = nn.Linear(WIDTH, WIDTH), layer_of(name).float(), behind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y, last = self.recurrent(self.into(x) if self.behind else x)
            states = last if isinstance(last, tuple) else (last,)
            return y, F.scaled_dot_product_attention(y, y, y, is_causal=True), *states


def under_autocast(name: str, behind: bool) -> tuple[list[float], list[torch.dtype], list[torch.dtype], list[str]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = UnderAutocast(name, behind), torch.randn(1, 12, WIDTH, requires_grad=True)
    compiled = torch.compile(module, backend="ring", options={"inner_backend": "aot_eager"})
    of_both = [[y for y in results(run, [x]) if y is not None] for run in (compiled, module)]
    far = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*of_both, strict=True)]
    found, expected = ([y.dtype for y in of] for of in of_both)
    return far, found, expected, [site.strategy for site in reports()[-1].sites]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_autocast_casts_it_as_it_does_in_eager(ranks: Any, name: str, behind: bool) -> None:
    for far, found, expected, strategies in ranks(2, under_autocast, name, behind):
        assert found == expected and max(far) < 2e-2 and "in turn" in strategies


def test_a_batch_is_shared_without_comparing_for_the_ranks_would_wait() -> None:
    report = explain(Tagger("LSTM"), torch.randn(4, 16, WIDTH, dtype=torch.float64), world_size=2)
    (site,) = (site for site in report.sites if site.form == "scan")
    assert site.strategy == "heads" and not site.predictions
    assert "shared by heads, 2 a rank: what ringopt_kernels::recurrent carries is not affine by its rule" in site.notes


class Gated(nn.Module):
    """A cell as the gate of a residual, all tokens at once, as in x-transformers (`gate_residual`)."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(x, x, x, is_causal=True).flatten(0, 1)
        past = x.flatten(0, 1)
        found = self.cell(attended, (past, past.sin()) if isinstance(self.cell, nn.LSTMCell) else past)
        return (found[0] * found[1] if isinstance(found, tuple) else found).view_as(x)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_a_cell_works_on_the_tokens_of_a_rank(kind: type[Any]) -> None:
    torch.manual_seed(0)
    found = validate(3, Gated(kind).double(), torch.randn(2, 13, WIDTH, dtype=torch.float64, requires_grad=True))
    assert not found.wrong and [gather.op for gather in found.report.gathers] == ["output"]
