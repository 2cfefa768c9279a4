"""What torch notes of the compilation that goes on. Light: nothing of Dynamo is imported."""

from __future__ import annotations

from torch._compile import _disable_dynamo
from torch._guards import CompileContext, TracingContext, tracing
from torch._logging import trace_structured

__all__ = ["TracingContext", "compilation_of_frame", "disable_dynamo", "trace_structured", "tracing"]

# TracingContext(mode): of one graph between Dynamo and its compiler; try_get() is that of now or None, with fake_mode.
# tracing(context): a context in which it, or with None none, is that of now.
# trace_structured(kind, metadata_fn, payload_fn=): a record for TORCH_TRACE, asked for only where that is on.

# A decorator: Dynamo never traces the function, nor what it calls; it imports Dynamo when the function is first called.
disable_dynamo = _disable_dynamo


def compilation_of_frame() -> int | None:
    """How many times the frame that is being compiled was compiled before; None where nothing is."""
    current = CompileContext.current_compile_id()
    return current.frame_compile_id if current is not None else None
