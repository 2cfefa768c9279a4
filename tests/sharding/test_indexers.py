"""Sparse attention whose keys are picked by scores of the program's own: each rank scores its own queries, the keys of
the index are gathered, and blocks of keys that nobody picked are not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.context_parallel.executor.seen_blocks import seen_blocks
from ringopt.context_parallel.executor.tiles import Tile
from ringopt.distributed.traffic import record_traffic
from ringopt.ir.nodes import is_tensor, shape_of
from tests.harness.errors import worst_of
from tests.harness.lengths import run_over
from tests.harness.models import difference
from tests.harness.translation import Verdict, validate_module

B, N, WIDTH, HEADS, DEPTH, INDEX, PICKS, CHUNK = 2, 13, 12, 2, 6, 3, 4, 4


class Layer(nn.Module):
    """Attention under the mask that `picked` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DEPTH), nn.Linear(HEADS * DEPTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, DEPTH).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rows = torch.arange(n)
        y = F.scaled_dot_product_attention(q, k, v, self.picked(x, q, k, rows[:, None] >= rows))
        return x + self.out(y.transpose(1, 2).reshape(b, n, HEADS * DEPTH))


class Indexed(Layer):
    """The lightning indexer of DeepSeek V3.2: weighted heads of scores, the largest of which are picked. `learned`: the
    scores are a bias, too."""

    def __init__(self, learned: bool = False) -> None:
        super().__init__()
        self.learned = learned
        self.wq, self.wk, self.weights = nn.Linear(WIDTH, 2 * INDEX), nn.Linear(WIDTH, INDEX), nn.Linear(WIDTH, 2)

    def picked(self, x: Tensor, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.learned):
            b, n, _ = x.shape
            q = self.wq(x).view(b, n, 2, INDEX)
            scores = torch.relu(torch.matmul(q, self.wk(x).transpose(-1, -2).unsqueeze(1)))
            scores = torch.matmul(self.weights(x).unsqueeze(-2), scores).squeeze(-2)
            scores = scores.masked_fill(~seen, float("-inf"))
        chosen = scores.topk(PICKS, -1).indices.to(torch.int32)
        hidden = chosen.new_ones((b, n, n), dtype=torch.bool).scatter(-1, chosen.long(), False)
        if self.learned:
            return scores.masked_fill(hidden, float("-inf")).unsqueeze(1)
        return (seen & ~hidden).unsqueeze(1)


class Chunked(Layer):
    """Mixture of block attention (MoBA): the mean of a chunk's keys says which chunks a query sees beside its own."""

    def picked(self, x: Tensor, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        n = q.shape[2]
        chunks = k.unflatten(2, (-1, CHUNK)).mean(3)
        own = torch.arange(n)[:, None] // CHUNK
        gate = torch.einsum("bhqd,bhcd->bhqc", q, chunks).masked_fill(own <= torch.arange(n // CHUNK), float("-inf"))
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter(-1, gate.topk(1, -1).indices, True)
        chosen = chosen | (own == torch.arange(n // CHUNK))
        return chosen.repeat_interleave(CHUNK, -1) & seen


class Selected(Layer):
    """The selected branch of native sparse attention: blocks by their weight in an attention over compressed keys."""

    def picked(self, x: Tensor, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        n = q.shape[2]
        pooled = k.unflatten(2, (-1, CHUNK)).mean(3)
        weights = (q @ pooled.transpose(-1, -2)).softmax(-1).sum(1, keepdim=True)
        least = weights.topk(2, -1).values[..., -1:]
        return (weights >= least).repeat_interleave(CHUNK, -1) & seen | (torch.eye(n) > 0)


def stack(layer: Any, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(layer() for _ in range(layers))).double()


def given(n: int = N) -> Tensor:
    torch.manual_seed(n)
    return torch.randn(B, n, WIDTH, dtype=torch.float64, requires_grad=True)


def check(p: int, model: nn.Module, n: int, **options: Any) -> Verdict:
    verdict = validate_module(p, model, given(n), **options)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    return verdict


def whole_pairs(verdict: Verdict, n: int) -> list[str]:
    """What has all queries and keys of a batch on one rank."""
    tensors = [node for node in verdict.graph.graph.nodes if node.op == "call_function" and is_tensor(node)]
    return [node.name for node in tensors if shape_of(node)[:1] == (B,) and shape_of(node)[-2:] == (n, n)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("p", "n"), [(2, 13), (3, 14)])
@pytest.mark.parametrize("learned", [False, True])
def test_the_indexer_is_on_shards_from_the_first_layer_on(p: int, n: int, learned: bool) -> None:
    verdict = check(p, stack(lambda: Indexed(learned)), n)
    assert verdict.report.sharded_fraction == 1 and verdict.report.notes != ()
    gathered = [gather.bytes for gather in verdict.report.gathers if gather.op != "output"]
    assert gathered == [B * n * INDEX * 8] * 2  # the keys of the index, of each layer
    assert whole_pairs(verdict, n) == []


@pytest.mark.parametrize(("layer", "p", "n"), [(Chunked, 2, 68), (Chunked, 3, 72), (Selected, 3, 76)])
def test_keys_picked_by_blocks(layer: Any, p: int, n: int) -> None:
    verdict = check(p, stack(layer), n)
    assert verdict.report.sharded_fraction > 0.9
    assert whole_pairs(verdict, n) == []


def test_lengths_that_open() -> None:
    """Behind the first one every rank scores all queries: what has an unknown number of rows is lowered nowhere."""
    run = run_over(stack(Indexed, 1), [(given(n),) for n in (13, 17, 22)], 2)
    assert len(run.reports) == 2 and run.reports[0].sharded_fraction == 1


def on_rank(inner: str, lengths: tuple[int, ...]) -> tuple[list[float], int, int]:
    torch._dynamo.reset()
    errors, sent = [], (0, 0)
    model = stack(Indexed)
    options = {"inner_backend": inner, "strategy": "ring", "check_inputs": "first", "timeout": 120}
    run = torch.compile(model, backend="ring", options=options)
    for n in lengths:
        made = []
        for program in (model, run):
            model.zero_grad()
            x = given(n).detach().requires_grad_()
            out = program(x)
            (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
            made.append([out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        errors.append(difference(made[1], made[0]))
        if n == N:
            with record_traffic() as traffic:
                run(given(n))
            sent = traffic.bytes_sent, ringopt.reports()[-1].bytes_sent
    return errors, *sent


@pytest.mark.parametrize(
    ("inner", "lengths"),
    [("aot_eager", (13,)), *(pytest.param(x, (13, 17, 22), marks=pytest.mark.zoo) for x in ("aot_eager", "inductor"))],
)
def test_on_ranks(ranks: Any, inner: str, lengths: tuple[int, ...]) -> None:
    for errors, counted, reported in ranks(2, on_rank, inner, lengths, timeout=500):
        assert worst_of(*errors) < 1e-10
        assert counted == reported > 0


# ---- blocks that nobody picked ---------------------------------------------------------------------------------------
def near(n: int, width: int) -> Tensor:
    """[n, n]: each query sees the keys of its own stretch of `width`."""
    stretch = torch.arange(n) // width
    return stretch[:, None] == stretch


def test_runs_of_blocks_that_somebody_sees() -> None:
    seen = near(40, 16)
    seen[:, 3] = True
    mask = torch.zeros(1, 1, 40, 40).masked_fill(~seen, float("-inf"))
    assert seen_blocks(mask, 8) == [
        (slice(0, 16), slice(0, 16)),
        (slice(16, 32), slice(0, 8)),
        (slice(16, 32), slice(16, 32)),
        (slice(32, 40), slice(0, 8)),
        (slice(32, 40), slice(32, 40)),
    ]
    assert seen_blocks(mask.new_zeros(1, 1, 40, 40), 8) == [(slice(0, 40), slice(0, 40))]
    assert seen_blocks(mask.new_full((1, 1, 40, 40), float("-inf")), 8) == []


class Near(Layer):
    """Scores that pick what is near, which only numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(WIDTH, 1)

    def picked(self, x: Tensor, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        n = q.shape[2]
        at = torch.arange(n, dtype=x.dtype)[:, None] // 64 + 0.01 * torch.tanh(self.place(x))
        scores = -(at - at.transpose(1, 2)).abs()
        chosen = scores.topk(32, -1).indices
        return (torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & seen).unsqueeze(1)


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_blocks_that_nobody_picked_are_not_computed(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n, pairs = 512, list[int]()
    tile = Tile.inputs

    def counted(self: Tile, *args: Any) -> Any:
        pairs.append(len(self.queries) * len(self.keys))
        return tile(self, *args)

    monkeypatch.setattr(Tile, "inputs", counted)
    check(2, stack(Near), n, layout="contiguous", strategy=strategy)
    layers, passes = 2, 2
    assert sum(pairs) <= layers * passes * n * 64  # of n * n / 2 that the causal mask leaves
