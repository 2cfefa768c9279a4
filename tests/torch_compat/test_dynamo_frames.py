"""Frames of which Dynamo makes no graph, for it ends one in a loop or in a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo import convert_frame
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase

from ringopt.torch_compat.dynamo_frames import NoGraph, of_frames_without_graph


def in_a_loop(x: torch.Tensor, turns: int) -> torch.Tensor:
    for _ in range(turns):
        x = x.sin()
        torch._dynamo.graph_break()
    return x.cos()


def in_a_block(x: torch.Tensor, turns: int) -> torch.Tensor:
    try:
        x = x.sin() * turns
        torch._dynamo.graph_break()
    finally:
        x = x.cos()
    return x


def before_the_rest(x: torch.Tensor, turns: int) -> torch.Tensor:
    x = x.sin() * turns
    torch._dynamo.graph_break()
    return x.cos()


@pytest.mark.parametrize(
    "program, expected", [(in_a_loop, [(3, True)]), (in_a_block, [(3, False)]), (before_the_rest, [])]
)
def test_a_frame_without_a_graph_is_heard_of(
    program: Callable[..., torch.Tensor], expected: list[tuple[int, bool]]
) -> None:
    kind, root = InstructionTranslatorBase, InstructionTranslator
    heard = list[NoGraph]()

    def warn(found: NoGraph, _backends: Any) -> None:
        heard.append(found)

    with (
        patch.object(convert_frame, "trace_frame", convert_frame.trace_frame),
        patch.object(kind, "raise_loop_graph_break", kind.raise_loop_graph_break),
        patch.object(root, "run", root.run),
    ):
        of_frames_without_graph(lambda backends: True, warn)
        torch._dynamo.reset()
        given = torch.ones(2)
        assert torch.allclose(torch.compile(program, backend="eager")(given, 2), program(given, 2))
    assert [(found.line - program.__code__.co_firstlineno, found.in_loop) for found in heard] == expected
    for found in heard:
        assert found.code is program.__code__ and isinstance(found.error, torch._dynamo.exc.Unsupported)
        assert len(found.graph.find_nodes(op="call_method", target="sin")) == 1
