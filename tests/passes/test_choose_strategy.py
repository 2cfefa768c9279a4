"""Which exchange, layout and kernel a site gets, and what is said of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ringopt
from ringopt.errors import OptionError
from tests.harness.translation import validate


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
    "causal window": (lambda rows, keys: (keys <= rows) & (keys > rows - 32), "halo", "contiguous"),
    "window both ways": (lambda rows, keys: (keys - rows).abs() < 32, "halo", "contiguous"),
    "window both ways, as long as three shards": (lambda rows, keys: (keys - rows).abs() < 192, "ring", "contiguous"),
}


@pytest.mark.parametrize("name", MASKS)
def test_strategy_and_layout(name):
    mask, strategy, layout = MASKS[name]
    found = site(mask, n=256)
    assert (found.strategy, found.layout, found.kernel) == (strategy, layout, "flash_cpu")


def test_a_choice_is_explained_in_numbers():
    """Of rows of 2 heads * 2 * 8 * 4 bytes the busiest rank sends 31 to each neighbour."""
    (why,) = (note for note in site(MASKS["window both ways"][0], n=256).notes if note.startswith("strategy"))
    assert why.startswith("strategy halo ") and ", 7.8 KiB sent, predicted (others: " in why
    assert "; ring2 " in why and why.endswith("; no profile: only work counts")


def test_a_zigzag_takes_two_rows_of_each_rank():
    assert site(MASKS["causal"][0], n=8, layout="zigzag").layout == "zigzag"
    with pytest.raises(OptionError, match="the shortest sequence has 7 rows, and zigzag over 4 ranks needs 8"):
        site(MASKS["causal"][0], n=7, layout="zigzag")


@pytest.mark.parametrize("strategy", ("halo", "gather", "ring", "ring2"))
def test_what_is_asked_for_is_done(strategy):
    assert site(MASKS["window both ways"][0], strategy=strategy).strategy == strategy


@pytest.mark.parametrize(
    ("mask", "strategy", "told"),
    [
        (
            "full",
            "local",
            "site .*: strategy 'local' cannot do full .* moves no rows, and rank 0 needs 48 of other ranks",
        ),
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


IDS = torch.tensor([7] * 10 + [3] * 30 + [5] * 24)
STRUCTURES = {
    "prefix(4)": lambda rows, keys: (keys <= rows) | (keys < 4),
    "window(8,sinks=4)": lambda rows, keys: (keys <= rows) & ((rows - keys < 8) | (keys < 4)),
    "chunked(16)": lambda rows, keys: (keys <= rows) & (rows // 16 == keys // 16),
    "chunked(24,both)": lambda rows, keys: rows // 24 == keys // 24,
    "documents": lambda rows, keys: (keys <= rows) & (IDS[rows] == IDS[keys]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_of_the_program_bounds_what_travels(name):
    found, full = (site(mask, layout="contiguous") for mask in (STRUCTURES[name], MASKS["full"][0]))
    assert found.pattern == name
    assert found.bytes_sent < full.bytes_sent
    if name == "chunked(16)":
        assert (found.strategy, found.bytes_sent) == ("local", 0)


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_numbers_of_a_structure(name):
    class Masked(torch.nn.Module):
        def forward(self, x):
            rows, keys = torch.arange(64)[:, None], torch.arange(64)[None, :]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=STRUCTURES[name](rows, keys))

    x = torch.randn(1, 2, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    verdict = validate(3, Masked(), x)
    assert not verdict.wrong, verdict.wrong
    assert [site.pattern for site in verdict.report.sites] == [name]


@pytest.mark.parametrize(
    "mask",
    [
        lambda rows, keys: (keys <= rows) | (keys < 4) & (rows < 9),
        lambda rows, keys: (rows + 1) // 16 == keys // 16,
        lambda rows, keys: IDS.roll(5)[rows] == IDS.roll(5)[keys],  # one document in two runs
        lambda rows, keys: (keys < rows) | (keys < 4),
    ],
)
def test_what_is_almost_a_structure_stays_a_mask(mask):
    class Masked(torch.nn.Module):
        def forward(self, x):
            rows, keys = torch.arange(64)[:, None], torch.arange(64)[None, :]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask(rows, keys))

    x = torch.randn(1, 2, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    verdict = validate(2, Masked(), x)
    assert not verdict.wrong, verdict.wrong
    assert verdict.report.sites[0].pattern not in STRUCTURES


class Cross(torch.nn.Module):
    def forward(self, x, y):
        return F.scaled_dot_product_attention(x, y, y)


@pytest.mark.parametrize(("queries", "travel"), [(64, True), (8192, False), (16384, False)])
def test_few_queries_travel_in_place_of_many_keys(queries, travel):
    torch._dynamo.reset()
    x, y = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 8192, 8)
    (found,) = ringopt.explain(Cross(), x, y, world_size=4).sites
    assert found.strategy.endswith("_q") == travel


class Few(torch.nn.Module):
    """Latents attend over a sequence, and the sequence over what they found: 2 rows on one side of each."""

    def __init__(self, biased):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.latents = torch.nn.Parameter(torch.randn(1, 2, 2, 8, dtype=torch.float64, generator=draw))
        self.table = torch.nn.Parameter(torch.randn(2, 2, 23, dtype=torch.float64, generator=draw))
        self.biased = biased

    def forward(self, x, there):
        bias = self.table[None] if self.biased else None
        found = F.scaled_dot_product_attention(self.latents, x, x, attn_mask=bias)
        kept = F.scaled_dot_product_attention(self.latents * 2, x, x, attn_mask=there[:, None, None])
        return x + F.scaled_dot_product_attention(x, found + kept, found)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("p", [3, 4])
def test_rows_too_few_to_be_spread_are_on_every_rank(p, biased):
    x = torch.randn(1, 2, 23, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    there = torch.ones(1, 23, dtype=torch.bool)
    there[:, 15:] = False
    verdict = validate(p, Few(biased), x, there)
    assert not verdict.wrong, verdict.wrong
    assert [(site.refusal, site.strategy) for site in verdict.report.sites] == [
        (None, "merge"), (None, "merge"), (None, "local")
    ]  # fmt: skip
    assert f"2 rows of queries for {p} ranks: all on every rank" in verdict.report.sites[0].notes
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_without_keys_there_is_nothing_to_share():
    """As of a sequence of one token, without its first."""
    x, y = torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.randn(1, 2, 0, 8, dtype=torch.float64)
    verdict = validate(2, Cross(), x.requires_grad_(), y.requires_grad_())
    (site,) = verdict.report.sites
    assert verdict.wrong == "" and site.refusal == "0 rows for 2 ranks: every rank needs a row"
    assert site.bytes_sent == 0


def test_a_strategy_that_is_asked_for_takes_rows_on_both_sides():
    x, y = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 64, 8)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"option strategy='ring': site .* has 2 rows for 4 ranks"):
        ringopt.explain(Cross(), x, y, world_size=4, options={"strategy": "ring"})


def test_the_numbers_of_cross_attention_with_few_queries():
    x, y = (torch.randn(1, 2, rows, 8, dtype=torch.float64, requires_grad=True) for rows in (5, 23))
    verdict = validate(3, Cross(), x, y, strategy="gather_q")
    assert not verdict.wrong, verdict.wrong
