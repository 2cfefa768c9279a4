"""Random operators by position: every one is the same on any number of ranks, forward and backward, and has the shape,
dtype, strides and distribution of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.drivers.compiled import Compiled
from ringopt.ir.nodes import is_random, op_name
from ringopt.ops import operators
from ringopt.options import Options
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, Values, captured, difference, values_and_gradients, with_seed

N, D = 13, 8


class Program(nn.Module):
    """Attention, then `draw` of what comes out of it."""

    def __init__(self, draw: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out, self.draw = nn.Linear(D, 3 * D), nn.Linear(D, D), draw

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unsqueeze(1) for y in self.into(x).chunk(3, -1))
        y = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return self.draw(self, y)


def data(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, N, D, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def twice(m: Any, y: Tensor) -> Tensor:
    return F.dropout(F.dropout(y, 0.3), 0.3) + F.dropout(m.out.weight, 0.5).sum()


def transposed(m: Any, y: Tensor) -> Tensor:
    """Values that lie in another order in memory."""
    z = y.transpose(1, 2)
    return F.dropout(z, 0.5).transpose(1, 2) * torch.rand_like(z).transpose(1, 2)


def in_place(m: Any, y: Tensor) -> Tensor:
    z = y * 1
    F.dropout(z, 0.4, inplace=True)
    noise = torch.empty_like(z).normal_(1, 2).mul_(torch.empty_like(z).uniform_(2, 3))
    return z + noise + torch.empty_like(z).exponential_(3.0)


def other_dtypes(m: Any, y: Tensor) -> Tensor:
    rows = torch.rand(y.shape[:2], dtype=torch.bfloat16) + torch.randn(y.shape[:2], dtype=torch.float16)
    return y * rows.unsqueeze(-1).to(y.dtype) + F.dropout(y.to(torch.bfloat16), 0.1).to(y.dtype)


def given_as_tensors(m: Any, y: Tensor) -> Tensor:
    return y * torch.bernoulli(y.sigmoid()) + torch.normal(y.detach(), 2.0) + torch.normal(1.0, y.detach().exp())


def flattened(m: Any, y: Tensor) -> Tensor:
    return F.dropout(y.flatten(0, 1), 0.3).view_as(y) + torch.randint(3, 9, (2 * N, D)).view_as(y)


def in_order_of_experts(x: Tensor) -> Tensor:
    """Ranks sort rows of their own, so nothing is where it is in the whole."""
    experts, order = x[:, :3].argmax(-1).sort()
    hidden = F.dropout(F.silu(x[order]) + experts[:, None], 0.4)
    return F.dropout(hidden * 2, 0.2)[order.argsort()]


DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, y: F.dropout(y, 0.3),
    "several": twice,
    "all": lambda m, y: F.dropout(y, 1.0) + F.alpha_dropout(y, 1.0, True),
    "alpha": lambda m, y: F.alpha_dropout(y, 0.3, True),
    "features": lambda m, y: F.dropout1d(y, 0.3) + F.dropout2d(y.unsqueeze(0), 0.3).squeeze(0),
    "alpha, features": lambda m, y: F.feature_alpha_dropout(y, 0.3, True),
    "native": lambda m, y: torch.native_dropout(y, 0.3, True)[0] + torch.native_dropout(y, 0.3, True)[1],
    "rand and randn": lambda m, y: y * torch.rand_like(y) + torch.randn(2, N, D, dtype=y.dtype),
    "whole numbers": lambda m, y: y * torch.randint_like(y, 3, 9) + torch.randint(7, (2, N, 1)),
    "gumbel": lambda m, y: F.gumbel_softmax(y, hard=False),
    "others": lambda m, y: y + torch.empty_like(y).log_normal_(0, 0.5) + torch.empty_like(y).geometric_(0.3),
    "rrelu": lambda m, y: F.rrelu(y, 0.1, 0.9, training=True),
    "a shape of its own": lambda m, y: y + torch.rand(()) + torch.rand(D),
    "transposed": transposed,
    "in place": in_place,
    "other dtypes": other_dtypes,
    "given as tensors": given_as_tensors,
    "flattened": flattened,
    "of probabilities that are drawn": lambda m, y: y * torch.bernoulli(torch.rand_like(y)),
    "around means that are drawn": lambda m, y: y * torch.normal(torch.rand(2, N, D, dtype=y.dtype), 1.0),
    "of rows sorted by their expert": lambda m, y: y + in_order_of_experts(y.flatten(0, 1)).view_as(y),
    "of probabilities that are dropped": lambda m, y: y * torch.bernoulli(F.dropout(y.sigmoid() * 0.5, 0.3)),
    "of a draw of two results": lambda m, y: y + torch.bernoulli(torch.native_dropout(y.sigmoid() / 2, 0.3, True)[0]),
}


def test_a_program_without_inputs():
    draws = lambda: (torch.rand(3), torch.randn(2, 4) * 2, torch.rand(2))  # noqa: E731
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(draws, backend="ring", options={"inner_backend": "eager"})
    first, again = compiled(), compiled()
    report = ringopt.reports()[-1]
    assert report.refusal is None and ringopt.explain(draws, world_size=2).refusal is None
    assert not any(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    torch.manual_seed(0)
    assert all(torch.equal(x, y) for x, y in zip(first, compiled(), strict=True))


def made_for(gm: Any, given: list[Any], p: int, **options: Any) -> list[Compiled]:
    if p == 1:
        return [transform(gm, given, Options(**options), mesh_of("pretend:0/1"))]
    return [transform(gm, given, Options(**options), Seat(rank, p)) for rank in range(p)]


def run_on(p: int, gm: Any, given: list[Any], **options: Any) -> list[Values]:
    return run_made(made_for(gm, given, p, **options), given)


def run_made(made: list[Compiled], given: list[Any]) -> list[Values]:
    graphs = [with_seed(one.graph) for one in made if one.graph is not None]
    assert len(graphs) == len(made)
    return run_on_threads(len(made), lambda mesh: values_and_gradients(graphs[mesh.rank], given))


def all_of_them(m: Any, y: Tensor) -> Tensor:
    return torch.stack([draw(m, y) for draw in DRAWS.values()]).mean(0)


@pytest.mark.parametrize("name", ["all of them", *(pytest.param(name, marks=pytest.mark.zoo) for name in DRAWS)])
def test_the_same_on_any_number_of_ranks(name: str) -> None:
    gm, given = captured(Program(DRAWS.get(name, all_of_them)).double(), data())
    (alone,) = run_on(1, gm, given)
    for p in (2, 3) if name in DRAWS else (3,):
        made = made_for(gm, given, p)
        for found in run_made(made, given):
            assert not difference(alone, found, 1e-10), p
        report = made[0].report
        assert {gather.op for gather in report.gathers} == {"output"} and report.sharded_fraction == 1, report


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_in_any_layout(layout: str) -> None:
    gm, given = captured(Program(twice).double(), data())
    (alone,) = run_on(1, gm, given)
    assert not any(difference(alone, found, 1e-10) for found in run_on(4, gm, given, layout=layout))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DRAWS)
def test_shapes_dtypes_and_strides_are_those_of_torch(name: str) -> None:
    """Of the results, of the gradients, and of which inputs have one."""
    gm, given = captured(Program(DRAWS[name]).double(), data())
    (outputs, gradients), (expected, others) = run_on(1, gm, given)[0], values_and_gradients(gm, given)
    for found, right in zip((*outputs, *gradients), (*expected, *others), strict=True):
        assert (found is None) == (right is None)
        if isinstance(right, Tensor):
            assert (found.shape, found.dtype, found.stride()) == (right.shape, right.dtype, right.stride())


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "all of it": lambda x: F.dropout(x, 1.0),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "features": lambda x: torch.feature_dropout(x, 0.3, True),
    "alpha, features": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "native": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "whole numbers": lambda x: torch.randint_like(x, -3, 9),
    "uniform": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "normal": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal around": lambda x: torch.normal(x.detach(), 0.5),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "rand": torch.rand_like,
    "randn": torch.randn_like,
    "normal of deviations": lambda x: torch.normal(0.5, x.detach().sigmoid()),
    "normal of both": lambda x: torch.normal(x.detach(), x.detach().sigmoid()),
    "log-normal": lambda x: torch.empty_like(x).log_normal_(0, 0.2),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(1, 0.5),
}


def test_the_distributions_are_those_of_torch() -> None:
    x = torch.randn(60, 50, 20, generator=torch.Generator().manual_seed(1))

    class All(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return tuple(draw(x) for draw in MEANS.values())

    gm, given = captured(All(), x)
    made = made_for(gm, given, 1)[0].graph
    assert made is not None
    torch.manual_seed(2)
    for name, found, expected in zip(MEANS, made(*given), gm(*given), strict=True):
        assert_same_distribution(name, found.flatten().double(), expected.flatten().double())


def assert_same_distribution(name: str, found: Tensor, expected: Tensor) -> None:
    spread = float(expected.std()) / (len(expected) / (20 if "features" in name else 1)) ** 0.5
    if name != "cauchy":  # which has neither
        assert abs(float(found.mean() - expected.mean())) <= 6 * spread, name
        assert abs(float(found.std() - expected.std())) <= 0.05 * float(expected.std()), name
    for share in (0.1, 0.5, 0.9):
        below = float((found <= expected.quantile(share)).double().mean())
        assert abs(below - float((expected <= expected.quantile(share)).double().mean())) < 0.03, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_has_the_dtype_of_the_operand(dtype: torch.dtype) -> None:
    """A product with bool takes longer than to draw. Of 16 bits the factor has a product of its own, as in torch."""
    gm, given = captured(nn.Dropout(0.3), torch.ones(4, 3, 32, dtype=dtype))
    made = made_for(gm, given, 1)[0].graph
    assert made is not None
    (draw,) = made.graph.find_nodes(op="call_function", target=operators.draw.default)
    assert draw.args[-1] is dtype and len(draw.args[-2]) == (2 if dtype == torch.float32 else 1)
    least, most = made(*given)[0].unique().tolist()
    assert (least, most) == (0, (torch.ones((), dtype=dtype) * (1 / 0.7)).item())


@pytest.mark.parametrize(("layer", "together"), [(nn.AlphaDropout(), False), (nn.FeatureAlphaDropout(), True)])
def test_only_of_features_all_numbers_are_dropped_together(layer: nn.Module, together: bool) -> None:
    gm, given = captured(layer, torch.ones(4, 3, 32))
    made = made_for(gm, given, 1)[0].graph
    assert made is not None
    rows = made(*given)[0].flatten(0, 1)
    assert (rows == rows[:, :1]).all(1).tolist() == [together] * 12


# ---- streams ---------------------------------------------------------------------------------------------------------
def test_each_call_and_each_draw_has_its_own() -> None:
    """And as many numbers are drawn from the generator, whatever the number of ranks is."""

    def draw(m: Any, y: Tensor) -> Tensor:
        return torch.stack([torch.rand_like(y), torch.rand_like(y)]) + 0 * y

    gm, given = captured(Program(draw).double(), data())
    (made,) = made_for(gm, given, 1)
    assert made.graph is not None and made.drawn
    torch.manual_seed(7)
    first, second = made.graph(*given)[0], made.graph(*given)[0]
    torch.manual_seed(7)
    assert torch.equal(made.graph(*given)[0], first)
    draws = [*first.detach(), *second.detach()]
    apart = [float((x == y).double().mean()) for i, x in enumerate(draws) for y in draws[:i]]
    assert max(apart) == 0
    drawn = [node for one in (made, *made_for(gm, given, 3)) for node in one.graph.graph.nodes if is_random(node)]  # type: ignore[union-attr]
    assert [(op_name(node), node.args[0]) for node in drawn if op_name(node) == "seeds"] == [("seeds", 2)] * 4


def test_what_does_not_drop_is_left_as_it_was() -> None:
    gm, given = captured(Program(lambda m, y: F.dropout(y, 0.0) + F.alpha_dropout(y, 0.3, False)).double(), data())
    made = made_for(gm, given, 2)[0]
    assert not made.drawn and not [note for note in made.report.notes if "stream" in note]


@pytest.mark.parametrize("spread", [True, False])
def test_without_attention_too(spread: bool) -> None:
    """One process and many draw alike. One row is not spread, and nothing is compared."""
    layers = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D)).double()
    gm, given = captured(layers, data() if spread else data()[:1, :1].detach())
    (alone,) = run_on(1, gm, given)
    assert all((made.program is not None) == spread for made in made_for(gm, given, 2))
    assert not any(difference(alone, found, 1e-12) for found in run_on(2, gm, given))


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("multinomial", lambda m, y: y + torch.multinomial(torch.ones(N), N).view(N, 1)),
        ("randperm", lambda m, y: y + torch.randperm(D)),
        ("poisson", lambda m, y: y + torch.poisson(torch.ones(N, 1))),
        ("normal", lambda m, y: y + torch.normal(y, 1.0)),
    ],
)
def test_what_has_no_form_is_drawn_by_every_rank_alike(name: str, draw: Callable[[Any, Tensor], Tensor]) -> None:
    gm, given = captured(Program(draw).double(), data())
    made = made_for(gm, given, 2)[0]
    assert f"{name} draws by torch's own stream, whole and alike on every rank" in made.report.notes
    assert made.draws_random == [name]


def test_by_the_stream_of_torch_where_that_is_asked_for() -> None:
    gm, given = captured(Program(DRAWS["rand and randn"]).double(), data())
    made = made_for(gm, given, 2, random="torch")[0]
    assert made.graph is not None and not made.drawn
    names = [op_name(node) for node in made.graph.graph.nodes]
    assert "seeds" not in names and {"rand", "randn"} <= set(names)
