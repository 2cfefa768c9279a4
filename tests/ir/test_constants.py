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


def test_one_of_several_results_is_as_constant_as_what_they_are_made_of() -> None:
    gm = make_fx(lambda x: (torch.arange(6).split(2)[1] + 0, x.split(2)[1] + 0), tracing_mode="fake")(torch.ones(6))
    constant, other = map(constants.Constants(gm.graph, {}).get, outputs_of(gm.graph))
    assert constant is not None and constant.tolist() == [2, 3] and other is None


def test_a_function_that_is_no_operator_of_torch_is_not_called() -> None:
    """It may draw random numbers, or ask for something else."""
    graph = torch.fx.Graph()
    made = graph.call_function(torch.rand, (2,))
    made.meta["val"] = torch.ones(2)
    assert made not in constants.Constants(graph, {})
