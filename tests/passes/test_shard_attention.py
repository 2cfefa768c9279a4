"""What a program does to scores and weights arrives at the operators: the sharded program is the program.

Every site of the table is attention that is spelled out; p ranks are compared with the original in float64, gradients
included. Dropout cannot be compared with eager's: there, any number of ranks with one device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.errors import OptionError
from ringopt.expr.mask import Mask
from ringopt.frontend.capture import capture
from ringopt.ir.nodes import argument, op_name
from ringopt.ir.printer import short
from ringopt.options import Options
from ringopt.passes import UNDERSTAND
from ringopt.pipeline import Context, Pipeline
from tests.harness.threads import run_on_threads
from tests.harness.translation import Seat, captured, difference, validate, values_and_gradients, with_seed

B, N, D, H = 2, 13, 8, 2
PADDING = torch.ones(B, N, dtype=torch.bool)
PADDING[0, :4] = False


class Attention(nn.Module):
    """`weigh(module, x, scores, seen)` makes weights of scores [B, H, N, N]; `seen` is causal and without padding."""

    def __init__(self, weigh: Callable[..., Tensor]):
        super().__init__()
        self.weigh = weigh
        self.qkv, self.of_pairs, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.temperature, self.sinks = nn.Parameter(torch.randn(H, 1, 1)), nn.Parameter(torch.randn(H))
        self.table = nn.Parameter(torch.randn(H, N, N))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(B, N, H, D // H).transpose(1, 2)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        place = torch.arange(N)
        seen = (place <= place[:, None]) & there[:, None, None]
        weights = self.weigh(self, x, q @ k.mT * 0.5, seen)
        return self.out((weights @ v).transpose(1, 2).reshape(B, N, D))


def pairs(m: Attention, x: Tensor) -> Tensor:
    """[B, H, N, N], computed from the tokens."""
    z = m.heads(m.of_pairs(x))
    return (z @ z.mT).tanh()


def with_sinks(m: Attention, s: Tensor) -> Tensor:
    return torch.cat([s, m.sinks.view(1, H, 1, 1).expand(B, H, N, 1)], -1).softmax(-1)[..., :-1]


WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "softcap": lambda m, x, s, seen: (3 * torch.tanh(s / 3)).softmax(-1),
    "temperature in a softcap": lambda m, x, s, seen: torch.tanh(s * m.temperature).softmax(-1),
    "-1e9": lambda m, x, s, seen: s.masked_fill(~seen, -1e9).softmax(-1),
    "-1e4": lambda m, x, s, seen: s.masked_fill(~seen, -1e4).softmax(-1),
    "sinks": lambda m, x, s, seen: with_sinks(m, s),
    "sinks and padding": lambda m, x, s, seen: with_sinks(m, s.masked_fill(~seen, -torch.inf)),
    "table": lambda m, x, s, seen: (s + m.table).softmax(-1),
    "pairs": lambda m, x, s, seen: (s + pairs(m, x)).softmax(-1),
    "pairs and padding": lambda m, x, s, seen: (s + pairs(m, x)).masked_fill(~seen, -1e9).softmax(-1),
}


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(B, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(), PADDING


def model(weigh: Callable[..., Tensor]) -> Attention:
    torch.manual_seed(0)
    return Attention(weigh).double()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_sharded_program_is_the_program(name: str) -> None:
    for p, options in ((2, {"layout": "zigzag"}), (3, {"strategy": "gather", "layout": "contiguous"})):
        verdict = validate(p, model(WEIGHTS[name]), *inputs(), **options)
        assert not verdict.wrong, verdict.wrong
        assert [site.refusal for site in verdict.report.sites] == [None]
        keys = ["matmul"] if name.startswith("pairs") else []  # of the scores that are added, made in rows
        assert [gather.op for gather in verdict.report.gathers] == [*keys, "output"]


@pytest.mark.parametrize("name", ["-1e9", "sinks and padding", "table", "temperature in a softcap"])
def test_with_heads_traded_for_rows(name: str) -> None:
    verdict = validate(2, model(WEIGHTS[name]), *inputs(), strategy="ulysses")
    assert not verdict.wrong, verdict.wrong
    assert [site.strategy for site in verdict.report.sites] == ["ulysses"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["-1e9", "sinks and padding", "table", "temperature in a softcap"])
def test_over_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    verdict = validate(4, model(WEIGHTS[name]), *inputs(), strategy="hybrid")
    assert not verdict.wrong, verdict.wrong
    (site,) = verdict.report.sites
    assert site.strategy == "hybrid(2)" and any(note.startswith("nodes of 2 ranks: of ") for note in site.notes)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["-1e9", "sinks and padding", "table", "temperature in a softcap"])
def test_with_queries_that_travel(name: str) -> None:
    verdict = validate(3, model(WEIGHTS[name]), *inputs(), strategy="ring_q")
    assert not verdict.wrong, verdict.wrong


def test_rows_of_pairs_cannot_be_traded() -> None:
    with pytest.raises(OptionError, match=r"strategy 'ulysses' computes rows of queries on other ranks .* the mask"):
        validate(2, model(WEIGHTS["pairs"]), *inputs(), strategy="ulysses")


def test_a_fill_inside_a_function_of_the_score_is_refused() -> None:
    verdict = validate(
        2, model(lambda m, x, s, seen: (s.masked_fill(~seen, -1e9) * m.temperature).softmax(-1)), *inputs()
    )
    assert not verdict.wrong, verdict.wrong
    (site,) = verdict.report.sites
    told = "its scores go through a function that holds -1e+09; beside such a number partial sums are not exact"
    assert site.refusal == told


def test_a_tensor_over_pairs_is_held_by_rows() -> None:
    verdict = validate(3, model(WEIGHTS["pairs"]), *inputs(), layout="zigzag")
    (site,) = (node for node in verdict.graph.graph.nodes if op_name(node) == "ring_attention")
    mask = Mask.parse(argument(site, 9, "mask"))
    (source,) = argument(site, 3, "sources")
    assert mask.row_dims == {0: 2} and argument(site, 10, "learned") == [0]
    assert list(source.meta["val"].shape) == [B, H, 5, N]  # rank 0 has 5 of 13 rows


DROPPED: dict[str, Callable[..., Tensor]] = {
    "weights": lambda m, x, s, seen: F.dropout(s.softmax(-1), 0.3),
    "weights, with sinks": lambda m, x, s, seen: F.dropout(with_sinks(m, s.masked_fill(~seen, -torch.inf)), 0.3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_drops_the_same_weights_on_any_number_of_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm, given = captured(model(DROPPED[name]), *inputs())
    context = Context(Options(), mesh_of("pretend:0/1"))
    one = capture(gm, given).begin(context)
    Pipeline(UNDERSTAND).run(one, context)
    expected = values_and_gradients(with_seed(one), given)
    for p, options in ((2, Options()), (3, Options(layout="zigzag", strategy="gather"))):
        made = [transform(gm, given, options, Seat(rank, p)) for rank in range(p)]
        graphs = [with_seed(one.graph) for one in made if one.graph is not None]
        assert all("agreed_seeds" in short(graph.graph) for graph in graphs), "the ranks are to compare their seeds"
        for found in run_on_threads(p, lambda mesh, graphs=graphs: values_and_gradients(graphs[mesh.rank], given)):  # type: ignore[misc]
            assert not difference(expected, found, 1e-10)
