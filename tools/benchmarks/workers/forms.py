"""Who finds a spelling of attention, ringopt or Inductor, and are the numbers still those of eager?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

import ringopt
from ringopt.tools.benchmarks.lab.numbers import distance, numbers
from ringopt.tools.benchmarks.models.spellings import Spelled, inputs
from ringopt.torch_compat import aot_autograd
from ringopt.torch_compat.aot_autograd import mark_boxed
from ringopt.torch_compat.dynamo import counters
from ringopt.torch_compat.inductor import compile_fx


@dataclass(frozen=True)
class Finding:
    """`error` is relative to the largest entry, gradients included in training; None where dropout draws."""

    rewritten: bool
    error: float | None


def by_ringopt(name: str, training: bool) -> Finding:
    """Rewritten: every site that explain reports on two ranks is sharded. The numbers are those of one process."""
    model, given = program(name, training)
    report = ringopt.explain(model, *given, world_size=2)
    rewritten = bool(report.sites) and not any(site.refusal for site in report.sites)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    return Finding(rewritten, error(model, compiled, given))


def by_inductor(name: str, training: bool) -> Finding:
    """Rewritten: one of Inductor's patterns for attention matched. All its passes over the joint graph are run; the
    graphs that come of them run as they are: generated code would say the same, and takes seconds to compile."""
    model, given = program(name, training)
    counters.clear()
    # A graph from the cache would not be looked at anew.
    with aot_autograd.patched(enable_autograd_cache=False):
        far = error(model, torch.compile(model, backend=passes_of_inductor), given)
    return Finding(counters["inductor"]["fuse_attention"] > 0, far)


def program(name: str, training: bool) -> tuple[Spelled, list[Tensor]]:
    """A spelling with its inputs in float32, after everything that was compiled is forgotten."""
    torch.compiler.reset()
    return Spelled(name).train(training), inputs(name, torch.float32, requires_grad=training)


def error(model: Spelled, compiled: Callable[..., Any], given: Sequence[Tensor]) -> float | None:
    """The largest difference from eager of outputs and gradients; None where dropout draws other numbers."""
    differentiated = given if model.training else ()
    found = numbers(compiled, given, differentiated)
    draws = model.training and model.form.dropout
    return None if draws else distance(found, numbers(model, given, differentiated))


def passes_of_inductor(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """Inductor as a backend that stops before it generates code."""
    return compile_fx(graph, example_inputs, inner_compile=as_it_is)


def as_it_is(graph: fx.GraphModule, _example_inputs: Sequence[Any], **_settings: Any) -> Callable[[list[Any]], Any]:
    """In the place of Inductor's code generation; the list of arguments is emptied, as generated code does."""

    def run(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return graph(*values)

    return mark_boxed(run)  # type: ignore[no-any-return]
