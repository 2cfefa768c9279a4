"""Tokens routed to experts stay on their ranks, whichever way the order is made, used and undone; or are gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.drivers.compile import transform
from ringopt.options import Options
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, captured, validate_module
from tests.sharding.programs import CASES

pytest.importorskip("transformers.integrations.moe")  # defines a grouped_mm that runs on the CPU in any dtype
grouped_mm = torch.ops.transformers.grouped_mm_fallback
D, EXPERTS, CHOSEN, HEADS = 8, 3, 2, 2


class Experts(nn.Module):
    """Attention, then of each token the sum of what its experts make of it; `go` says how rows go to them and back."""

    def __init__(self, go, chosen=CHOSEN):
        super().__init__()
        torch.manual_seed(0)
        self.go, self.chosen = go, chosen
        self.qkv, self.router, self.out = nn.Linear(D, 3 * D), nn.Linear(D, EXPERTS), nn.Linear(D, D)
        self.wide, self.narrow = (nn.Parameter(torch.randn(EXPERTS, D, D) / 3) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(EXPERTS, D))
        self.table = nn.Buffer(torch.randint(0, EXPERTS, (5, chosen), dtype=torch.int32))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, D)
        weights, experts = self.router(x).softmax(-1).view(b * n, EXPERTS).topk(self.chosen, -1)
        y = self.go(self, x.view(b * n, D), weights.reshape(-1), experts.reshape(-1))
        return self.out(x + y.view(b, n, self.chosen, D).sum(2))


def ends(experts):
    return torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


def products(m, x, experts):
    hidden = grouped_mm(x, m.wide, ends(experts)) + m.bias[experts]
    return grouped_mm(F.silu(hidden), m.narrow.mT, offs=ends(experts))


def back(order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return inverse


def as_in_transformers(m, x, weights, experts):
    experts, order = experts.sort()
    y = products(m, x[order // m.chosen], experts)
    return (y * weights[order].unsqueeze(-1))[back(order)]


def order_sorted_back(m, x, weights, experts):
    experts, order = torch.sort(experts, stable=True)
    return products(m, x[order // m.chosen], experts)[order.argsort()] * weights.unsqueeze(-1)


def tokens_repeated_before(m, x, weights, experts):
    experts, order = experts.sort()
    return products(m, x.repeat_interleave(m.chosen, 0)[order], experts)[back(order)] * weights.unsqueeze(-1)


def one_after_the_other(m, x, weights, experts):
    """The second best is that of what the best has left."""
    logits = m.router(x)
    (_, first) = logits.max(-1, keepdim=True)
    (_, second) = logits.masked_fill(F.one_hot(first[:, 0], EXPERTS) > 0, -9.0).max(-1, keepdim=True)
    return as_in_transformers(m, x, weights, torch.concat([first, second], -1).reshape(-1))


def an_expert_that_is_skipped(m, x, weights, experts):
    """Rows without an expert go to the first one, with a weight of zero."""
    skipped = experts == EXPERTS - 1
    return as_in_transformers(m, x, weights.masked_fill(skipped, 0), experts.masked_fill(skipped, 0))


def experts_of_a_table(m, x, weights, experts):
    """DeepSeek V4: which experts is looked up by a number that every rank has of every token; how much each counts is
    picked by the same numbers of experts."""
    experts = m.table[torch.arange(x.shape[0]) * 3 % 5].long()
    weights = m.router(x).sigmoid().gather(1, experts)
    return as_in_transformers(m, x, weights.reshape(-1), experts.reshape(-1))


def experts_of_a_table_by_what_tokens_are(m, x, weights, experts):
    experts = m.table[x[:, :1].mul(4).long() % 5].reshape(-1, m.chosen).long()
    weights = m.router(x).sigmoid().gather(1, experts)
    return as_in_transformers(m, x, weights.reshape(-1), experts.reshape(-1))


def checked(go, p, layout, chosen=CHOSEN):
    torch.manual_seed(p)
    x = torch.randn(2, 11, D, dtype=torch.float64, requires_grad=True)
    verdict = validate_module(p, Experts(go, chosen).double(), x, layout=layout)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    return verdict.report


@pytest.mark.sample(2)
@pytest.mark.parametrize("p, layout", CASES[:2])
@pytest.mark.parametrize(
    "go",
    [
        as_in_transformers,
        order_sorted_back,
        tokens_repeated_before,
        one_after_the_other,
        an_expert_that_is_skipped,
        experts_of_a_table,
        experts_of_a_table_by_what_tokens_are,
    ],
)
def test_every_token_meets_its_experts_where_it_is(go, p, layout):
    report = checked(go, p, layout)
    assert {gather.op for gather in report.gathers} == {"output"} and report.sharded_fraction == 1, report


def dropped_on_the_way(m, x, weights, experts):
    experts, order = experts.sort()
    return grouped_mm(F.dropout(x[order], 0.5, True), m.wide, ends(experts))[back(order)]


def test_what_is_dropped_between_experts_is_drawn_by_each_rank_from_the_stream_of_torch():
    """Experts that change nothing: of each element comes back nothing or twice as much, to its own place."""
    model = Experts(dropped_on_the_way, chosen=1).double()
    for matrix in (model.out.weight, *model.wide):
        nn.init.eye_(matrix)
    nn.init.zeros_(model.out.bias)
    x = torch.randn(2, 64, D, dtype=torch.float64)
    gm, given = captured(model, x)
    made = [transform(gm, given, Options(layout="contiguous", random="torch"), Seat(rank, 2)) for rank in range(2)]
    assert {gather.op for gather in made[0].report.gathers} == {"output"} and made[0].report.sharded_fraction == 1
    (out,), (other,) = run_on_threads(2, lambda mesh: made[mesh.rank].graph(*given))
    assert torch.equal(out, other)
    model.go = lambda m, x, weights, experts: torch.zeros_like(x)
    kept = (out / model(x) - 1) / 2
    torch.testing.assert_close(kept, kept.round())
    assert set(kept.round().unique().tolist()) == {0.0, 1.0} and 0.45 < float(kept.mean()) < 0.55
    halves = kept.round().chunk(2, 1)
    assert 0.4 < float((halves[0] == halves[1]).double().mean()) < 0.6


def test_one_expert_a_token():
    report = checked(as_in_transformers, 2, "contiguous", chosen=1)
    assert {gather.op for gather in report.gathers} == {"output"}, report


def each_beside_all_tokens(m, x, weights, experts):
    """Tokens, which come first, are spread as well; what is in the order is not to be gathered for them."""
    experts, order = experts.sort()
    y = products(m, x[order // m.chosen], experts)
    y = torch.einsum("md,nd->nm", x, y).tanh() @ x
    return y[back(order)] * weights.unsqueeze(-1)


@pytest.mark.parametrize("p, layout", CASES[:2])
def test_rows_in_the_order_meet_all_tokens(p, layout):
    assert "sort" not in {gather.op for gather in checked(each_beside_all_tokens, p, layout).gathers}


def places_counted(m, x, weights, experts):
    """Who is served first matters."""
    experts, order = experts.sort()
    y = products(m, x[order // m.chosen], experts) * order.unsqueeze(-1)
    return y[back(order)] * weights.unsqueeze(-1)


def mixed_on_the_way(m, x, weights, experts):
    experts, order = experts.sort()
    y = products(m, x[order // m.chosen], experts)
    return (y - y.mean(0))[back(order)] * weights.unsqueeze(-1)


def never_put_back(m, x, weights, experts):
    experts, order = experts.sort()
    return products(m, x[order // m.chosen], experts) * weights[order].unsqueeze(-1)


def beside_other_rows(m, x, weights, experts):
    experts, order = experts.sort()
    y = products(m, x[order // m.chosen], experts) * weights.unsqueeze(-1)
    return y[back(order)]


def falling(m, x, weights, experts):
    experts, order = (EXPERTS - 1 - experts).sort(descending=True)
    return products(m, x[order // m.chosen], EXPERTS - 1 - experts)[back(order)] * weights.unsqueeze(-1)


def numbers_below_zero(m, x, weights, experts):
    """Sorted first, and not counted: all others would meet the weights of those before them."""
    experts, order = (experts - 1).sort()
    return products(m, x[order // m.chosen], experts.clamp(0))[back(order)] * weights.unsqueeze(-1)


def filled_below_zero(m, x, weights, experts):
    return as_in_transformers(m, x, weights, experts.masked_fill(experts == EXPERTS - 1, -1))


def a_table_of_any_numbers(m, x, weights, experts):
    """Nothing else in the program says that none is negative."""
    experts = m.table[x[:, :1].mul(4).long() % 5].reshape(-1)
    return as_in_transformers(m, x, weights, experts)


def narrow(m, x, weights, experts):
    """Numbers of 8 bits wrap around, and are in order no more."""
    experts, order = experts.sort()
    return products(m, x[order // m.chosen], experts.to(torch.uint8).long())[back(order)] * weights.unsqueeze(-1)


def without_their_places(m, x, weights, experts):
    """An operator that torch defines by a sort: what reads it is not beside the sort."""
    return x.repeat_interleave(m.chosen, 0) * weights.unsqueeze(-1) + torch.msort(experts).unsqueeze(-1)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "go",
    [
        narrow,
        a_table_of_any_numbers,
        without_their_places,
        places_counted,
        mixed_on_the_way,
        never_put_back,
        beside_other_rows,
        falling,
        numbers_below_zero,
        filled_below_zero,
    ],
)
def test_what_depends_on_the_order_is_gathered(go):
    report = checked(go, 2, "zigzag")
    assert "sort" in {gather.op for gather in report.gathers}, report


class SortedBackward(torch.autograd.Function):
    """Its gradient goes through the order and back."""

    @staticmethod
    def forward(ctx, x, logits):
        ctx.save_for_backward(logits)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        experts, order = logits.argmax(-1).sort()
        return (grad[order] * experts.unsqueeze(-1))[order.argsort()], None


def test_the_backward_of_a_function_sorts_for_itself():
    def go(m, x, weights, experts):
        return SortedBackward.apply(x, m.router(x).detach()) * weights.unsqueeze(-1)

    report = checked(go, 2, "zigzag", chosen=1)
    assert {gather.op for gather in report.gathers} == {"output"}, report
