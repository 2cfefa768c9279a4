"""The collectives that the bound on bytes in flight holds back, for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import torch.fx as fx

from ringopt.ir.nodes import is_parameter, op_name, requires_grad
from ringopt.ops.traits import gradient_name, sends
from ringopt.overlap.async_collectives import Budget, advance_all, collectives_of, gathered_bytes
from ringopt.overlap.in_flight import first_bytes
from ringopt.overlap.meanwhile import SHOWN
from ringopt.report import bytes_text

CONJUGATES = {"gather": "gather", "reduce_from_group": "sum"}  # collectives in the backward of a conversion


def held_back(graph: fx.Graph, budget: Budget, early: Sequence[fx.Node], ranks: int) -> Iterator[str]:
    """Remarks on collectives of the forward that the bound on bytes in flight will hold back: found on a copy, since
    cached compiled code is not ordered again. `early`: attentions whose exchange starts before them."""
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.graph_copy(graph, twins)
    held = {twins[node]: float(first_bytes(node, ranks)) for node in early}
    found = advance_all(collectives_of(copy), held, budget.in_flight)
    if found:
        names = [f"{op_name(one.node)} of {one.node.all_input_nodes[0].name} ({bytes_text(one.size)})" for one in found]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield (
            f"held back: {', '.join(names[:SHOWN])}{more}, for up to {bytes_text(max(one.under_way for one in found))} "
            f"would be under way, and at most {bytes_text(budget.in_flight)} may be"
        )
    if large := too_large(graph, budget.in_flight):
        more = f" and {len(large) - SHOWN} more" if len(large) > SHOWN else ""
        yield (
            f"held back in the backward: {', '.join(large[:SHOWN])}{more}, for at most {bytes_text(budget.in_flight)} "
            "may be under way; others may be too"
        )


def too_large(graph: fx.Graph, bound: int) -> list[str]:
    """Collectives of gradients that are larger than the bound alone, whatever the graph of the backward, which does not
    exist yet. Those of parameters are in place and do not count."""
    found, carries = [], requires_grad(graph)
    for node in graph.nodes:
        what = CONJUGATES.get(gradient_name(node), "") if not sends(node) else ""
        if not what or not carries[x := node.all_input_nodes[0]] or is_parameter(x):
            continue
        if bound < (size := gathered_bytes(x)) < inf:
            found.append(f"{what} of the gradient of {x.name} ({bytes_text(size)})")
    return found
