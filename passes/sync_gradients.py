"""The gradients of parameters: summed over the ranks in buckets, or left to a wrapper.

    w1 = copy_to_group(p1)             w1, w2, w3 = copy_all_to_group([p1, p2, p3])
    w2 = copy_to_group(p2)      ->
    w3 = copy_to_group(p3)             sync_gradients=False: w1 = leave_to_wrapper(p1, ranks), ...

A bucket holds parameters whose first uses follow each other: in the backward their gradients are complete one after the
other, and the bucket is reduced as soon as the last of them is. It is filled from the end of the program, where the
backward begins, so that the first bucket to go is a full one.

Before: sharded graph, each parameter copied to the group by itself. After: one node a bucket.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.ir.nodes import is_parameter, op_name, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ops import operators
from ringopt.pipeline import Context, Pass

BUCKET = 25 * 2**20  # bytes; what DistributedDataParallel takes


@dataclass(frozen=True)
class SyncGradients(Pass):
    """Puts the copies of parameters into buckets, whose gradients are all-reduced in one message each."""

    name = "sync_gradients"
    reads = ("mesh",)

    sync_gradients: bool = True

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        copies = [node for node in gm.graph.nodes if op_name(node) == "copy_to_group" and is_parameter(copied(node))]
        if not self.sync_gradients:
            for copy in copies:
                OpCall.to(operators.leave_to_wrapper.default, x=copied(copy), ranks=context.mesh.size).write(copy)
            return
        for bucket in buckets(copies):
            if len(bucket) > 1:
                join(gm.graph, bucket)


def copied(copy: fx.Node) -> fx.Node:
    """The parameter of a `copy_to_group`."""
    found: fx.Node = OpCall.of(copy)["x"]
    return found


def buckets(copies: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Of one dtype each, in the order of the backward."""
    order = {node: place for place, node in enumerate(copies[0].graph.nodes)} if copies else {}
    open_buckets: dict[tuple[torch.dtype, torch.device], list[fx.Node]] = {}
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()  # bytes in each
    for copy in sorted(copies, key=lambda copy: min(map(order.__getitem__, copy.users)), reverse=True):
        value = value_of(copied(copy))
        if value.is_complex():
            continue  # reduced by itself
        kind, size = (value.dtype, value.device), int(value.numel() * value.element_size())
        if filled[kind] and filled[kind] + size > BUCKET:
            yield open_buckets.pop(kind)
            filled[kind] = 0
        open_buckets.setdefault(kind, []).append(copy)
        filled[kind] += size
    yield from open_buckets.values()


def join(graph: fx.Graph, bucket: list[fx.Node]) -> None:
    """One node for the copies of a bucket, where its parameters are: at the head of the graph. The copies are what it
    returns."""
    parameters, group = list(map(copied, bucket)), OpCall.of(bucket[0])["group"]
    head = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        head.prepend(node)
    with graph.inserting_before(head):
        call = OpCall.to(operators.copy_all_to_group.default, parameters=parameters, group=group)
        made = call.insert(graph, "bucket")
        made.meta = {PLACEMENT: None, WHOLE: None}
    for i, copy in enumerate(bucket):
        copy.target, copy.args = operator.getitem, (made, i)
