"""What single calls of Dynamo's graph become."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringopt.frontend.capture import capture
from tests.harness.capturing import assert_same
from tests.harness.translation import captured


@pytest.mark.parametrize(
    "give",
    [lambda y: y.set_(y.view(6).view(2, 3)), lambda y: y.set_(y.detach()), lambda y: y.set_(source=y)],
    ids=["a view", "detached", "by keyword"],
)
def test_a_tensor_that_is_given_its_own_memory_is_itself(give: Callable[[Tensor], Tensor]) -> None:
    """Not what it is given, which has no gradient here."""

    def program(x: Tensor) -> Tensor:
        y = x * 3
        with torch.no_grad():
            again = give(y)
        return again * 2

    gm, inputs = captured(program, torch.rand(2, 3, requires_grad=True))
    assert_same(capture(gm, inputs).graph, program, inputs)
