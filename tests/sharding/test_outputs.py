"""How outputs that stay on their ranks are spread, where the length is open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.drivers.compile import transform
from ringopt.drivers.compiled import Compiled
from ringopt.options import Options, Outputs
from tests.harness.translation import Seat


def compiled_at_any_length(form: Outputs) -> Compiled:
    """Attention over 12 tokens, for rank 0 of 2."""
    made: list[Compiled] = []

    def backend(gm: Any, inputs: Any) -> Any:
        made.append(transform(gm, inputs, Options(outputs=form), Seat(0, 2)))
        return gm.forward

    def program(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=True)(torch.randn(1, 2, 12, 4))
    return made[0]


@pytest.mark.parametrize("form", ["lazy", "local"])
def test_rows_that_are_given_away_are_of_the_length_at_hand(form: Outputs) -> None:
    """A lazy tensor reaches as far as each call says; rows that the program gets of it are so many."""
    made = compiled_at_any_length(form)
    (how,) = (made.left if form == "lazy" else made.local).values()
    if form == "lazy":
        assert how.size[2] == how.placement.length and not isinstance(how.placement.length, int)  # a formula
    else:
        assert how.size == (1, 2, 12, 4) and type(how.placement.length) is int


def test_an_output_outside_any_module_is_named_with_its_line() -> None:
    (how,) = compiled_at_any_length("lazy").left.values()
    assert "(attention, test_outputs.py:" in how.name
