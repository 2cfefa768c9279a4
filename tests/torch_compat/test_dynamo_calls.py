"""What Dynamo traces in the place of what a program calls."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo import convert_frame
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat import dynamo
from ringopt.torch_compat.dynamo import TorchDynamoException
from ringopt.torch_compat.dynamo_calls import (
    in_the_place_of_apply,
    in_the_place_of_calls,
    not_traced,
    with_known_sizes,
)
from tests.torch_compat.test_dynamo import looking


def test_what_is_not_traced_breaks_the_graph_and_does_the_same() -> None:
    twice, x = not_traced(lambda x: 2 * x), torch.ones(3)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: twice(x + 1), backend="eager")(x), 2 * (x + 1))
    with pytest.raises(TorchDynamoException):
        torch.compile(lambda x: twice(x + 1), backend="eager", fullgraph=True)(x)


def test_another_function_is_traced_in_the_place_of_apply() -> None:
    class Doubled(torch.autograd.Function):
        known = 3

        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    in_the_place_of_apply(Doubled, lambda x: x.sin() * (Doubled.known if hasattr(Doubled, "known") else 0))
    x, seen = torch.ones(2, requires_grad=True), list[Any]()
    run = lambda x: Doubled.apply(x) if getattr(Doubled, "known", False) else x  # noqa: E731
    compiled = torch.compile(run, backend=looking(lambda gm: seen.append(gm)), fullgraph=True)
    torch.testing.assert_close(compiled(x), 3 * x.sin())
    torch.testing.assert_close(Doubled.apply(x), 2 * x)
    assert len(seen) == 1


@pytest.mark.parametrize("known", [True, False])
def test_what_comes_of_a_size_is_known(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """A graph for each length; otherwise one has breaks."""
    monkeypatch.setattr(TorchInGraphFunctionVariable, "call_function", TorchInGraphFunctionVariable.call_function)
    with_known_sizes(torch.div, lambda: known)
    torch._dynamo.reset()
    graphs = list[Any]()

    def chunks(x: torch.Tensor) -> torch.Tensor:
        count = torch.div(x.shape[0], 4, rounding_mode="trunc") - 1
        return x.view(count + 1, 4) + torch.div(x.sum(), 2)

    run = torch.compile(chunks, backend=looking(graphs.append), dynamic=True)
    for n in (16, 24):
        x = torch.arange(float(n))
        torch.testing.assert_close(run(x), chunks(x))
    assert (len(graphs) == 2 and not any(dynamo.break_reason(gm).graph_break for gm in graphs)) == known


def test_two_calls_are_traced_as_other_functions_or_neither() -> None:
    def ask(x: torch.Tensor) -> bool:
        return False

    def use(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def model(x: torch.Tensor, broken: bool) -> torch.Tensor:
        own, none = use, None  # noqa: F841
        if ask(x):
            if broken:
                torch._dynamo.graph_break()
            return own(x)
        return x - 1

    found: list[dict[str, Any]] = []

    def yes(code: Any, names: Any) -> Any:
        found.append({name: held for name, held in names.items() if held is None or held is use})
        return lambda x: True

    with (
        patch.object(convert_frame, "trace_frame", convert_frame.trace_frame),
        patch.object(UserFunctionVariable, "call_function", UserFunctionVariable.call_function),
    ):
        in_the_place_of_calls(ask, use, yes, lambda code, names: torch.neg)
        for broken, expected in ((False, -2.0), (True, 1.0)):
            torch._dynamo.reset()
            assert torch.compile(model, backend="eager")(torch.tensor(2.0), broken) == expected
    assert found[0] == {"own": use, "none": None}
