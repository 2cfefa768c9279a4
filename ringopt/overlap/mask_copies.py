"""What masks read, brought to the host once for all attentions that read the same values, forward and backward.

    y = ring_attention(q, k, v, [ids], ...)         facts = mask_facts([ids])
    z = ring_attention(r, s, t, [ids], ...)   ->    y = ring_attention(q, k, v, [ids], ..., facts=facts)
                                                    z = ring_attention(r, s, t, [ids], ..., facts=facts)

The copy begins as soon as there is something to copy, so that the first attention does not wait for the device.
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ringopt.calls import OpCall, RingCall
from ringopt.ir.nodes import origin, value_of
from ringopt.ops import operators
from ringopt.ops.expansion import expansion_of


def share_copies(graph: fx.Graph) -> None:
    """In place. The ticket is kept for the backward, where a checkpoint computes other values again."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    found: dict[tuple[fx.Node, ...], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=operators.ring_attention.default):
        call = RingCall.of(node)
        count = expansion_of(call.expand).sources if call.expand else len(call.sources)
        sources = tuple(call.sources[:count])
        if not sources:
            continue
        if sources not in found:
            found[sources] = begun(graph, sources, max(sources, key=lambda source: places[source]), node)
        call.replace(facts=found[sources]).write(node)


def begun(graph: fx.Graph, sources: tuple[fx.Node, ...], last: fx.Node, reader: fx.Node) -> fx.Node:
    """The copy of `sources`, right behind the `last` of them; told to come from where its first reader comes from."""
    while last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        facts = OpCall.to(operators.mask_facts.default, sources=list(sources)).insert(graph, "mask_facts")
    value = value_of(sources[0]).new_empty((), dtype=torch.int64, device="cpu")
    facts.meta = {**origin(reader), "val": value, "recompute": CheckpointPolicy.MUST_SAVE}
    facts.meta.pop("ac_graph_id", None)  # it stands in no region
    return facts
