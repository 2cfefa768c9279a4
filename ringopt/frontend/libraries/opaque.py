"""A recurrence of a library, hidden from Dynamo, as an operator `ringopt_kernels::name`: the graph stays whole.

    o, last = chunk_gla(q, k, v, g)      ->      o, last = ringopt_kernels::chunk_gla(q, k, v, g, None, ...)

The operator calls the library's function, so numbers are its own. Its rule says how the state goes from token to token,
so ranks share it (ringopt/sharding/recurrences/kernel_scans.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ringopt.frontend.libraries.operators import LIBRARY, define, defined
from ringopt.rules.declare import Decide
from ringopt.scans.kernel import FUNCTIONS
from ringopt.torch_compat.dynamo_calls import not_traced


@dataclass(frozen=True)
class LibraryScan:
    """A function of a library, by what of its arguments is known here; one that is called with others is left to it.

    module   where programs take it from
    tensors  tensor arguments; those that end in ? may be None
    values   others, each with its type in a schema. None and False are not passed on, so a release of the library that
             has no such argument serves calls without it
    asked    the argument that asks for the last state
    alone    whether the function gives its result alone, where it is not asked for the last state
    fake     of the tensors, by name: shapes and dtypes of the result and the last state
    says     of the operator's arguments, by name: the rule
    """

    module: str
    name: str
    tensors: tuple[str, ...]
    values: dict[str, str]
    asked: str
    fake: Callable[..., tuple[Tensor, Tensor]]
    says: Decide
    alone: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the operator's arguments."""
        return (*(name.rstrip("?") for name in self.tensors), *self.values)

    @property
    def schema(self) -> str:
        tensors = [f"Tensor{'?' * name.endswith('?')} {name.rstrip('?')}" for name in self.tensors]
        return ", ".join([*tensors, *(f"{kind} {name}" for name, kind in self.values.items())])

    def form(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What Dynamo traces in the place of the library's function."""
        op = operator_for(self, original)
        positions, known, names = tuple(inspect.signature(original).parameters), {*self.names, self.asked}, self.names
        untraced, asked, alone = not_traced(original), self.asked, self.alone

        def traced(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(positions, args))  # noqa: B905  (fewer arguments than parameters)
            given.update(kwargs)
            if [name for name, x in given.items() if name not in known and x is not None and x is not False]:
                return untraced(*args, **kwargs)
            out, last = op(*[given.get(name) for name in names])
            if given.get(asked):
                return out, last
            return out if alone else (out, None)

        return traced


# What the operators call, by their names: a library may be loaded again.
ORIGINALS: dict[str, Callable[..., Any]] = {}


def operator_for(scan: LibraryScan, original: Callable[..., Any]) -> Any:
    """The operator that calls `original`, with its gradient and its rule; it is defined once."""
    if scan.name not in ORIGINALS:
        define_scan(scan)
    ORIGINALS[scan.name] = original
    return defined(scan.name)


def define_scan(scan: LibraryScan) -> None:
    """Its operator."""

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = {**dict(zip(scan.names, args, strict=False)), **kwargs}
        passed = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        passed = {name: x for name, x in passed.items() if x is not None and x is not False}
        out, last = ORIGINALS[scan.name](**passed, **{scan.asked: True})
        return out.contiguous(), last.contiguous()

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        return scan.fake(**dict(zip(scan.names, args, strict=True)))

    define(scan.name, scan.schema, 2, run, fake, scan.says)
    FUNCTIONS[f"{LIBRARY}::{scan.name}.default"] = run
