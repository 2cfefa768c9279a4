"""Recurrent layers are traced, in another form, for the backends that want it, and for no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._dynamo import convert_frame
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat.dynamo_recurrent import trace_recurrent_layers

SEEN = list[Any]()


def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
    SEEN.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
    return gm


def other(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return backend(gm, inputs)


def doubled(x: Tensor, before: Tensor, *_settings: Any) -> tuple[Tensor, Tensor]:
    return x * 2, before


def test_a_form_is_traced_for_the_backend_that_wants_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_frame, "trace_frame", convert_frame.trace_frame)
    kind: Any = TorchInGraphFunctionVariable
    monkeypatch.setattr(kind, "call_function", kind.call_function)
    trace_recurrent_layers({torch.gru: doubled}, lambda backends: backend in list(backends))
    layer, x = nn.GRU(4, 4, batch_first=True), torch.randn(2, 3, 4)
    for asked, expected in ((backend, 2 * x), (other, layer(x)[0]), (backend, 2 * x)):
        SEEN.clear()
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(layer, backend=asked)(x)[0], expected)
        assert torch.gru not in SEEN and bool(SEEN) == (asked is backend)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):  # as a program may set it for itself
        torch.testing.assert_close(torch.compile(layer, backend=other)(x)[0], layer(x)[0])
    assert torch.gru in SEEN
