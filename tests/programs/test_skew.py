"""Scores of relative places, skewed so that those of one key stand below each other: a bias of the query's own row."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import validate
from tests.programs.test_lengths import run_over

WIDTH, HEADS, N = 8, 2, 11


def by_one(x):
    """Transformer-XL (Dai et al. 2019, appendix B), Music Transformer (Huang et al. 2018): as many places as keys.
    Above the diagonal stands what belongs to the next query."""
    b, h, n, places = x.shape
    return F.pad(x, (1, 0)).view(b, h, places + 1, n)[:, :, 1:].reshape(b, h, n, places)


def joined_by_one(x):
    b, h, n, places = x.shape
    return torch.cat([x.new_zeros(b, h, n, 1), x], -1).view(b, h, places + 1, n)[:, :, 1:].view_as(x)


def by_three(x):
    """No model's: a row of it is made of three."""
    b, h, n, places = x.shape
    return F.pad(x, (3, 0)).view(b, h, places + 3, n)[:, :, 3:].reshape(b, h, n, places)


def xlnet(x):
    b, h, n, places = x.shape
    return x.reshape(b, h, places, n)[:, :, 1:].reshape(b, h, n, places - 1)[..., :n]


def tensor2tensor(x):
    b, h, n, places = x.shape
    flat = F.pad(F.pad(x, (0, 1)).flatten(2), (0, n - 1))
    return flat.view(b, h, n + 1, places)[:, :, :n, n - 1 :]


def strided(x):
    b, h, n, places = x.shape
    return x.contiguous().as_strided((b, h, n, n), (h * n * places, n * places, places - 1, 1), n - 1)


def gathered(x):
    at = torch.arange(x.shape[2])
    return x.gather(-1, (at[None] - at[:, None] + len(at) - 1).expand(*x.shape[:3], len(at)))


# name -> the skew, and how many places it wants for n queries and m keys
SKEWS = {
    "by one": (by_one, lambda n, m: m),
    "joined by one": (joined_by_one, lambda n, m: m),
    "xlnet": (xlnet, lambda n, m: 2 * n),
    "tensor2tensor": (tensor2tensor, lambda n, m: 2 * n - 1),
    "strided": (strided, lambda n, m: 2 * n - 1),
    "gathered": (gathered, lambda n, m: 2 * n - 1),
    "by three": (by_three, lambda n, m: m),
}


class Relative(nn.Module):
    """Attention with a vector of each relative place; `memory`: how many keys stand before those of the queries."""

    def __init__(self, skew, causal=True, spelled=True, memory=0):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.r = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.skew, self.places = SKEWS[skew]
        self.causal, self.spelled, self.memory = causal, spelled, memory
        self.double()

    def forward(self, x):
        n, m = x.shape[1] - self.memory, x.shape[1]
        place = torch.arange(self.places(n, m), dtype=x.dtype)[:, None] / (1 + torch.arange(WIDTH))
        given = self.q(x[:, self.memory :]), self.k(x), self.v(x), self.r(place.sin())
        q, k, v, r = (y.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for y in given)
        bias = self.skew(q @ r.mT)
        if self.causal:
            bias = bias.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1 + self.memory), -math.inf)
        if self.spelled:
            return (((q @ k.mT + bias) / 2).softmax(-1) @ v).square().mean()
        return F.scaled_dot_product_attention(q, k, v, bias / 2).square().mean()


def data(n=N):
    return torch.randn(2, n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_()


def only_site(verdict):
    assert not verdict.wrong and not verdict.report.gathers
    (site,) = verdict.report.sites
    return site


@pytest.mark.sample(6)
@pytest.mark.parametrize("spelled", (True, False), ids=("products", "sdpa"))
@pytest.mark.parametrize("skew", [skew for skew in SKEWS if skew != "by three"])
def test_each_rank_computes_the_places_of_its_own_queries(skew, spelled):
    """What a skew by one has above the diagonal is not asked for: the rows beside the query's own are not fetched."""
    verdict = validate(2 if spelled else 3, Relative(skew, spelled=spelled), data())
    site = only_site(verdict)
    table = "matmul_1" if spelled else "matmul"  # behind the product of queries and keys, where that is one too
    assert (site.pattern, site.refusal) == (f"causal & bias(learned: {table})", None)
    values = [node.meta["val"] for node in verdict.graph.graph.nodes if node.op == "call_function"]
    assert not [x.shape for x in values if isinstance(x, torch.Tensor) and x.shape[1:3] == (HEADS, N)]
    assert "fetch_rows" not in str(verdict.graph.graph)


@pytest.mark.parametrize("skew, p", [("by one", 3), ("strided", 2)])
def test_without_a_causal_mask_the_row_of_the_next_query_is_fetched(skew, p):
    site = only_site(validate(p, Relative(skew, causal=False), data()))
    assert (
        site.refusal is None
        and site.pattern
        == {
            "by one": "bias(learned: matmul_1, matmul_1_moved)",
            "strided": "bias(learned: matmul_1)",
        }[skew]
    )


@pytest.mark.parametrize("causal", (True, False))
def test_keys_without_a_query_are_skewed_too(causal):
    site = only_site(validate(2, Relative("by one", causal, memory=4), data(17)))
    assert site.refusal is None and ("(k-q <= 4)" in site.pattern) is causal


def test_a_row_made_of_three_is_refused():
    verdict = validate(2, Relative("by three"), data())
    assert not verdict.wrong
    assert verdict.report.sites[0].refusal == (
        f"matmul makes a tensor [2, {HEADS}, {N}, {N}] over queries and keys from data, and it is not read a row at a "
        "time"
    )


class Cut(nn.Module):
    """A bias of `n` queries out of more rows than that, from `first` on."""

    def __init__(self, first, n):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.r = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(WIDTH, 24))
        self.rows = slice(first, first + n)
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        bias = (q @ self.r).sin()[:, :, self.rows, : x.shape[1]]
        return F.scaled_dot_product_attention(q[:, :, : bias.shape[2]], k, v, bias).square().mean()


@pytest.mark.parametrize("first", (0, 3))
def test_rows_of_a_longer_table_are_cut_out_of_it(first):
    assert only_site(validate(3, Cut(first, 16), data(19))).refusal is None


@pytest.mark.zoo
@pytest.mark.parametrize("causal", (True, False))
def test_lengths_in_turn_are_exact(causal):
    found = run_over(Relative("by one", causal), [(data(n),) for n in (11, 14, 17)], 2)
    assert [report.sites[0].refusal for report in found.reports] == [None] * len(found.reports)
