"""All ranks post their messages in one order, though their graphs differ: they have unequal rows, and a partitioner
computes other things again on each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.dims.products import is_product
from ringopt.drivers.compile import transform
from ringopt.ir.nodes import op_name
from ringopt.ops.traits import is_start, sends
from ringopt.options import Options
from ringopt.overlap.reorder import product_flops
from ringopt.overlap.start_early import finish_of, order
from ringopt.planner.liveness import partitioned
from tests.harness.translation import Seat, captured, difference, values_and_gradients
from tests.overlap.test_async_collectives import Beside, Outputs
from tests.overlap.test_start_early import HEADS, WIDTH, Block, Model, data, on_ranks, ordered, shown

# What posts nothing, and halves that post what the whole does.
WAITS = ("ring_backward_finish", "gather_finish", "reduce_finish")
WHOLE = {
    "ring_backward_begin": "ring_attention_backward", "gather_start": "gather", "reduce_start": "reduce_bucket",
}  # fmt: skip


def posted(graph: fx.Graph) -> list[str]:
    names = [op_name(node) for node in graph.nodes if sends(node)]
    return [WHOLE.get(name, name) for name in names if name not in WAITS]


@pytest.mark.zoo
@pytest.mark.parametrize(("model", "shard"), [(Outputs, "model"), (Beside, "attention")])
def test_whatever_is_computed_again(model: type[nn.Module], shard: str) -> None:
    """Within a memory budget, a partitioner chooses by sizes, which differ by rank. No exchange is repeated, and each
    that is started is finished in the same graph."""
    gm, inputs = captured(model().double(), data())
    found = set()
    for budget in (1.0, 0.3):
        for rank in (0, 2):
            made = transform(gm, inputs, Options(strategy="ring", shard=shard), Seat(rank, 3))
            assert made.graph is not None
            with functorch.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator="flops"):
                parts = partitioned(made.graph)
            for part in parts:
                order(part.graph, made.budget)
                assert all(finish_of(start) in part.graph.nodes for start in filter(is_start, part.graph.nodes))
            found.add(str([posted(part.graph) for part in parts]))
    assert len(found) == 1, found


@pytest.mark.zoo
def test_numbers_within_a_memory_budget() -> None:
    with functorch.patch(activation_memory_budget=0.3, activation_memory_budget_runtime_estimator="flops"):
        found, _ = on_ranks(3, Model(2).double(), data(), values_and_gradients, strategy="ring")
    for values, expected in found:
        assert not difference(expected, values)


class Writes(nn.Module):
    """Attends to a buffer that it writes in place afterwards, and keeps in another what it also returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.block = nn.Linear(WIDTH, WIDTH), Block()
        self.register_buffer("kept", torch.randn(2, 11, WIDTH))
        self.register_buffer("seen", torch.zeros(2, 11, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, q = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.kept, self.q(x)))
        y = F.scaled_dot_product_attention(q, kept, kept, is_causal=True).transpose(1, 2).flatten(2)
        self.kept.mul_(0.5)
        z = self.block(y)
        self.seen.copy_(y.detach())
        return z.square().mean(), y


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.zoo), 3])
def test_what_travels_is_not_written_meanwhile(p: int) -> None:
    model = Writes().double().requires_grad_(False)  # no gradient could be computed of what was written
    found, _ = on_ranks(p, model, data().detach(), ordered, strategy="ring")
    for (values, ran), expected in found:
        assert not difference(expected, values)
        names = shown(ran)
        assert names[: names.index("gathered")].count("ring") == 2, names


class Mixed(nn.Module):
    """Beside an attention of shards: a convolution along them, a product that sums over them, and a linear layer that
    does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = Block(), Block()
        self.near, self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        beside = y @ (y.mT @ self.near(y.mT).mT) + self.mix(y.mT).mean()
        return (self.block.attend(y) + beside).square().mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("p", "layout"), [(2, "zigzag"), (4, "contiguous")])
def test_what_hides_an_exchange_is_counted_alike(p: int, layout: str) -> None:
    """By it the ranks decide what starts early: 11 rows are 6 of one rank, and 5 of another."""
    gm, inputs = captured(Mixed(), data(dtype=torch.float32))
    found = []
    for rank in range(p):
        flat = transform(gm, inputs, Options(strategy="ring", layout=layout), Seat(rank, p)).graph
        assert flat is not None
        found.append({node.name: product_flops(node, p) for node in flat.graph.nodes if is_product(node)})
    assert all(counted == found[0] for counted in found), found


class Shifts(torch.autograd.Function):
    """Its gradient is made of the rows after those that were given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (g,) = ctx.saved_tensors, gradients
        return g * F.pad(x[:, 1:], (0, 0, 0, 1))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Shifts.apply(self.last(self.block(x))).mean()  # type: ignore[no-untyped-call, no-any-return]


def test_what_a_backward_makes_of_saved_rows_is_made_there() -> None:
    """11 rows are 6 of rank 0 and 5 of rank 1, the last 10 are 5 of each: on rank 0 a partitioner would rather keep
    these, and so fetch them in the forward."""
    found = []
    for rank in range(2):
        gm, inputs = captured(Shifted().double(), data())
        made = transform(gm, inputs, Options(strategy="ring", layout="contiguous"), Seat(rank, 2))
        assert made.graph is not None
        found.append([posted(part.graph) for part in partitioned(made.graph)])
    assert found[0] == found[1]
    assert [names.count("fetch_rows") for names in found[0]] == [0, 2]


def step_of_shifted() -> Any:
    """The loss and the gradient of its input, of the program and of the ranks."""
    program = Shifted().double()
    shared = torch.compile(program, backend="ring", options={"inner_backend": "aot_eager", "timeout": 20})
    return [values_and_gradients(lambda x, run=run: (run(x),), [data()]) for run in (program, shared)]


def test_ranks_meet_in_such_a_backward(ranks: Any) -> None:
    for expected, found in ranks(2, step_of_shifted):
        assert not difference(expected, found)
