"""What torch notes of a compilation."""

from __future__ import annotations

from typing import Any

import torch

from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.tracing import (
    TracingContext,
    compilation_of_frame,
    disable_dynamo,
    trace_structured,
    tracing,
)


def test_the_context_of_now_can_be_another_or_none() -> None:
    assert TracingContext.try_get() is None
    context = TracingContext(FakeTensorMode())
    with tracing(context):
        assert TracingContext.try_get() is context and isinstance(context.fake_mode, FakeTensorMode)
        with tracing(None):
            assert TracingContext.try_get() is None


def test_compilations_of_a_frame_are_numbered() -> None:
    found: list[int | None] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        context = TracingContext.try_get()
        assert context is not None and context.fake_mode is not None
        found.append(compilation_of_frame())
        return gm

    run = torch.compile(lambda x: x.sin(), backend=backend, dynamic=False)
    run(torch.ones(2))
    run(torch.ones(3))
    assert found == [0, 1] and compilation_of_frame() is None


def test_dynamo_does_not_trace_what_is_disabled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    @disable_dynamo
    def apart(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    torch.compile(lambda x: apart(x.sin()).exp(), backend=backend)(torch.ones(2))
    assert not any("cos" in gm.code for gm in graphs) and len(graphs) == 2


def test_a_record_is_made_only_where_it_is_read() -> None:
    asked: list[str] = []

    def told() -> dict[str, str]:
        asked.append("metadata")
        return {}

    trace_structured("artifact", told, payload_fn=lambda: "text")
    assert len(asked) <= 1
