"""Messages of a program to a logger, and its warnings, while Dynamo traces it."""

from __future__ import annotations

import warnings
from functools import cache, wraps
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable

__all__ = ["log_while_tracing", "warn_while_tracing"]

# Of the standard library, and those that transformers adds.
MESSAGES = frozenset(
    {"debug", "info", "warning", "warn", "error", "critical", "log", "warning_once", "info_once", "warning_advice"}
)

_logged: set[tuple[str, ...]] = set()


@cache
def log_while_tracing() -> None:
    """From now on a message whose words are known is logged when Dynamo traces it, and then once in a process (a frame
    is traced several times), where Dynamo would end the graph there. One with values that are not is left to Dynamo."""
    original = LoggingLoggerVariable.call_method

    @wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not tx.export and name in MESSAGES:
            try:
                words, named = values_of(args, kwargs)
            except (NotImplementedError, Unsupported):
                return original(self, tx, name, args, kwargs)
            message = self.value.name, name, repr(words), repr(named)
            if message not in _logged:
                _logged.add(message)
                getattr(self.value, name)(*words, **named)
            return ConstantVariable.create(None)
        return original(self, tx, name, args, kwargs)

    LoggingLoggerVariable.call_method = call_method  # type: ignore[method-assign]


@cache
def warn_while_tracing() -> None:
    """The same of `warnings.warn`: Python shows a warning once for its line, and some programs warn on one rank only.
    One that a filter makes an error is left to Dynamo."""
    original = SkipFunctionVariable.call_function

    @wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is not warnings.warn or tx.export:
            return original(self, tx, args, kwargs)
        try:
            words, named = values_of(args, kwargs)
            warn_from(tx, *words, **named)
        except (NotImplementedError, Unsupported, Warning, TypeError):
            return original(self, tx, args, kwargs)
        return ConstantVariable.create(None)

    SkipFunctionVariable.call_function = call_function  # type: ignore[method-assign]


def values_of(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """What Dynamo knows the arguments of a call to be. Raises NotImplementedError or Unsupported where it does not."""
    return [arg.as_python_constant() for arg in args], {key: arg.as_python_constant() for key, arg in kwargs.items()}


def warn_from(
    tx: Any, message: str, category: type[Warning] = UserWarning, stacklevel: int = 1, source: Any = None
) -> None:
    """`warnings.warn` in the frame that `tx` traces, or one of its callers that it traces too."""
    for _ in range(stacklevel - 1):
        tx = getattr(tx, "parent", None) or tx
    registry = tx.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, tx.f_code.co_filename, tx.lineno, registry=registry, source=source)
