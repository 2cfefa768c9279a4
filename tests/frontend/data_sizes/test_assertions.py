"""What programs assert of their data is held on ranks as in eager, and ends no graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
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
