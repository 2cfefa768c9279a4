"""A model that goes through a set makes another graph in every process: torchrun does not fix Python's hash seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.errors import RingMismatchError
from tests.harness.models import difference
from tests.harness.pool import RankPool

KINDS = ("full", "sliding", "chunked", "near")
SEEDS = (1, 2, 4)  # of these each has another order of KINDS


@pytest.fixture(scope="module")
def seeded() -> Iterator[Callable[..., list[Any]]]:
    pool = RankPool(SEEDS)
    yield pool.run
    pool.close()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.gate = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, mask: Tensor, turn: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q * turn, k * turn, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Kinds(nn.Module):
    """Masks and rotations by the kind of a layer, in dicts made from a set, as transformers has them; each kind brings
    parameters, writes and a region without gradients, and what is returned is a dict by kind too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kinds = set(KINDS)
        self.layers = nn.ModuleList(Layer() for _ in KINDS)
        self.scales = nn.ParameterDict({kind: torch.rand(8) for kind in KINDS})

    def mask(self, kind: str, i: Tensor) -> Tensor:
        mask = torch.zeros(len(i), len(i), dtype=torch.bool)
        q, k = i[:, None], i[None]
        near = (q - k).abs() < 3
        seen = {"full": k <= q, "sliding": (k <= q) & (q - k < 5), "chunked": q // 4 == k // 4, "near": near}
        return mask.logical_or_(seen[kind])

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        masks, turns, sums = {}, {}, {}
        i = torch.arange(x.shape[1])
        for kind in self.kinds:
            masks[kind] = self.mask(kind, i)
            with torch.no_grad():
                angle = torch.outer(i.to(x.dtype), torch.arange(8, dtype=x.dtype) / (2 + KINDS.index(kind))).cos()
            turns[kind] = angle * self.scales[kind]
        x = self.layers[0](x, masks[KINDS[0]], turns[KINDS[0]])
        for kind in self.kinds:  # branches side by side, whose messages depend on nothing of each other
            sums[kind] = self.layers[KINDS.index(kind)](x, masks[kind], turns[kind]).square().mean()
        return x.square().mean() + sum(sums[kind] for kind in KINDS), sums


def data() -> Tensor:
    return torch.randn(2, 21, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model: Callable[..., Any], parameters: nn.Module) -> list[Tensor]:
    loss, sums = model(data())
    loss.backward()
    found = [loss.detach(), *(sums[kind].detach() for kind in KINDS)]
    return [*found, *(p.grad for p in parameters.parameters() if p.grad is not None)]


def trained(inner_backend: str) -> tuple[list[str], list[Tensor], list[str]]:
    model = Kinds().double()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": inner_backend, "strategy": "ring"})
    found = step(compiled, model)
    [report] = ringopt.reports()[-1:]
    return list(model.kinds), found, [site.pattern for site in report.sites]


@pytest.mark.parametrize(
    ("p", "inner_backend"),
    [(2, "eager"), *(pytest.param(3, inner, marks=pytest.mark.zoo) for inner in ("aot_eager", "inductor"))],
)
def test_ranks_that_go_through_a_set_in_other_orders(seeded: Any, p: int, inner_backend: str) -> None:
    model = Kinds().double()
    expected = step(model, model)
    results = seeded(p, trained, inner_backend, timeout=600)
    assert len({tuple(order) for order, *_ in results}) == p, "the seeds must give other orders"
    for _, found, patterns in results:
        assert difference(found, expected) < 1e-12
        assert patterns == results[0][2] and len(patterns) == 1 + len(KINDS)


class Noise(Kinds):
    """Random numbers for each kind, drawn in the order of a set."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        for kind in self.kinds:
            x = x + torch.randn(16, dtype=x.dtype) * (1 + KINDS.index(kind))
        return super().forward(x)


class Asks(Kinds):
    """Asks for its rank."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.rank == 1:
            x = x * 3
        return super().forward(x)


def refused(model: type[Kinds]) -> str:
    made = model().double()
    made.rank = dist.get_rank()
    with pytest.raises(RingMismatchError) as raised:
        torch.compile(made, backend="ring", options={"inner_backend": "eager", "strategy": "ring"})(data())
    return str(raised.value)


def test_the_first_node_that_differs_is_named(seeded: Any) -> None:
    said = seeded(2, refused, Asks, timeout=600)
    assert said == said[:1] * 2
    assert said[0].startswith("ranks [1] compiled another program than rank 0")
    assert "rank 1 has %mul = aten.mul.Tensor(%x, 3) (test_hash_seeds.py:" in said[0] and "x = x * 3)" in said[0]


@pytest.mark.zoo
def test_random_numbers_drawn_in_another_order_are_other_programs(seeded: Any) -> None:
    """Each rank would draw for one kind what the next draws for another."""
    said = seeded(3, refused, Noise, timeout=600)
    assert said == said[:1] * 3
    assert said[0].startswith("ranks [1, 2] compiled another program than rank 0") and "must draw random" in said[0]


def gemma() -> tuple[nn.Module, Tensor]:
    config = pytest.importorskip("transformers.models.gemma4.configuration_gemma4").Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=5, vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8, num_kv_shared_layers=0, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"] * 2, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(0, 64, (1, 23), generator=torch.Generator().manual_seed(1))
    return Gemma4ForCausalLM(config).double(), ids


def gemma_trained(shards: bool) -> tuple[list[str], list[Tensor]]:
    model, ids = gemma()
    called = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"}) if shards else model
    loss = F.cross_entropy(called(input_ids=ids).logits.flatten(0, 1), ids.flatten())  # its own one is in float32
    loss.backward()
    assert not shards or len(ringopt.reports()[-1].sites) == 4
    return list(model.model.unique_layer_types), [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.zoo
def test_a_model_of_transformers_that_goes_through_a_set(seeded: Any) -> None:
    _, expected = gemma_trained(False)
    results = seeded(3, gemma_trained, True, timeout=600)
    assert len({tuple(order) for order, _ in results}) > 1, "the seeds must give other orders"
    for _, found in results:
        assert difference(found, expected) < 1e-5  # its norms are in float32
