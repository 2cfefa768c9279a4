"""torch.nn's recurrent layers in a trace of Dynamo, which refuses them as it is configured.

Dynamo would keep a call of `torch.lstm` in its graph, and compilers below would unroll it, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from torch._dynamo import config, convert_frame
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat.dynamo import wrapped_in

__all__ = ["trace_recurrent_layers"]


def trace_recurrent_layers(
    forms: Mapping[Callable[..., Any], Callable[..., Any]], when: Callable[[Iterator[Any]], bool]
) -> None:
    """From here on, where `when(backends)`: Dynamo traces `torch.nn.LSTM` and its like, and `forms` in the place of the
    functions of torch that they call. Without effect where this torch has no such function."""
    trace = getattr(convert_frame, "trace_frame", None)
    if trace is None:
        return
    kind: Any = TorchInGraphFunctionVariable
    call = kind.call_function

    @wraps(trace)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not when(wrapped_in(next(filter(callable, args), None))):
            return trace(*args, **kwargs)
        with config.patch(allow_rnn=True):
            return trace(*args, **kwargs)

    @wraps(call)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        form = forms.get(self.value) if config.allow_rnn else None
        if form is None:
            return call(self, tx, args, kwargs)
        return VariableTracker.build(tx, form).call_function(tx, args, kwargs)

    convert_frame.trace_frame, kind.call_function = traced, called
