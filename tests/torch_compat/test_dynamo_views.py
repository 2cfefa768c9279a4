"""The values of an OrderedDict may be held across a graph break."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ringopt.torch_compat.dynamo_views import hold_values_of_ordered_dicts
from tests.torch_compat.test_dynamo_logging import Counting


def summed(x: Tensor) -> Tensor:
    values = OrderedDict(first=x, second=x * 2).values()
    y = x + 1
    torch._dynamo.graph_break()
    for value in values:
        y = y * value
    return y


def test_the_values_of_an_ordered_dict_are_held_across_a_break() -> None:
    """As outputs of models in transformers hold them. Other values and another shape are guarded."""
    hold_values_of_ordered_dicts()
    torch._dynamo.reset()
    counting = Counting()
    compiled = torch.compile(summed, backend=counting, dynamic=False)
    for x in (torch.ones(2), torch.rand(2), torch.rand(3), torch.rand(3, dtype=torch.float64)):
        assert torch.equal(compiled(x), summed(x))
    assert counting.count == 2 * 3
