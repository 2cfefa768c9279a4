"""Graph breaks in loops, behind which Dynamo makes no graph of a frame."""

from __future__ import annotations

from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import convert_frame
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from ringopt.torch_compat import dynamo


def test_a_frame_that_breaks_in_a_loop_is_heard_of() -> None:
    kind = InstructionTranslatorBase
    heard: list[tuple[str, int, int, str]] = []

    def warn(code: CodeType, line: int, graph: torch.fx.Graph, error: Exception, _backends: Any) -> None:
        traced = len(graph.find_nodes(op="call_method"))
        heard.append((code.co_name, line - code.co_firstlineno, traced, type(error).__name__))

    with (
        patch.object(convert_frame, "trace_frame", convert_frame.trace_frame),
        patch.object(kind, "raise_loop_graph_break", kind.raise_loop_graph_break),
    ):
        dynamo.of_breaks_in_loops(lambda backends: True, warn)

        def program(x: torch.Tensor, turns: int) -> torch.Tensor:
            for _ in range(turns):
                x = x.sin()
                torch._dynamo.graph_break()
            return x.cos()

        torch._dynamo.reset()
        given = torch.ones(2)
        assert torch.allclose(torch.compile(program, backend="eager")(given, 2), program(given, 2))
        assert heard == [("program", 3, 1, "Unsupported")]
