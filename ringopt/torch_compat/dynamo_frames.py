"""Frames of which Dynamo makes no graph: it ends one where it cannot go on behind (a loop, a `with` block), and what it
has traced of the frame is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import CodeType
from typing import Any

import torch.fx as fx
from torch._dynamo import convert_frame
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase

from ringopt.torch_compat.dynamo import wrapped_in

__all__ = ["NoGraph", "of_frames_without_graph"]


@dataclass(frozen=True)
class NoGraph:
    """The line at which a frame of `code` ended, or that of the loop in which it did, what was traced, and why."""

    code: CodeType
    line: int
    graph: fx.Graph
    error: Exception
    in_loop: bool


def of_frames_without_graph(
    when: Callable[[Iterator[Any]], bool], warn: Callable[[NoGraph, Iterator[Any]], None]
) -> None:
    """From here on, where `when(backends)` and Dynamo makes no graph of a frame: `warn(found, backends)`. What it
    raises comes as what a backend raises. Without effect where this torch has no such function."""
    kind: Any = InstructionTranslatorBase
    root: Any = InstructionTranslator
    give_up, run, trace = kind.raise_loop_graph_break, root.run, getattr(convert_frame, "trace_frame", None)
    ended = dict[CodeType, NoGraph]()
    if trace is None:
        return

    def noted(tx: Any, error: Exception, in_loop: bool) -> None:
        ended.setdefault(tx.f_code, NoGraph(tx.f_code, tx.lineno, tx.output.graph, error, in_loop))

    def in_loop(code: CodeType, error: Exception) -> None:
        noted(InstructionTranslator.current_tx(), error, True)
        give_up(code, error)

    @wraps(run)
    def running(self: Any) -> Any:
        try:
            return run(self)
        except TorchDynamoException as error:
            noted(self, error, False)
            raise

    @wraps(trace)
    def traced(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        ended.clear()
        try:
            return trace(code, *args, **kwargs)
        except TorchDynamoException as error:
            backend = next(filter(callable, args), None)
            if code in ended and getattr(error, "skip_frame", False) and when(wrapped_in(backend)):
                try:
                    warn(ended[code], wrapped_in(backend))
                except Exception as refused:
                    raise BackendCompilerFailed(backend, refused, None) from refused  # as what a backend raises
            raise
        finally:
            ended.clear()

    kind.raise_loop_graph_break, root.run, convert_frame.trace_frame = staticmethod(in_loop), running, traced
