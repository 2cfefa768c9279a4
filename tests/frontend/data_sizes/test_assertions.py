"""What programs assert of their data is held on ranks as in eager, and ends no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.frontend.data_sizes.assertions import counted_to
from tests.harness.errors import worst_of
from tests.harness.models import difference, run

D, HEADS, ROWS = 8, 2, 13


class Checked(nn.Module):
    """Attention over so many keys of each row. `trims`: keys that no row has are cut off."""

    def __init__(self, trims: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.trims = nn.Linear(D, 3 * D), trims

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        assert longest <= x.shape[1]
        assert lengths.min().item() * 2 > 1
        torch._check_tensor_all(x.detach() > -100)  # transformers' of places for images
        assert (x.detach() < 100).all(), "too large"
        if self.trims:
            x = x[:, :longest]
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = (torch.arange(n) < lengths[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(b, n, D)


def batch(longest: int = 9, **other: float) -> dict[str, Tensor]:
    x = torch.randn(2, ROWS, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1, 2, 3] = other.get("largest", 1.0)
    return {"x": x.requires_grad_(), "lengths": torch.tensor([int(other.get("least", 5)), longest])}


def raised(model: Any, given: dict[str, Tensor]) -> str:
    try:
        model(**given)
    except (AssertionError, RuntimeError) as error:
        return str(error)
    return "nothing"


def on_rank(trims: bool) -> tuple[float, list[tuple[float, int]], list[str]]:
    torch._dynamo.reset()
    model, before = Checked(trims).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    error = difference(run(compiled, model, batch()), run(model, model, batch()))
    found = [(report.sharded_fraction, len(report.sites)) for report in ringopt.reports()[before:]]
    changed = (batch(ROWS + 1), batch(least=0), batch(largest=200.0), batch(largest=-200.0))
    wrong = () if trims else changed
    return error, found, [raised(compiled, given) for given in wrong]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo ends its graph at assertions of data")
def test_ranks_hold_what_is_asserted_of_all_data_in_one_graph(ranks: Any) -> None:
    """The number that is too large is in the shard of one rank; both say so."""
    for error, found, (longest, least, largest, smallest) in ranks(2, on_rank, False):
        assert error < 1e-10 and found == [(1.0, 1)]
        assert "u0 <= 13" in longest and "Runtime assertion failed" in least
        assert "Runtime assertion failed" in smallest
        assert largest == "too large"


def test_a_number_that_is_read_otherwise_ends_the_graph_as_ever(ranks: Any) -> None:
    """Behind the break its attention is on shards, where the sizes of a trace that knew no number would be unknown."""
    for error, found, _ in ranks(2, on_rank, True):
        assert error < 1e-10 and found[-1] == (1.0, 1)


def longest_itself(lengths: Tensor) -> Tensor:
    return torch.arange(lengths.max())


def longest_from_zero(lengths: Tensor) -> Tensor:
    return torch.arange(0, lengths.max())


def longest_by_name(lengths: Tensor) -> Tensor:
    return torch.arange(0, end=lengths.max(), dtype=torch.int32)


def longest_as_a_number(lengths: Tensor) -> Tensor:
    """WeNet's and ESPnet's `make_pad_mask`."""
    longest = lengths.max().item()
    return torch.arange(0, longest, dtype=torch.int64).unsqueeze(0).expand(lengths.shape[0], longest)


class PaddedTo(nn.Module):
    """Attention over keys that are no padding; the mask is as long as the longest row."""

    def __init__(self, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.places = nn.Linear(D, 3 * D), places

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        kept = self.places(lengths) < lengths[:, None]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x * kept[..., None]).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, kept[:, None, None]).transpose(1, 2).flatten(2)


def padded_on_rank(places: Callable[[Tensor], Tensor]) -> tuple[list[float], list[float], list[str]]:
    torch._dynamo.reset()
    model, before = PaddedTo(places).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    rows = [{"x": torch.randn(2, n, D, dtype=torch.float64), "lengths": torch.tensor([n - 4, n])} for n in (13, 9, 11)]
    errors = [difference(run(compiled, model, given), run(model, model, given)) for given in rows]
    shares = [report.sharded_fraction for report in ringopt.reports()[before:]]
    shorter = {**rows[2], "lengths": torch.tensor([5, 10])}
    return errors, shares, [raised(compiled, shorter), raised(model, shorter)]


LONGEST = [longest_itself, longest_from_zero, longest_by_name, longest_as_a_number]


@pytest.mark.parametrize(
    "places",
    [pytest.param(f, marks=pytest.mark.zoo) if f is longest_from_zero else f for f in LONGEST],
    ids=lambda f: f.__name__,
)
def test_a_number_that_sizes_have_to_be_is_that_size(ranks: Any, places: Callable[[Tensor], Tensor]) -> None:
    """The second graph is of any length. Where the longest row is shorter than the sequence, eager raises too."""
    for errors, shares, (here, eager) in ranks(2, padded_on_rank, places):
        assert worst_of(*errors) < 1e-10 and shares == [1.0, 1.0]
        assert "of which the program needs as many" in here and "must match" in eager


@pytest.mark.parametrize(
    "counts, end",
    [
        ({"args": (8,)}, 8),
        ({"args": (0, 8)}, 8),
        ({"args": (0, 8, 1)}, 8),
        ({"args": (0,), "kwargs": {"end": 8}}, 8),
        ({"kwargs": {"start": 0, "end": 8, "device": "cpu"}}, 8),
        ({"kwargs": {"end": 8}}, 8),
        ({"args": (1, 8)}, None),
        ({"args": (0, 8, 2)}, None),
        ({"kwargs": {"start": 2, "end": 8}}, None),
    ],
)
def test_however_arange_is_spelled(counts: dict[str, Any], end: int | None) -> None:
    assert counted_to(torch.fx.Graph().call_function(torch.arange, **counts)) == end
    torch._dynamo.reset()
    args, kwargs = counts.get("args", ()), counts.get("kwargs", {})
    compiled = torch.compile(lambda x: x + torch.arange(*args, **kwargs).sum(), backend="ring")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2) + torch.arange(*args, **kwargs).sum())


def softened(x: Tensor) -> Tensor:
    """(pytest writes asserts of its own into this module.)"""
    torch._assert_async((x.detach() < 100).all(), "too large")
    return (x @ x.mT).softmax(-1) @ x  # which becomes another graph


def test_one_process_holds_them_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(softened, backend="ring", options={"inner_backend": "aot_eager"})
    x = batch()["x"]
    torch.testing.assert_close(compiled(x), softened(x))
    assert raised(compiled, {"x": batch(largest=200.0)["x"]}) == "too large"
