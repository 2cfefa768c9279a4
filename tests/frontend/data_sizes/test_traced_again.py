"""A frame that is traced once more, with the sizes that data decide, comes to an end whatever a compiler asks for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.frontend.data_sizes.traced_again import trace_with_sizes, traces_sizes


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
    run, x = torch.compile(program, backend=backend), torch.tensor([[0.5, 2.0], [-1.0, -3.0]])
    for slope in (0.5, 0.25, 0.125):
        assert torch.equal(run(x, slope), program(x, slope))
    assert len(compiled) == 5  # two of them were given up for one with a constant
