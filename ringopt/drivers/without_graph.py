"""Functions of which Dynamo makes no graph, for it breaks where it cannot go on behind: what they compute themselves
runs on every rank, whole, and is told of.

    def forward(self, x):
        for layer in self.layers:
            x = attend(layer, x)           no graph has it, though it was traced
            if x.isnan().any(): ...        Dynamo ends its graph here, and goes on with none in a loop
                                           (or in a `with` or `try` block, or at a module of TorchScript)

What such a function calls has graphs of its own, so nothing is to be said of one that only calls its layers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
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
from ringopt.torch_compat.dynamo_frames import NoGraph, of_frames_without_graph

log = logger(__name__)

WORK = {*PRODUCTS, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, "scaled_dot_product_attention"}


def warn_of_frames_without_graph() -> None:
    """For all that is traced in this process from here on."""
    of_frames_without_graph(takes_sizes, warn)


def warn(found: NoGraph, backends: Iterator[Any]) -> None:
    """Raises RefusedError, where refusals are errors."""
    work, code = own_work(found), found.code
    if not work:
        return
    where, block = ("in its loop, ", "body of the loop") if found.in_loop else ("", "block around that line")
    message = (
        f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) runs without a graph, so every rank computes all "
        f"of its {', '.join(work)}: Dynamo ends a graph {where}at line {found.line} ({first_line(found.error)}), and "
        f"makes none of a function in which that happens. The {block} as a function of its own leaves the rest its "
        "graphs, on shards"
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    refuse(message, "it runs so", with_defaults(options_of(backends)), log.warning if rank == 0 else lambda _: None)


def own_work(found: NoGraph) -> list[str]:
    """Which products and attention a function computes itself, rather than what it calls, each once: of what was
    traced, and of what it names further on."""
    file, lines = found.code.co_filename, {line for *_, line in found.code.co_lines()}
    traced = (called_name(node) for node in found.graph.nodes if stands_in(node, file, lines))
    return [name for name in dict.fromkeys([*traced, *found.code.co_names]) if name in WORK]


def stands_in(node: fx.Node, file: str, lines: Container[int | None]) -> bool:
    """Whether the program calls it in these lines."""
    path, line, _ = program_line(node)
    return path == file and line in lines


def options_of(backends: Iterable[Any]) -> dict[str, Any] | None:
    """What torch.compile was given for the backend."""
    given = (getattr(each, "kwargs", {}).get("options") for each in backends)
    return next((options for options in given if options), None)
