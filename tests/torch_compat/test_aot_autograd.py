"""AOTAutograd, asked for its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from ringopt.torch_compat.aot_autograd import (
    aot_module_simplified,
    is_of_backward,
    mark_boxed,
    min_cut_rematerialization_partition,
    patched,
)
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.tracing import TracingContext, tracing


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_is_split_in_forward_and_backward(training: bool) -> None:
    split: list[fx.GraphModule] = []
    alone: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        assert {"cos"} <= {node.name for node in joint.graph.nodes if is_of_backward(node)}.difference({"sin", "exp"})
        parts = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)
        split.extend(parts)
        return parts

    def compiled(gm: Any, _inputs: Sequence[Any]) -> Any:
        alone.append(gm)
        return lambda *_: None

    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(3, requires_grad=training))
    with mode:
        flat = make_fx(lambda x: (x.sin().exp(),), tracing_mode="real", pre_dispatch=True)(x)
    with tracing(TracingContext(mode)):
        aot_module_simplified(flat, [x], compiled, compiled, partition, decompositions={}, inference_compiler=compiled)
    if training:
        forward, backward = (gm.code for gm in split)
        assert "exp" in forward and "cos" in backward
    else:
        assert not split and "exp" in alone[0].code


def test_settings_and_their_end() -> None:
    from torch._functorch import config

    before = config.enable_autograd_cache
    with patched(enable_autograd_cache=not before):
        assert config.enable_autograd_cache != before
    assert config.enable_autograd_cache == before


def test_a_function_of_one_list_is_given_one() -> None:
    given: list[Any] = []

    def compiler(gm: fx.GraphModule, _inputs: Any) -> Any:
        def run(arguments: list[Tensor]) -> Any:
            given.append(list(arguments))
            return gm(*arguments)

        return mark_boxed(run)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, compiler)

    found = torch.compile(lambda x, y: x + y, backend=backend)(torch.ones(2), torch.ones(2))
    assert torch.equal(found, torch.full((2,), 2.0)) and len(given[0]) == 2
