"""Which exchange, layout and kernel a site gets, and what is said of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ringopt
from tests.translation import validate


def attention(mask):
    def run(x):
        rows, keys = torch.arange(x.shape[2])[:, None], torch.arange(x.shape[2])[None, :]
        seen = mask(rows, keys)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)

    return run


def site(mask, n=64, ranks=4, **options):
    torch._dynamo.reset()
    (found,) = ringopt.explain(attention(mask), torch.randn(1, 2, n, 8), world_size=ranks, options=options).sites
    return found


MASKS = {
    "full": (lambda rows, keys: None, "ring", "contiguous"),
    "causal": (lambda rows, keys: keys <= rows, "ring", "zigzag"),
    "causal window": (lambda rows, keys: (keys <= rows) & (keys > rows - 8), "halo", "contiguous"),
    "window both ways": (lambda rows, keys: (keys - rows).abs() < 8, "halo", "contiguous"),
    "window both ways, as long as three shards": (lambda rows, keys: (keys - rows).abs() < 48, "ring", "contiguous"),
}


@pytest.mark.parametrize("name", MASKS)
def test_strategy_and_layout(name):
    mask, strategy, layout = MASKS[name]
    found = site(mask)
    assert (found.strategy, found.layout, found.kernel) == (strategy, layout, "flash_cpu")


def test_a_choice_is_explained_in_numbers():
    """42 rows of 2 heads * 2 * 8 * 4 bytes are needed of others in all, the busiest rank sends 14 of them."""
    (why,) = (note for note in site(MASKS["window both ways"][0]).notes if note.startswith("strategy"))
    assert why.startswith("strategy halo ") and ", 1.8 KiB sent, predicted (others: " in why
    assert "; ring2 " in why and why.endswith("; no profile: only work counts")


@pytest.mark.parametrize("strategy", ("halo", "gather", "ring", "ring2"))
def test_what_is_asked_for_is_done(strategy):
    assert site(MASKS["window both ways"][0], strategy=strategy).strategy == strategy


@pytest.mark.parametrize(
    ("mask", "strategy", "told"),
    [
        ("full", "local", "site .*: strategy 'local' cannot do full .* moves no rows, and 192 are needed"),
        ("causal", "halo", "site .*: strategy 'halo' cannot do causal .* keys near its place"),
    ],
)
def test_what_cannot_be_done_is_an_error(mask, strategy, told):
    with pytest.raises(Exception, match=told):
        site(MASKS[mask][0], strategy=strategy)


def test_a_halo_takes_contiguous_shards_by_itself():
    assert site(MASKS["causal window"][0], strategy="halo").layout == "contiguous"


def test_bytes_are_those_of_the_plan():
    """A full ring sends p - 1 times K and V of the rank: 3 * 2 * 2 heads * 16 rows * 8 * 4 bytes."""
    assert site(MASKS["full"][0]).bytes_sent == 3 * 2 * 2 * 16 * 8 * 4


def test_layout_when_rows_are_few():
    assert site(MASKS["causal"][0], n=7).layout == "contiguous"


class Cross(torch.nn.Module):
    def forward(self, x, y):
        return F.scaled_dot_product_attention(x, y, y)


@pytest.mark.parametrize(("queries", "travel"), [(64, True), (8192, False), (16384, False)])
def test_few_queries_travel_in_place_of_many_keys(queries, travel):
    torch._dynamo.reset()
    x, y = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 8192, 8)
    (found,) = ringopt.explain(Cross(), x, y, world_size=4).sites
    assert found.strategy.endswith("_q") == travel


def test_the_numbers_of_cross_attention_with_few_queries():
    x, y = (torch.randn(1, 2, rows, 8, dtype=torch.float64, requires_grad=True) for rows in (5, 23))
    verdict = validate(3, Cross(), x, y, strategy="gather_q")
    assert not verdict.wrong, verdict.wrong
