"""Who finds a spelling of attention, ringopt or Inductor, and are the numbers still those of eager?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

import ringopt
from ringopt.tools.benchmarks.lab.numbers import distance, numbers
from ringopt.tools.benchmarks.models.spellings import Spelled, inputs


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
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    return Finding(rewritten, error(model, compiled, given))


def by_inductor(name: str, training: bool) -> Finding:
    """Rewritten: one of Inductor's patterns for attention matched. All its passes over the joint graph are run; the
    graphs that come of them run as they are: generated code would say the same, and takes seconds to compile."""
    model, given = program(name, training)
    counters.clear()
    # A graph from the cache would not be looked at anew.
    with functorch.patch(enable_autograd_cache=False):
        far = error(model, torch.compile(model, backend=passes_of_inductor), given)
    return Finding(counters["inductor"]["fuse_attention"] > 0, far)


def program(name: str, training: bool) -> tuple[Spelled, list[Tensor]]:
    torch._dynamo.reset()
    return Spelled(name).train(training), inputs(name, torch.float32, requires_grad=training)


def error(model: Spelled, compiled: Callable[..., Any], given: Sequence[Tensor]) -> float | None:
    differentiated = given if model.training else ()
    found = numbers(compiled, given, differentiated)
    draws = model.training and model.form.dropout
    return None if draws else distance(found, numbers(model, given, differentiated))


def passes_of_inductor(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return compile_fx(graph, example_inputs, inner_compile=as_it_is)  # type: ignore[arg-type, return-value]


def as_it_is(graph: fx.GraphModule, _example_inputs: Sequence[Any], **_settings: Any) -> Callable[[list[Any]], Any]:
    """In the place of Inductor's code generation; the list of arguments is emptied, as generated code does."""

    def run(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return graph(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
