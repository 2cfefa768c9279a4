"""Values that no input reaches are computed while a program is compiled, if they are small."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.ir import constants
from ringopt.ir.nodes import outputs_of


def test_the_largest_value_that_is_computed() -> None:
    """Of 4 elements where that is the bound; one of 5 is not, nor a small one that is made of it."""
    gm = make_fx(lambda: (torch.arange(4) * 2, torch.arange(5), torch.arange(5)[:2]), tracing_mode="fake")()
    with patch.object(constants, "LARGEST", 4):
        found = constants.Constants(gm.graph, {})
        small, large, part = map(found.get, outputs_of(gm.graph))
    assert small is not None and small.tolist() == [0, 2, 4, 6]
    assert large is None and part is None
