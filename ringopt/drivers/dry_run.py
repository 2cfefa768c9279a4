"""The backend without a compiler: a model's graphs go through the passes, and what they return is zeros that take no
memory. Python between graphs does run, and so do graphs of integers alone, by which Python may go on, as by the sizes
of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx

from ringopt.distributed.mesh import Mesh
from ringopt.drivers.compile import transform
from ringopt.drivers.compiled import Compiled
from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.errors import RingError
from ringopt.frontend.data_sizes.assertions import take_assertions
from ringopt.frontend.data_sizes.traced_again import (
    trace_with_breaks,
    trace_with_sizes,
    traces_sizes,
)
from ringopt.frontend.higher_order.associative_scan import keeps_associative_scans
from ringopt.frontend.higher_order.scan import leave_loops
from ringopt.frontend.loops.rolled import rolls_loops, trace_loops_as_written
from ringopt.options import Options
from ringopt.runtime.crossing import remembering
from ringopt.torch_compat.dynamo import BackendCompilerFailed
from ringopt.torch_compat.dynamo_attributes import followed_by, with_attributes_as_inputs
from ringopt.torch_compat.dynamo_memory import traced_apart

teach_dynamo()


class DryRun:
    """`graphs` has what became of each graph of the models that were called, in order. How `torch.compile` is to treat
    sizes is `dynamic`. Nothing of a dry run is remembered: one rank may have made it alone."""

    def __init__(self, options: Options, mesh: Mesh, dynamic: bool | None = None):
        self.options, self.mesh, self.dynamic = options, mesh, dynamic
        self.graphs: list[Compiled] = []

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises what the passes raise, and what the model does."""
        with traced_apart(self.mesh.size):
            torch.compile(model, backend=self.backend, dynamic=self.dynamic)(*args, **kwargs)  # type: ignore[no-untyped-call]

    @traces_sizes(lambda: True)
    @keeps_associative_scans
    @rolls_loops
    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., tuple[Any, ...]]:
        gm, held = with_attributes_as_inputs(gm)
        example_inputs = [*example_inputs, *held]
        outputs = [_example_of(node) for node in gm.graph.output_node().args[0]]
        take_assertions(gm)
        trace_with_sizes(gm, self.mesh.size)
        made = transform(gm, example_inputs, self.options, self.mesh)
        if made.graph is None:
            trace_loops_as_written(gm, "its graph stays as it is")
            trace_with_breaks(gm)
        else:
            leave_loops(made.graph)
        self.graphs.append(made)
        if not any(_has_fractions(value) for value in (*example_inputs, *outputs)):
            return followed_by(lambda *inputs: gm(*inputs)[: len(outputs)], held)
        return remembering(lambda *_inputs: tuple(hollow(value) for value in outputs), made.gathered)


@contextmanager
def errors_of_passes() -> Iterator[None]:
    """What a pass raises for whoever compiles, without what Dynamo says around it."""
    try:
        yield
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, RingError):
            raise failed.inner_exception from None
        raise


def _example_of(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _has_fractions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def hollow(value: Any) -> Any:
    """A tensor of zeros in the place of a fake one: one element, expanded."""
    if not isinstance(value, torch.Tensor):
        return value
    zeros = torch.zeros((), dtype=value.dtype, device=value.device).expand([int(size) for size in value.shape])
    return zeros.requires_grad_(value.requires_grad)
