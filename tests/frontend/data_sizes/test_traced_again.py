"""A frame that is traced once more, with the sizes that data decide, comes to an end whatever a compiler asks for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

import ringopt
from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.frontend.data_sizes.traced_again import trace_with_sizes, traces_sizes
from tests.harness.models import difference, run


def positive(x: Tensor, y: Tensor) -> Tensor:
    """In a function of its own, where Dynamo traces what calls it twice to find the graph break."""
    return y + x[x > 1].sum()


def program(x: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(positive(x, x * 2), slope)


def test_a_number_that_becomes_a_constant_has_the_frame_traced_with_sizes_still() -> None:
    """From its second value on, Dynamo leaves the slope open, and AOTAutograd has it traced again with a constant in
    its place. That began anew, without sizes, for ever."""
    compiled: list[fx.GraphModule] = []

    @traces_sizes(lambda: True)
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        trace_with_sizes(gm, 2)
        compiled.append(gm)
        assert len(compiled) < 10
        return aot_eager(gm, inputs)

    teach_dynamo()
    torch._dynamo.reset()
    compiled_program, x = torch.compile(program, backend=backend), torch.tensor([[0.5, 2.0], [-1.0, -3.0]])
    for slope in (0.5, 0.25, 0.125):
        assert torch.equal(compiled_program(x, slope), program(x, slope))
    assert len(compiled) == 5  # two of them were given up for one with a constant


class InChunks(nn.Module):
    """Attention within chunks of 4 tokens, which are counted by torch.div, as in Longformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        count = torch.div(n, 4, rounding_mode="trunc") - 1
        q, k, v = (t.view(b, count + 1, 4, 8) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).view(b, n, 8))


def in_chunks(_: int) -> list[float]:
    model, before = InChunks().double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for n in (32, 48, 40):
        given = {"x": torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64)}
        assert difference(run(compiled, model, given), run(model, model, given)) < 1e-10
    return [report.sharded_fraction for report in ringopt.reports()[before:]]


def test_sizes_that_become_tensors_are_known_to_the_graph(ranks: Any) -> None:
    """A graph for each length; at a dynamic one Dynamo would end it where a tensor is used as a size."""
    for shares in ranks(2, in_chunks, 0):
        assert shares == [1.0, 1.0, 1.0]
