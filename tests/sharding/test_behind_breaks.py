"""Which inputs of a graph before or behind a graph break are cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.calls import OpCall
from ringopt.ir.nodes import op_name
from ringopt.sharding.behind_breaks import above_products
from tests.harness.lengths import run_over
from tests.harness.translation import validate
from tests.sharding.handlers.test_mixing import ROWS, WIDTH, given, pictures


def test_what_products_read_is_above_them_and_nothing_else() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), (y.cos() @ w).exp()

    graph = make_fx(program, tracing_mode="fake")(torch.ones(6, 4), torch.ones(6, 4), torch.ones(4, 3)).graph
    assert [node.name for node in graph.nodes if node in above_products(graph)] == ["y_1", "w_1", "cos", "mm"]


@pytest.mark.parametrize(
    "shape, dim", [((3, ROWS, WIDTH), 1), ((40, 3, WIDTH), 0), ((ROWS, WIDTH), 0), ((2, 50, 40, WIDTH), 2)]
)
def test_rows_that_layers_keep(shape, dim):
    """The innermost dim that gives every rank enough of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).double()
    verdict = validate(2, model, torch.randn(shape, dtype=torch.float64, requires_grad=True))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    (cut,) = (node for node in verdict.graph.graph.nodes if op_name(node) == "scatter")
    assert OpCall.of(cut)["dim"] == dim
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_a_head_behind_a_break():
    """Its loss is summed over the ranks, and nothing of its logits is gathered."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 17).double()
    loss = lambda x, labels: F.cross_entropy(head(x).flatten(0, 1), labels.flatten())  # noqa: E731
    verdict = validate(3, loss, given(), torch.randint(17, (2, ROWS)))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0 and verdict.report.gathers == ()


@torch.library.custom_op("mixing::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1)


opaque.register_fake(torch.empty_like)


LAYER = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)

SAY_NOTHING = {
    "beside an opaque operator, which may be an attention": lambda x: LAYER(x) + opaque(LAYER(x)),
    "beside an attention that is refused": lambda x: LAYER(x) + refused(LAYER(x)),
    "products of activations": lambda x: F.linear(x[0], x[1]),
}


@pytest.mark.parametrize("name", SAY_NOTHING)
def test_layers_that_say_nothing(name):
    verdict = validate(2, SAY_NOTHING[name], given().detach())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 0.0


def refused(x):
    """Fewer queries and keys than ranks."""
    few = x[:, :1]
    return F.scaled_dot_product_attention(few, few, few)


class Counted(nn.Module):
    """A break between convolutions, over which a size goes too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv1d(3, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, 3, 3, padding=1)
        self.double()

    def forward(self, x):
        n, x = x.shape[2] + 1, self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(x) / n


def test_a_graph_that_returns_a_size():
    reports = run_over(Counted(), [(pictures((2, 3, rows)),) for rows in (14, 19)], 2).reports
    assert not any(report.refusal for report in reports) and all(report.sharded_fraction == 1 for report in reports)
