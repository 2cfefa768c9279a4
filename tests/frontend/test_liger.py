"""Liger's kernels are operators that work token by token. Liger is a stand-in (tests/harness/stub_liger.py), but for
tests/integrations/test_liger.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
import ringopt.backend
from ringopt.frontend.libraries.liger import all_but_the_last, parameters
from ringopt.ir.nodes import op_name
from ringopt.rules.declare import Tokenwise
from tests.harness import stub_liger as stubs
from tests.harness.translation import validate

H, D, VOCABULARY = 2, 4, 11
WIDTH = H * D
OF_PLAIN, OF_LINEAR = (
    parameters(stubs.LigerCrossEntropyFunction),
    parameters(stubs.LigerFusedLinearCrossEntropyFunction),
)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    torch._dynamo.reset()
    with stubs.liger():
        yield


class Block(nn.Module):
    """A block as Liger's patches leave it, and its loss."""

    def __init__(self, linear: bool = True, dispatched: bool = False, **how: Any) -> None:
        super().__init__()
        self.linear, self.dispatched, self.how = linear, dispatched, {"reduction": "mean", **how}
        self.embed, self.into = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 7 * WIDTH)
        self.norms = nn.ParameterList(torch.rand(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=linear)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ParameterList(torch.rand(3, *sides) for sides in ((6, WIDTH), (WIDTH, 3)))
        self.register_buffer("of_classes", torch.rand(VOCABULARY) + 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        normed = stubs.LigerRMSNormFunction.apply(x, self.norms[0], 1e-6, 1.0, "gemma", True)
        q, k, v, gate, up, first, second = self.into(normed).chunk(7, -1)
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (q, k, v))
        angles = torch.arange(ids.shape[1], device=ids.device)[None, :, None] * torch.tensor([1.0, 0.3] * 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = (
            stubs.dispatch("rope", q, k, cos, sin) if self.dispatched else stubs.LigerRopeFunction.apply(q, k, cos, sin)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        mixed, x = stubs.LigerFusedAddRMSNormFunction.apply(attended, x, self.norms[1], 1e-6)
        x = x + stubs.LigerSiLUMulFunction.apply(gate, up + mixed) + stubs.LigerGELUMulFunction.apply(first, second)
        x = stubs.LigerLayerNormFunction.apply(x, self.norms[2], self.norms[3], 1e-6).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        x = x + stubs.LigerFusedMoEFunction.apply(x, self.experts[0], self.experts[1], chosen.to(torch.int32), weights)
        how = {name: self.of_classes if y is True and name == "weight" else y for name, y in self.how.items()}
        if self.linear:
            how["ce_weight"] = how.pop("weight", None)
            given = {**OF_LINEAR, "_input": x, "weight": self.head.weight, "target": labels.flatten(), **how}
            return stubs.LigerFusedLinearCrossEntropyFunction.apply(*({**given, "bias": self.head.bias}).values())[
                0
            ].mean()
        given = {**OF_PLAIN, "_input": self.head(x), "target": labels.flatten(), **how}
        return stubs.LigerCrossEntropyFunction.apply(*given.values())[0].mean()


AHEAD = {"inner_backend": "aot_eager"}
HOW: dict[str, dict[str, Any]] = {
    "mean": {}, "dispatched": {"dispatched": True}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"},
    "weights": {"weight": True}, "smoothed": {"label_smoothing": 0.1, "softcap": 3.0},
    "weights, sum, z": {"weight": True, "reduction": "sum", "lse_square_scale": 0.1, "ignore_index": 3},
}  # fmt: skip


def drawn(tokens: int = 13, ignored: int = -100) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, tokens))
    return ids, torch.where(torch.rand(2, tokens) < 0.3, ignored, torch.randint(0, VOCABULARY, (2, tokens)))


def block(**how: Any) -> Block:
    torch.manual_seed(0)
    return Block(**how).double()


@pytest.mark.sample(3)
@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.zoo)])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("name", HOW)
def test_the_graph_is_whole_and_numbers_are_those_of_liger(name: str, linear: bool, inner_backend: str) -> None:
    model, x = block(linear=linear, **HOW[name]), drawn(ignored=HOW[name].get("ignore_index", -100))
    compiled = torch.compile(model, backend="ring", fullgraph=True, options={"inner_backend": inner_backend})
    wanted, found = ([run(*x), *torch.autograd.grad(run(*x), [*model.parameters()])] for run in (model, compiled))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # with the linear layer, losses are float32


@pytest.mark.sample(3)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("name", HOW)
def test_tokens_stay_on_shards(name: str, linear: bool, p: int) -> None:
    found = validate(
        p,
        block(linear=linear, **HOW[name]),
        *drawn(ignored=HOW[name].get("ignore_index", -100)),
        tolerance=1e-6 if linear else 1e-9,
    )
    assert found.wrong == ""
    assert not found.report.gathers and found.report.sharded_fraction == 1
    named = {op_name(node).removeprefix("ringopt_kernels::liger_") for node in found.graph.graph.nodes}
    assert {"rms_norm", "rope", "silu_mul", "gelu_mul", "layer_norm", "fused_moe"} <= named
    assert ("fused_linear_cross_entropy" if linear else "cross_entropy") in named


def test_no_label_that_counts_gives_a_loss_of_nothing() -> None:
    model, (ids, labels) = block(), drawn()
    compiled = torch.compile(model, backend="ring", options=AHEAD)
    assert float(compiled(ids, torch.full_like(labels, -100))) == float(model(ids, torch.full_like(labels, -100))) == 0


@pytest.mark.parametrize("asked", [{"use_token_scaling": True}, {"linear": False, "return_token_accuracy": True}])
def test_what_is_asked_beside_the_loss_breaks_the_graph(asked: dict[str, Any]) -> None:
    model, x = block(**asked), drawn()
    wanted, found = (
        [run(*x), *torch.autograd.grad(run(*x), [*model.parameters()])]
        for run in (model, torch.compile(model, backend="ring", options=AHEAD))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="ring", fullgraph=True, options=AHEAD)(*x)


# ---- on real ranks ---------------------------------------------------------------------------------------------------
def on_ranks(lengths: list[int]) -> list[float]:
    """The largest error of the loss and gradients at each length, relative to the largest number."""
    torch._dynamo.reset()
    model, found = block(), []
    with stubs.liger():
        compiled, made = torch.compile(model, backend="ring", fullgraph=True), len(ringopt.reports())
        for tokens in lengths:
            x, leaves = drawn(tokens), [*model.parameters()]
            pair = [[run(*x), *torch.autograd.grad(run(*x), leaves)] for run in (compiled, model)]
            found.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*pair, strict=True)))
    assert [report.sharded_fraction for report in ringopt.reports()[made:]] == [1, 1]
    return found


@pytest.mark.zoo
def test_several_lengths_on_real_ranks_through_inductor(ranks: Any) -> None:
    for of_rank in ranks(2, on_ranks, [13, 18, 21]):
        assert max(of_rank) < 1e-6


def test_a_norm_mixes_its_last_dim() -> None:
    """Along which no program here is sharded."""
    assert all_but_the_last("X", "R")(X=torch.empty(2, 3, 4)) == Tokenwise({"X": (0, 1), "R": (0, 1)})
