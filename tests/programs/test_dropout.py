"""A transformer that trains with dropout everywhere has the same loss and the same gradients on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringopt
from tests.harness.models import VOCAB, run

WIDTH, HEADS = 16, 2


class Layer(nn.TransformerEncoderLayer):
    """Torch's, in its training form: dropout of weights, of both branches, and in the feed-forward."""

    def __init__(self, p: float):
        super().__init__(WIDTH, HEADS, 2 * WIDTH, dropout=p, batch_first=True)


class Transformer(nn.Module):
    def __init__(self, p: float = 0.2, checkpointed: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, WIDTH), Layer(p), nn.Linear(WIDTH, VOCAB)
        self.p, self.checkpointed = p, checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), self.p, self.training)
        x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        weights = torch.softmax(x @ x.mT / WIDTH**0.5, -1)  # spelled out
        x = x + F.dropout(weights, self.p, self.training) @ x
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return F.cross_entropy(self.head(F.alpha_dropout(x, self.p, self.training)).flatten(0, 1), ids.flatten())


class Small(nn.Module):
    """Each way to draw once: Inductor compiles every kernel of a graph with a C++ compiler."""

    def __init__(self, p: float = 0.2):
        super().__init__()
        self.embed, self.p = nn.Embedding(VOCAB, 4), p
        nn.init.normal_(self.embed.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), self.p)
        y = x.unsqueeze(1)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True, dropout_p=self.p).squeeze(1)
        return (y + 0.1 * torch.randn_like(x)).square().mean()


def ids_of(n: int) -> Tensor:
    return torch.randint(VOCAB, (2, n), generator=torch.Generator().manual_seed(n))


def steps(
    inner_backend: str, lengths: tuple[int, ...], build: Callable[[], nn.Module] = Transformer, **options: Any
) -> tuple[list[Tensor], int]:
    """Loss and gradients of training steps; and where the generator is afterwards."""
    torch._dynamo.reset()
    model = build().double()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner_backend, **options})
    torch.manual_seed(5)
    found = [run(compiled, model, {"ids": ids_of(n)}) for n in lengths]
    assert ringopt.reports()[-1].refusal is None
    return [x for step in found for x in step], int(torch.randint(2**62, ()))


CASES: dict[str, tuple[Any, ...]] = {
    "eager": ("eager", (13, 13)),
    "checkpointed": ("aot_eager", (13, 13), partial(Transformer, checkpointed=True)),
    "open lengths": ("aot_eager", (13, 17), Small),
    "small": ("eager", (13, 13), Small),
    "inductor": ("inductor", (13, 13), Small),
}


@cache
def alone(name: str) -> tuple[list[Tensor], int]:
    """Of one process."""
    return steps(*CASES[name])


def agree(found: list[Tensor], expected: list[Tensor], bound: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) < bound * max(1.0, float(other.abs().max()))


SWEEP = [("eager", 2), ("eager", 4), *((name, p) for name in ("checkpointed", "open lengths") for p in (2, 3, 4))]
SAMPLE = [("eager", 3), ("small", 2)]


@pytest.mark.parametrize(("name", "p"), [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.zoo) for each in SWEEP)])
def test_the_same_on_any_number_of_ranks(ranks: Any, name: str, p: int) -> None:
    expected, state = alone(name)
    for found, after in ranks(p, steps, *CASES[name], timeout=600):
        assert after == state, "as many numbers are drawn from the generator"
        agree(found, expected)


@pytest.mark.zoo
def test_ranks_that_compile_draw_the_same(ranks: Any) -> None:
    expected, state = alone("small")
    for found, after in ranks(2, steps, *CASES["inductor"], timeout=600):
        assert after == state
        agree(found, expected)


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "plain"), [("checkpointed", "eager"), ("inductor", "small")])
def test_however_it_is_compiled(name: str, plain: str) -> None:
    """Seeds are drawn as by eager code; what a checkpoint computes again is what it computed."""
    (found, after), (expected, state) = alone(name), alone(plain)
    assert after == state
    agree(found, expected, 1e-10)


def test_code_that_nothing_fuses_draws_in_one_call() -> None:
    """With inner_backend="aot_eager" the pieces of a draw, some twenty of as many elements each, took ten times as long
    as torch's dropout."""
    x, found = torch.ones(4, 300, requires_grad=True), []
    for inner in ("aot_eager", "eager"):
        torch.compiler.reset()
        run = torch.compile(lambda x: F.dropout(x, 0.3), backend="ring", options={"inner_backend": inner})
        run(x)
        torch.manual_seed(0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as called:
            y = run(x)
        times = [event.name for event in called.events()].count("ringopt::drawn")
        assert times == (1 if inner == "aot_eager" else 0)
        found.append(y)
    assert torch.equal(*found) and found[0].unique().numel() == 2


def test_steps_differ_and_a_seed_reproduces_them() -> None:
    (first, _), (again, _) = alone("eager"), steps(*CASES["eager"])
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[len(first) // 2])


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "window, sinks and padding": lambda x, i: (
        (i <= i[:, None]) & ((i > i[:, None] - 4) | (i < 2)) & (x[..., 0] > -1)[:, None, None]
    ),
    "chunks and a bias": lambda x, i: torch.where(i // 5 == i[:, None] // 5, (i - i[:, None]) / 9.0, -torch.inf).to(x),
}


def over_lengths(name: str, dynamic: bool | None, inner: str) -> list[Tensor]:
    def step(x: Tensor) -> Tensor:
        q, mask = x.unflatten(-1, (HEADS, -1)).transpose(1, 2), MASKS[name](x, torch.arange(x.shape[1]))
        return F.scaled_dot_product_attention(q, q, q.sin(), mask, dropout_p=0.3)

    found: list[Tensor] = []
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="ring", dynamic=dynamic, options={"inner_backend": inner})
    for n in (8, 12, 9):
        torch.manual_seed(n)
        x = torch.randn(2, n, WIDTH, dtype=torch.float64).requires_grad_()
        out = compiled(x)
        out.square().sum().backward()
        assert x.grad is not None
        found += [out.detach(), x.grad]
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MASKS)
def test_one_graph_of_one_process_serves_all_lengths(name: str) -> None:
    expected, before = over_lengths(name, False, "eager"), len(ringopt.reports())
    agree(over_lengths(name, None, "aot_eager"), expected)
    assert len(ringopt.reports()) - before == 2


def by_stream() -> Tensor:
    return steps("eager", (13,), random="torch")[0][0]


@pytest.mark.zoo
def test_the_stream_of_torch_is_another_on_each_number_of_ranks(ranks: Any) -> None:
    (one,), (two, other) = ranks(1, by_stream), ranks(2, by_stream)
    assert torch.equal(two, other) and not torch.isclose(one, two)


def out_of_step(rank: int) -> str:
    """One rank draws a number by itself between two steps."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), SelfAttention(), nn.Dropout(0.5))
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "eager"})
    x = torch.ones(1, 8, WIDTH)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    compiled(x)
    if dist.get_rank() == rank:
        torch.rand(())
    try:
        compiled(x)
    except ringopt.errors.RingMismatchError as error:
        return str(error)
    return ""


class SelfAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y, is_causal=True).squeeze(1)


def test_generators_that_ran_apart_are_an_error_on_all_ranks(ranks: Any) -> None:
    told = ranks(2, out_of_step, 1)
    assert told[0] == told[1] and "the ranks draw random numbers by seeds" in told[0]


def sampled(rank: int, ahead: int) -> tuple[str, list[Tensor]]:
    """Tokens drawn by torch's own stream, each of which comes back; before step `ahead` one rank has drawn a number
    more."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    embed, attention = nn.Embedding(VOCAB, WIDTH), SelfAttention()

    def step(ids: Tensor) -> Tensor:
        scores = attention(embed(ids))[:, -1] @ embed.weight.mT
        return torch.cat((ids[:, 1:], torch.multinomial(scores.softmax(-1), 1)), 1)

    compiled, ids = torch.compile(step, backend="ring", options={"inner_backend": "eager"}), ids_of(8)
    torch.manual_seed(5)
    try:
        for at in range(4):
            if at == ahead and dist.get_rank() == rank:
                torch.rand(())
            ids = compiled(ids)
    except ringopt.errors.RingMismatchError as error:
        return str(error), []
    return "", [ids]


@pytest.mark.parametrize("ahead", [2, 4])
def test_ranks_whose_generators_ran_apart_are_named_where_torch_draws(ranks: Any, ahead: int) -> None:
    (one, found), (other, expected) = ranks(2, sampled, 1, ahead)
    assert one == other and all(map(torch.equal, found, expected))
    assert ("the random number generator on ranks [1]" in one) == (ahead < 4) == (one != "")


def converted(path: str) -> list[Tensor]:
    model = ringopt.load(path).module()
    torch.manual_seed(5)
    loss = model(ids_of(13))
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


@pytest.mark.zoo
def test_in_a_file_for_any_number_of_ranks(ranks: Any, tmp_path: Any) -> None:
    model = Transformer().double()
    exported = torch.export.export(model, (ids_of(13),))
    path = str(tmp_path / "out.pt2")
    torch.export.save(ringopt.convert(exported), path)
    expected = converted(path)
    for found in ranks(3, converted, path):
        agree(found, expected)
