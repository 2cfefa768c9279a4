"""Functions of which Dynamo makes no graph because it breaks in a loop of theirs: what they compute themselves runs on
every rank, whole, and is told of.

    def forward(self, x):
        for layer in self.layers:
            x = attend(layer, x)           no graph has it, though it was traced
            if x.isnan().any(): ...        Dynamo ends its graph here, and goes on with none in a loop

What such a function calls has graphs of its own, so nothing is to be said of one that only calls its layers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from types import CodeType
from typing import Any

import torch.distributed as dist
import torch.fx as fx

from ringopt.dims.contraction_rules import PRODUCTS
from ringopt.dims.op_families import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from ringopt.drivers.announce import refuse
from ringopt.errors import first_line
from ringopt.frontend.data_sizes.traced_again import takes_sizes
from ringopt.ir.nodes import called_name, program_line
from ringopt.options import with_defaults
from ringopt.output.printable import logger
from ringopt.torch_compat.dynamo import of_breaks_in_loops

log = logger(__name__)

WORK = {*PRODUCTS, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, "scaled_dot_product_attention"}


def warn_of_breaks_in_loops() -> None:
    """For all that is traced in this process from here on."""
    of_breaks_in_loops(takes_sizes, warn)


def warn(code: CodeType, line: int, graph: fx.Graph, error: Exception, backends: Iterator[Any]) -> None:
    """Of `graph`, which Dynamo had of a frame when it broke in a loop, at `line`. Raises RefusedError, where refusals
    are errors."""
    found = own_work(code, graph)
    if not found:
        return
    message = (
        f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) runs without a graph, so every rank computes all "
        f"of its {', '.join(found)}: Dynamo ends a graph in its loop, at line {line} ({first_line(error)}), and makes "
        "none of a function in which that happens. The body of the loop as a function of its own has graphs, on shards"
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    refuse(message, "it runs so", with_defaults(options_of(backends)), log.warning if rank == 0 else lambda _: None)


def own_work(code: CodeType, graph: fx.Graph) -> list[str]:
    """Which products and attention a function computes itself, rather than what it calls: each once."""
    lines = {line for *_, line in code.co_lines()}
    nodes = (node for node in graph.nodes if called_name(node) in WORK and stands_in(node, code.co_filename, lines))
    return list(dict.fromkeys(map(called_name, nodes)))


def stands_in(node: fx.Node, file: str, lines: Container[int | None]) -> bool:
    """Whether the program calls it in these lines."""
    path, line, _ = program_line(node)
    return path == file and line in lines


def options_of(backends: Iterable[Any]) -> dict[str, Any] | None:
    """What torch.compile was given for the backend."""
    given = (getattr(each, "kwargs", {}).get("options") for each in backends)
    return next((options for options in given if options), None)
