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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

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
        copies = [node for node in gm.graph.nodes if op_name(node) == "copy_to_group" and is_parameter(node.args[0])]
        if not self.sync_gradients:
            for copy in copies:
                copy.target, copy.args = operators.leave_to_wrapper.default, (copy.args[0], context.mesh.size)
            return
        for bucket in buckets(copies):
            if len(bucket) > 1:
                join(gm.graph, bucket)


def buckets(copies: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Of one dtype each, in the order of the backward."""
    order = {node: place for place, node in enumerate(copies[0].graph.nodes)} if copies else {}
    open_buckets: dict[tuple[torch.dtype, torch.device], list[fx.Node]] = {}
    for copy in sorted(copies, key=lambda copy: min(map(order.__getitem__, copy.users)), reverse=True):
        value = value_of(copy.args[0])
        bucket = open_buckets.setdefault((value.dtype, value.device), [])
        if value.is_complex():
            continue  # reduced by itself
        if bucket and sum(map(size_of, bucket)) + size_of(copy) > BUCKET:
            yield bucket
            bucket = open_buckets[value.dtype, value.device] = []
        bucket.append(copy)
    yield from open_buckets.values()


def size_of(copy: fx.Node) -> int:
    """Bytes of the parameter that is copied."""
    value = value_of(copy.args[0])
    return int(value.numel() * value.element_size())


def join(graph: fx.Graph, bucket: list[fx.Node]) -> None:
    """One node for the copies of a bucket, where its parameters are: at the head of the graph. The copies are what it
    returns."""
    parameters, group = [copy.args[0] for copy in bucket], bucket[0].args[1]
    head = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        head.prepend(node)
    with graph.inserting_before(head):
        made = graph.create_node(
            "call_function", operators.copy_all_to_group.default, (parameters, group), {}, "bucket"
        )
        made.meta = {PLACEMENT: None, WHOLE: None}
    for i, copy in enumerate(bucket):
        copy.target, copy.args = operator.getitem, (made, i)
