"""Sizes that Dynamo leaves open: one compilation serves all lengths, and each call is exact."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.tools.benchmarks.models.recurrent_layers import GatedDeltaNet, Mamba2
from tests.harness.lengths import run_over
from tests.harness.models import build


class Decoder(nn.Module):
    """Causal attention, positions by arange, labels shifted by a slice."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50)
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids):
        b, n = ids.shape
        x = self.embed(ids) + torch.sin(torch.arange(n, dtype=torch.float64) / 10)[:, None]
        q = self.q(self.norm(x)).view(b, n, 4, 4).transpose(1, 2)
        k, v = (y.view(b, n, 2, 4).transpose(1, 2) for y in self.kv(self.norm(x)).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        logits = self.head(x + self.out(y.transpose(1, 2).reshape(b, n, 16)))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 50), ids[:, 1:].reshape(-1)), logits


def ids(*sizes: int) -> torch.Tensor:
    return torch.randint(0, 50, sizes, generator=torch.Generator().manual_seed(sum(sizes)))


@pytest.mark.zoo
def test_the_second_length_is_the_last_to_be_compiled():
    found = run_over(Decoder().double(), [(ids(2, n),) for n in (64, 67, 96, 33, 64, 19)], 2)
    first, second = found.reports
    assert first.notes == () and second.notes == ("serves any size 1 of ids, as far as its guards go",)
    assert second.sharded_fraction == 1.0


def test_chunks_that_one_length_cuts_nowhere_are_cut_by_another():
    class Chunks(nn.Module):
        def forward(self, x):
            chunk = torch.arange(x.shape[2]) // 4
            return F.scaled_dot_product_attention(x, x, x, chunk[:, None] == chunk)

    calls = [(torch.randn(1, 1, n, 4, dtype=torch.float64),) for n in (12, 17, 24)]
    (report,) = run_over(Chunks(), calls, 3, dynamic=True).reports
    assert report.sites[0].pattern == "chunked(4,both)" and report.sites[0].bytes_sent == 0


@pytest.mark.zoo
def test_the_batch_may_be_open_too():
    found = run_over(Decoder().double(), [(ids(b, n),) for b, n in ((3, 20), (2, 21), (5, 33))], 2, dynamic=True)
    assert [report.sharded_fraction for report in found.reports] == [1.0]


@pytest.mark.parametrize("loop", ["written", "stacked"])
def test_a_loop_over_chunks_serves_any_batch(loop):
    """Where the first size is open, torch traces `out[:, :, i]` as slices of slices."""
    calls = [(torch.randn(batch, 190, 64, dtype=torch.float64),) for batch in (2, 3, 5)]
    reports = run_over(GatedDeltaNet(1, loop).double(), calls, 2).reports
    scans = [report for report in reports if report.sites]
    assert len(scans) == 2 and all(site.strategy == "states" for report in scans for site in report.sites)
    assert "serves any size 0" in str(scans[1].notes) and "these sizes only" not in str(scans[1].notes)


OLD = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")
# Chunks by a loop of the program, of which Dynamo makes a graph for each number of them; by torch's scan; and by sums
# over pairs of chunks.
RECURRENT = {
    "loop": (lambda: GatedDeltaNet(1), (300, 250, 222, 193)),
    "scan": (lambda: GatedDeltaNet(1, "scan"), (300, 350, 257, 650)),
    "sums": (lambda: Mamba2(1), (256, 320, 448, 640)),
}


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("name", ["loop", pytest.param("scan", marks=OLD), "sums"])
def test_recurrences_over_chunks_serve_any_length(name, p):
    """Rows that are padded to whole chunks are cut between these at any length, and nothing is gathered but the end."""
    make, lengths = RECURRENT[name]
    lengths = [length + 128 * (p - 2) * (name != "loop") for length in lengths]
    calls = [(torch.randn(2, n, 64, dtype=torch.float64),) for n in lengths]
    _, any_length = run_over(make().double(), calls, p).reports
    assert "serves any size 1" in any_length.notes[-1] and "these sizes only" not in str(any_length.notes)
    assert [site.strategy for site in any_length.sites] == ["states"] and any_length.sharded_fraction == 1.0
    assert [gather.op for gather in any_length.gathers] == ["output"]


def test_too_few_rows_for_the_layout_or_the_ranks_compile_again():
    found = run_over(Decoder().double(), [(ids(2, n),) for n in (20, 4, 2, 21)], 3, dynamic=True)
    assert [(report.sites[0].layout, report.sites[0].refusal) for report in found.reports] == [
        ("zigzag", None),
        ("contiguous", None),
        ("none", "2 rows for 3 ranks: every rank needs a row"),
    ]


@pytest.mark.zoo
@pytest.mark.parametrize(
    "name, pattern", [pytest.param("llama", "causal", marks=pytest.mark.zoo), ("bert", "padding(attention_mask)")]
)
def test_models_of_transformers_stay_sharded(name, pattern):
    model, _ = build(name, 48, torch.float64)
    calls = []
    for n in (31, 40, 21):
        mask = {"attention_mask": torch.ones(2, n, dtype=torch.long)} if name == "bert" else {}
        for rows in mask.values():
            rows[1, -n // 4 :] = 0
        calls.append({"input_ids": ids(2, n), "labels": ids(2, n), **mask})
    second = run_over(model, calls, 2).reports[1:]
    assert [(report.sharded_fraction > 0.99, report.sites[0].pattern) for report in second] == [(True, pattern)]


class Padded(nn.Module):
    """Rows moved by a padding below 0, of a value that is gathered."""

    def forward(self, x):
        y = F.scaled_dot_product_attention(*(x[:, None],) * 3)[:, 0]
        return F.pad(torch.renorm(y, 2, 0, 0.5), (0, 0, -1, 1)).square().mean()


def test_kernels_that_want_numbers_take_open_sizes():
    calls = [(torch.randn(2, n, 8, dtype=torch.float64),) for n in (12, 14, 15)]
    first, second = run_over(Padded(), calls, 2).reports
    assert [gather.op for gather in second.gathers] == [gather.op for gather in first.gathers] == ["renorm"]


class Sinks(nn.Module):
    """As gpt-oss writes them: one logit more, and the largest of a row taken off."""

    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        scores = torch.cat([q @ q.mT, q.new_ones(*q.shape[:3], 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return scores.softmax(-1)[..., :-1] @ q


class Triangles(nn.Module):
    """Attention over pairs: the features of a row are as many as there are rows."""

    def forward(self, x):
        pairs = x @ x.mT
        return (pairs @ pairs.mT).softmax(-1) @ x


@pytest.mark.sample(2)
@pytest.mark.parametrize("module", [Sinks(), Triangles()])
def test_attention_whose_sizes_follow_the_length(module):
    calls = [(torch.randn(2, n, 8, dtype=torch.float64),) for n in (12, 15, 14)]
    found = run_over(module, calls, 2)
    assert [site.refusal for report in found.reports for site in report.sites] == [None] * len(found.reports)


def greedy(cache: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Tokens by the model as it is and compiled, and how the attention of each graph was spread."""
    import ringopt

    model, prompt = build("llama", 40)[0].eval(), ids(2, 13)
    model.config.use_cache = True
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    how |= {"cache_implementation": cache} if cache else {}
    torch._dynamo.reset()
    before = len(ringopt.reports())
    with torch.inference_mode():
        expected = model.generate(prompt, **how)
        model.forward = torch.compile(model.forward, backend="ring", options={"inner_backend": "eager"})
        found = model.generate(prompt, **how)
    return expected, found, [report.sites[0].strategy for report in ringopt.reports()[before:]]


@pytest.mark.zoo
@pytest.mark.parametrize("cache, graphs", [("", 3), ("static", 2)])
def test_tokens_are_generated_with_a_cache(cache, graphs, ranks):
    """Greedy tokens are those of one process; there is no graph a token."""
    for expected, found, spread in ranks(2, greedy, cache):
        assert torch.equal(expected, found)
        assert len(spread) <= graphs


class InBlocks(nn.Module):
    """Attention within blocks of 4 rows, padded up to whole blocks, behind causal attention or alone."""

    def __init__(self, causal=True):
        super().__init__()
        self.embed, self.qkv, self.causal = nn.Embedding(50, 16), nn.Linear(16, 48), causal

    def forward(self, ids):
        x, n = self.embed(ids), ids.shape[1]
        if self.causal:
            x = x + merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))
        blocks = (F.pad(y, (0, 0, 0, -n % 4)).unflatten(2, (-1, 4)) for y in self.heads(x))
        return x + merged(F.scaled_dot_product_attention(*blocks).flatten(2, 3)[:, :, :n])

    def heads(self, x):
        return (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))


class InChunks(InBlocks):
    """Queries in chunks of 7, of which the last may be too short for the layout of the causal attention behind."""

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.heads(x)
        x = x + merged(torch.cat([F.scaled_dot_product_attention(rows, k, v) for rows in q.split(7, 2)], 2))
        return x + merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


class Narrowed(InBlocks):
    """All rows, by narrow and by a slice that counts them."""

    def forward(self, ids):
        x, n = self.embed(ids), ids.shape[1]
        y = merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))
        return y.narrow(1, 0, n) + y[:, -n:] + y[:, :n]


def merged(y):
    return y.transpose(1, 2).flatten(2)


NORMAL = ((2, 4),)  # open sizes take Dynamo seconds where blocks are padded
ORDERS = [(25, 40, 41, 44, 12), (40, 25, 28), (40, 41), (18, 30, 19, 37), (30, 18), (9, 1, 2, 12)]


@pytest.mark.parametrize(
    "module, order",
    [
        pytest.param(module, order, marks=[] if (i, j) in NORMAL else pytest.mark.zoo)
        for i, module in enumerate((InBlocks(), InBlocks(causal=False), InChunks(), Narrowed()))
        for j, order in enumerate(ORDERS)
    ],
)
def test_any_order_of_lengths(module, order):
    run_over(module.double(), [(ids(2, n),) for n in order], 2)


@pytest.mark.zoo
def test_rows_padded_to_whole_blocks_stay_open():
    """Where a graph for any length leaves more whole, the first lengths have one each, and all others share it."""
    found = run_over(InBlocks().double(), [(ids(2, n),) for n in (25, 40, 44, 12, 28, 36, 48)], 2)
    one_size, any_size = found.reports[1:4], found.reports[4:]
    assert all("these sizes only" in report.notes[-1] for report in one_size)
    assert [report.notes for report in any_size] == [("serves any size 1 of ids, as far as its guards go",)]


class PaddedTable(nn.Module):
    """A table, padded to the length in a region of autocast."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 3, 4))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = (x + F.pad(self.table, (0, 0, 0, x.shape[1] - 3)))[:, None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)


def test_an_open_length_may_be_padded_to_in_autocast():
    found = run_over(PaddedTable().double(), [(torch.randn(2, n, 4).double(),) for n in (9, 12, 8)], 2)
    assert found.reports[1].notes == ("serves any size 1 of x, as far as its guards go",)


class Picked(nn.Module):
    def forward(self, x, rows):
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return y.index_select(2, rows), y[:, :, rows], y.gather(2, rows[None, None, :, None].expand(2, 1, -1, 4))


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_rows_may_be_picked_by_an_index_of_open_length(p):
    """A few rows of the sequence, each from the rank that has it."""
    calls = [(torch.randn(2, 1, n, 4).double(), torch.randperm(n)[: n // 4]) for n in (24, 32, 37)]
    found = run_over(Picked(), calls, p)
    assert found.reports[-1].notes and len(found.reports) == 2
