"""torch.nn's recurrent layers in a trace of Dynamo, which refuses them as it is configured.

Dynamo would keep a call of `torch.lstm` in its graph, and compilers below would unroll it, step by step. A frame in
which it is called for packed sequences is traced as Dynamo is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch._dynamo import config, convert_frame
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat.dynamo import TraceOtherwise, forget, wrapped_in
from ringopt.torch_compat.dynamo_memory import Remembered

__all__ = ["trace_recurrent_layers"]

GIVEN = 9  # arguments of torch.lstm and its like; of packed sequences they are others, and as many


class NoForm(Exception):
    """A call that is given something else than its form."""


def trace_recurrent_layers(
    forms: Mapping[Callable[..., Any], Callable[..., Any]], when: Callable[[Iterator[Any]], bool]
) -> None:
    """From here on, where `when(backends)`: Dynamo traces `torch.nn.LSTM` and its like, and `forms` in the place of the
    functions of torch that they call. Without effect where this torch has no such function."""
    trace = getattr(convert_frame, "trace_frame", None)
    if trace is None:
        return
    kind: Any = TorchInGraphFunctionVariable
    call, within, left = kind.call_function, set[CodeType](), Remembered(WeakSet[CodeType])

    @wraps(trace)
    def traced(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        if code in left() or not when(wrapped_in(next(filter(callable, args), None))):
            return trace(code, *args, **kwargs)
        within.add(code)
        try:
            with config.patch(allow_rnn=True):
                return trace(code, *args, **kwargs)
        except NoForm as found:
            left().add(code)
            forget(args)
            raise TraceOtherwise from found
        finally:
            within.discard(code)

    @wraps(call)
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        form = forms.get(self.value) if tx.output.root_tx.f_code in within else None
        if form is None:
            return call(self, tx, args, kwargs)
        if len(args) != GIVEN or not args[3].is_python_constant():  # whether there are biases
            raise NoForm(self.value)
        return VariableTracker.build(tx, form).call_function(tx, args, kwargs)

    convert_frame.trace_frame, kind.call_function = traced, called
