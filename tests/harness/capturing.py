"""Captured graphs for tests: the graph a module has after capture and some passes, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.distributed.lookup import mesh_of
from ringopt.frontend.capture import capture
from ringopt.frontend.dynamic_shapes import shape_env_of
from ringopt.ir.nodes import op_name
from ringopt.options import Options
from ringopt.passes import with_options
from ringopt.pipeline import Context, Pass, Pipeline


def after(
    passes: Sequence[Pass], module: Any, *args: Any, ranks: int = 1, dynamic: bool | None = None, **options: Any
) -> tuple[fx.GraphModule, Context]:
    """The first graph Dynamo captures of `module(*args)`, after `passes`; `args` may end in a dict of keywords."""
    found: list[tuple[fx.GraphModule, Context]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        chosen = Options(**options)
        context = Context(chosen, mesh_of(f"pretend:0/{ranks}"))
        flat = capture(gm, inputs, shape_env_of(gm)).begin(context)
        Pipeline(with_options(passes, chosen)).run(flat, context)
        found.append((flat, context))
        flat.meta["inputs"] = inputs
        return gm.forward

    torch._dynamo.reset()
    kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
    torch.compile(module, backend=backend, dynamic=dynamic)(*(args[: len(args) - bool(kwargs)]), **kwargs)
    return found[0]


def ops(gm: fx.GraphModule) -> list[str]:
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def results(run: Any, inputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """Outputs and gradients of all inputs, on copies of them."""
    copies = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    outputs = run(*copies)
    outputs = [out for out in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if out is not None]
    differentiable = [out for out in outputs if out.requires_grad]
    torch.autograd.backward(
        differentiable, [torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(out) for out in differentiable]
    )
    return [out.detach() for out in outputs] + [getattr(x, "grad", None) for x in copies] + [
        x.detach() if isinstance(x, torch.Tensor) else None for x in copies
    ]  # fmt: skip


def largest_error(run: Any, module: torch.nn.Module, x: torch.Tensor) -> float:
    """Of outputs, and of the gradients of `x` and of all parameters, from those of `module` itself."""
    of_both = []
    for each in (run, module):
        module.zero_grad()
        of_both.append([*results(each, [x]), *(weight.grad for weight in module.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*of_both, strict=True))


def assert_same(run: Any, reference: Any, inputs: Sequence[Any]) -> None:
    """Same bits: outputs, gradients, and inputs after the call."""
    for found, expected in zip(results(run, inputs), results(reference, inputs), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
