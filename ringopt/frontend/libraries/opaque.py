"""A recurrence of a library, hidden from Dynamo, as an operator `ringopt_kernels::name`: the graph stays whole.

    o, last = chunk_gla(q, k, v, g)      ->      o, last = ringopt_kernels::chunk_gla(q, k, v, g, None, ...)

The operator calls the library's function, so numbers are its own. Its backward computes the forward again, with a graph
of autograd: no function says which tensors its backward needs. Its rule says how the state goes from token to token, so
ranks share it (ringopt/sharding/kernel_scans.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringopt.rules.declare import REGISTRY, SHIPPED, Decide, rule
from ringopt.scans.kernel import FUNCTIONS
from ringopt.torch_compat.autograd import recording
from ringopt.torch_compat.dynamo import not_traced

LIBRARY = "ringopt_kernels"


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
        define(scan)
    ORIGINALS[scan.name] = original
    return getattr(getattr(torch.ops, LIBRARY), scan.name).default


def define(scan: LibraryScan) -> None:
    """Its operator."""

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = {**dict(zip(scan.names, args, strict=False)), **kwargs}
        passed = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        passed = {name: x for name, x in passed.items() if x is not None and x is not False}
        out, last = ORIGINALS[scan.name](**passed, **{scan.asked: True})
        return out.contiguous(), last.contiguous()

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        return scan.fake(**dict(zip(scan.names, args, strict=True)))

    def again(grads: list[Tensor], wanted: list[int], *args: Any) -> list[Tensor]:
        with recording():
            leaves = [x.detach() if isinstance(x, Tensor) else x for x in args]
            learned = [leaves[at].requires_grad_() for at in wanted]
            found = [(x, grad.to(x.dtype)) for x, grad in zip(run(*leaves), grads, strict=True) if x.requires_grad]
            if not found:  # a kernel without a backward
                return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in learned]
            results, given = zip(*found, strict=True)
            how = {"allow_unused": True, "materialize_grads": True}
            return [x.contiguous() for x in torch.autograd.grad(results, learned, given, **how)]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.values = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.tensors = [at for at, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(*(inputs[at] for at in ctx.tensors))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        args = list(ctx.values)
        for at, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            args[at] = x
        wanted = [at for at, x in enumerate(args) if ctx.needs_input_grad[at] and x.is_floating_point()]
        found = dict(zip(wanted, behind(list(grads), wanted, *args), strict=True))
        return tuple(found.get(at) for at in range(len(args)))

    name = f"{LIBRARY}::{scan.name}"
    both = {"mutates_args": ()}
    op = torch.library.custom_op(name, run, **both, schema=f"({scan.schema}) -> (Tensor, Tensor)")
    back = f"(Tensor[] grads, int[] wanted, {scan.schema}) -> Tensor[]"
    behind = torch.library.custom_op(f"{name}_backward", again, **both, schema=back)
    op.register_fake(fake)
    behind.register_fake(lambda grads, wanted, *args: [args[at].new_empty(args[at].shape) for at in wanted])
    op.register_autograd(backward, setup_context=setup)
    FUNCTIONS[f"{name}.default"] = run
    with REGISTRY.filling(SHIPPED):
        rule(name)(scan.says)
