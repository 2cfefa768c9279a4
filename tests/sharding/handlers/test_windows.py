"""A model that begins with attention inside windows: whole windows are spread, and nothing is exchanged for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.translation import validate_module

D, H, W = 8, 2, 4  # width, heads, rows of a window


class Local(nn.Module):
    """Attention inside windows of W rows, then over all rows where it is `deep`."""

    def __init__(self, attend, deep=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.attend, self.deep = nn.Linear(D, 3 * D), nn.Linear(D, D), attend, deep

    def forward(self, x):
        x = x + self.out(self.attend(self, x))
        return x if not self.deep else x + over_all(self, x)


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(-2, -3)


def over_all(m, x):
    q, k, v = map(heads, m.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def in_the_batch(m, x, **how):
    q, k, v = map(heads, m.qkv(x.reshape(-1, W, D)).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2).reshape(x.shape)


def of_what_is_projected(m, x):
    q, k, v = (heads(t.reshape(-1, W, D)) for t in m.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def beside_the_batch(m, x):
    """[b, windows, heads, W, W], in products."""
    q, k, v = map(heads, m.qkv(x.unflatten(1, (-1, W))).chunk(3, -1))
    return ((q @ k.mT / 2).softmax(-1) @ v).transpose(2, 3).reshape(x.shape)


def with_neighbours(m, x):
    """Each block sees that before it and that behind it too (LongT5: Guo et al. 2022, section 3.1)."""
    q, k, v = (t.unflatten(1, (-1, W)) for t in m.qkv(x).chunk(3, -1))
    k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, 1))[:, i : i + t.shape[1]] for i in range(3)], 2) for t in (k, v))
    q, k, v = map(heads, (q, k, v))
    return ((q @ k.mT / 2).softmax(-1) @ v).transpose(2, 3).reshape(x.shape)


SPELLED = {
    "in the batch": in_the_batch,
    "causal": lambda m, x: in_the_batch(m, x, is_causal=True),
    "of what is projected": of_what_is_projected,
    "beside the batch": beside_the_batch,
}


def check(p, model, n=32, b=2):
    verdict = validate_module(p, model.double(), torch.randn(b, n, D, dtype=torch.float64, requires_grad=True))
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    return verdict.report


@pytest.mark.sample(3)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", SPELLED)
def test_nothing_is_sent_but_the_output(name, p):
    report = check(p, Local(SPELLED[name]))
    assert [(site.strategy, site.bytes_sent) for site in report.sites] == [("none", 0)], report
    assert [gather.op for gather in report.gathers] == ["output"] and report.sharded_fraction == 1


@pytest.mark.parametrize("p", [2, 4])
def test_attention_over_all_rows_behind_it_has_its_rows(p):
    report = check(p, Local(in_the_batch, deep=True))
    assert report.sites[0].strategy == "none" and report.sharded_fraction == 1
    assert [gather.op for gather in report.gathers] == ["output"], report


def test_windows_that_ranks_cannot_share_evenly_are_cut_inside():
    report = check(3, Local(in_the_batch))
    assert report.sites[0].strategy != "none" and [gather.op for gather in report.gathers] == ["output"]


def test_windows_that_drop_weights():
    model = Local(lambda m, x: in_the_batch(m, x, dropout_p=0.5))
    report = ringopt.explain(model, torch.randn(2, 32, D), world_size=2)
    assert [(site.strategy, site.bytes_sent) for site in report.sites] == [("none", 0)], report
    assert [gather.op for gather in report.gathers] == ["output"] and report.sharded_fraction == 1


def test_the_first_dim_is_the_batch():
    """Sequences laid end to end: each is cut, as if they were beside each other."""
    whole = Local(in_the_batch)
    whole.forward = lambda x: whole.out(in_the_batch(whole, x.flatten(0, 1)))
    assert check(2, whole, n=W).sites[0].strategy != "none"


def test_blocks_that_see_their_neighbours():
    report = check(2, Local(with_neighbours))
    assert report.sites[0].strategy == "none" and [gather.op for gather in report.gathers] == ["output"], report


def test_rows_that_change_places_inside_windows():
    """No rule follows a demand over that, on the way to any of q, k and v."""

    def attend(m, x):
        q, k, v = map(heads, m.qkv(x.unflatten(1, (-1, W)).roll(1, 2)).chunk(3, -1))
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(2, 3).reshape(x.shape)

    report = check(2, Local(attend))
    assert [(site.strategy, site.bytes_sent) for site in report.sites] == [("none", 0)], report


def with_keys_of_all(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    k, v = (t[:, None].expand(-1, x.shape[1] // W, -1, -1) for t in (k, v))
    return F.scaled_dot_product_attention(q.unflatten(1, (-1, W)), k, v).reshape(x.shape)


def with_keys_of_all_in_the_batch(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    k, v = (heads(t).repeat_interleave(x.shape[1] // W, 0) for t in (k, v))
    return F.scaled_dot_product_attention(heads(q.reshape(-1, W, D)), k, v).transpose(1, 2).reshape(x.shape)


def as_heads_with_shared_keys(m, x):
    """Two heads of queries for one of keys, in windows that stand where heads do."""
    q, k, v = (t.unflatten(1, (-1, W)) for t in m.qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(torch.stack([q, 2 * q], 2).flatten(1, 2), k, v, enable_gqa=True)
    return y.unflatten(1, (-1, 2)).sum(2).reshape(x.shape)


def with_keys_of_all_beside_their_own(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    q, own = q.unflatten(1, (-1, W)), [t.unflatten(1, (-1, W)) for t in (k, v)]
    k, v = (torch.cat([w, t[:, None].expand(-1, w.shape[1], -1, -1)], 2) for w, t in zip(own, (k, v), strict=True))
    return ((heads(q) @ heads(k).mT / 2).softmax(-1) @ heads(v)).transpose(2, 3).reshape(x.shape)


@pytest.mark.parametrize(
    "attend",
    [
        with_keys_of_all,
        with_keys_of_all_in_the_batch,
        with_keys_of_all_beside_their_own,
        as_heads_with_shared_keys,
    ],
)
def test_windows_whose_keys_are_not_their_own_are_cut_inside(attend):
    """Spread whole, they would have every rank compute all keys, or gather them."""
    report = check(2, Local(attend))
    assert report.sites[0].strategy != "none" and report.sharded_fraction == 1
    assert [gather.op for gather in report.gathers] == ["output"], report


def test_places_in_a_window_are_on_every_rank():
    """They are looked up, which is work, but not of what windows are cut from."""
    model = Local(None)
    model.places = nn.Embedding(W, D)

    def attend(m, x):
        q, k, v = map(heads, m.qkv(x.unflatten(1, (-1, W)) + m.places(torch.arange(W))).chunk(3, -1))
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(2, 3).reshape(x.shape)

    model.attend = attend
    report = check(2, model)
    assert report.sites[0].strategy == "none" and report.sharded_fraction == 1, report


def test_learned_queries_of_windows_are_on_every_rank():
    model = Local(None)
    model.latents = nn.Parameter(torch.randn(W, D))

    def attend(m, x):
        _, k, v = map(heads, m.qkv(x.reshape(-1, W, D)).chunk(3, -1))
        q = heads(m.latents).expand(k.shape)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

    model.attend = attend
    report = check(3, model, n=24)
    assert report.sites[0].strategy == "none" and report.sharded_fraction == 1, report


def test_windows_of_which_a_later_attention_needs_the_rows_are_cut_inside():
    """What is spread for the first would be gathered for the second."""
    torch._dynamo.reset()  # or sizes are open, after other lengths
    model = Local(lambda m, x: with_keys_of_all_in_the_batch(m, x + in_the_batch(m, x)))
    report = ringopt.explain(model, torch.randn(2, 32, D), world_size=2)
    assert all(site.strategy != "none" for site in report.sites) and report.sharded_fraction == 1, report
    assert [gather.op for gather in report.gathers] == ["output"], report
