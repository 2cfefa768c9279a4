"""A custom autograd.Function on shards: its backward, a graph of its own, is sharded by the rules of its forward.

    y = custom_gradient([y], [x, w], [x])     ->   y = custom_gradient([y_rows], [x_rows, w], [x_rows])
        dx, dw = dy @ w.T, x.T @ dy                    dx, dw = dy_rows @ w.T, reduce_from_group(x_rows.T @ dy_rows)

Between the two graphs a value has one form: the gradient of an output is placed as the output is, a saved value as the
backward wants it, and the gradient of an input comes out as the input is (whole and complete where that is replicated).
What no rule knows is computed on gathered operands, there as here.

A backward need not be linear: a clipped gradient is not. It must run once, on the whole gradient of its outputs. So of
one Function there is one node in the sharded graph, and other forms of its outputs are made from that node's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch.fx as fx

from ringopt.ir.autograd_function import CustomGradient, GradientArguments
from ringopt.ir.nodes import draws, op_name, source_line, tensor_args, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.placement import Sharded
from ringopt.report import bytes_text
from ringopt.sharding.emit import getitems
from ringopt.sharding.handlers.registry import across
from ringopt.sharding.sharder import Sharder

Places = Sequence[Sharded | None]


class Backward(Sharder):
    """Shards the backward of a Function whose forward is in `forward`. Demands for the rows of a saved value go there:
    `given` says which value, in which form, a placeholder stands for."""

    def __init__(self, graph: fx.Graph, forward: Sharder):
        super().__init__(graph, replace(forward.ranks, counted=True))
        self.forward = forward
        self.given: dict[fx.Node, tuple[fx.Node, Sharded | None]] = {}
        self.saved: dict[fx.Node, fx.Node] = {}
        self.random: list[str] = []

    def receive(self, node: fx.Node, placement: Sharded | None) -> fx.Node:
        """`node`, a placeholder, in a form."""
        new = self.graph.placeholder(node.name)
        new.meta[PLACEMENT], new.meta[WHOLE] = placement, value_of(node)
        self.set(node, new, placement)
        return new

    def save(self, node: fx.Node, value: fx.Node) -> None:
        """`node`, a placeholder, stands for `value` of the forward graph."""
        placement = self.forward.placements[value]
        self.last = self.receive(node, placement)
        self.given[self.last] = (value, placement)
        self.saved[node] = value

    def sharded(self, node: fx.Node, placement: Sharded) -> fx.Node:
        if node not in self.saved or self.placements[node] is not None:
            return super().sharded(node, placement)
        return self.once(node, placement, lambda: self.rows_of_saved(node, placement))

    def rows_of_saved(self, node: fx.Node, placement: Sharded) -> fx.Node:
        """Cut, or better made, in the forward."""
        with self.graph.inserting_after(self.last):
            new = self.graph.placeholder(f"{node.name}_rows")
        new.meta[PLACEMENT], new.meta[WHOLE] = placement, value_of(node)
        self.given[new] = (self.saved[node], placement)
        return new

    def answer(self, results: dict[fx.Node, fx.Node]) -> list[tuple[fx.Node, Sharded | None]]:
        """Ends the graph with the gradient of each input, placed as the input is; one that is replicated may as well be
        cut, if that is how its gradient comes. Returns the inputs, each with its form."""
        forms: list[tuple[fx.Node, Sharded | None]] = []
        found: list[fx.Node] = []
        for x, result in results.items():
            self.reader = result
            placement = self.forward.placements[x] or self.placements[result]
            found.append(self.replicated(result) if placement is None else self.sharded(result, placement))
            forms.append((x, placement))
        self.graph.output(found)
        return forms

    def pruned(self) -> list[tuple[fx.Node, Sharded | None]]:
        """Drops what is not used; returns what the placeholders of saved values stand for, in order."""
        self.graph.eliminate_dead_code()
        for place in self.graph.find_nodes(op="placeholder"):
            if place in self.given and not place.users:
                self.graph.erase_node(place)
        alive = set(self.graph.nodes)
        self.gathers = [note for note in self.gathers if self.converted[note.value, "whole"] in alive]
        return [self.given[place] for place in self.graph.find_nodes(op="placeholder") if place in self.given]

    def walk(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            if node.op == "get_attr":
                self.keep(node)
            elif node not in self.values and not self.spread(node):
                self.whole(node)
                self.random += [node.name] if draws(node) else []

    def spread(self, node: fx.Node) -> bool:
        if node in self.understood:
            self.understood[node]()
            return True
        return self.along(node) or (any(map(self.placements.get, tensor_args(node))) and across(self, node))


class Functions:
    """The CustomGradient nodes of one walk over a graph. `decided` says how the outputs of some are placed."""

    def __init__(self, sharder: Sharder, decided: dict[fx.Node, Places]):
        self.sharder, self.decided = sharder, decided
        self.written: dict[fx.Node, tuple[fx.Node, Places, Backward]] = {}

    def place(self, node: fx.Node) -> None:
        """Writes `node` and its results. A replicated one may yet be wanted in rows: then `node` is written once more,
        and `twice` tells when both stayed."""
        sharder, users = self.sharder, getitems(node) or []
        placements = self.decided.get(node) or [sharder.placements[y] for y in GradientArguments.of(node).outputs]
        written = self.write(node, placements)
        sharder.set(node, written, None)
        for user in users:
            placement = placements[user.args[1]]
            sharder.set(user, sharder.call(operator.getitem, (written, user.args[1]), user, placement), placement)
            if len(users) == 1 and not any(placements):
                sharder.climbers[user] = partial(self.climb, node, user)

    def climb(self, node: fx.Node, user: fx.Node, wanted: Sharded) -> fx.Node | None:
        """Rows of the one result that is used; None where the backward would have to gather for it."""
        outputs = GradientArguments.of(node).outputs
        placements = [wanted if number == user.args[1] else None for number in range(len(outputs))]
        written = self.write(node, placements, may_gather=False)
        return written and self.sharder.call(operator.getitem, (written, user.args[1]), user, wanted)

    def write(self, node: fx.Node, placements: Places, may_gather: bool = True) -> fx.Node | None:
        """`node` with its outputs placed so."""
        sharder, (outputs, inputs, saved) = self.sharder, GradientArguments.of(node)
        graph = node.target.backward.graph
        inner = Backward(graph, sharder)
        places = graph.find_nodes(op="placeholder")
        for place, placement in zip(places, placements, strict=False):
            inner.receive(place, placement)
        for place, value in zip(places[len(outputs) :], saved, strict=True):
            inner.save(place, value)
        results = {x: y for x, y in zip(inputs, graph.output_node().args[0], strict=True) if sharder.carries[x]}
        inner.walk(needed(results.values()))
        forms, given = inner.answer(results), inner.pruned()
        if inner.gathers and not may_gather:
            return None
        backward = CustomGradient(fx.GraphModule(node.target.backward, inner.finished()))

        def form(value: fx.Node, placement: Sharded | None) -> fx.Node:
            return sharder.replicated(value) if placement is None else sharder.sharded(value, placement)

        sharder.reader = node
        args = [[form(*each) for each in group] for group in (zip(outputs, placements, strict=True), forms, given)]
        written = sharder.call(backward, args, node, None)
        self.written[written] = (node, placements, inner)
        return written

    def twice(self) -> dict[fx.Node, Places]:
        """Nodes of which two forms are alive, with the one that is sharded: the next walk is to write only that."""
        alive = set(self.sharder.graph.nodes)
        found: dict[fx.Node, list[Places]] = {}
        for written, (node, placements, _inner) in self.written.items():
            if written in alive:
                found.setdefault(node, []).append(placements)
        return {node: next(filter(any, forms)) for node, forms in found.items() if len(forms) > 1}

    def random(self) -> list[str]:
        return [name for _node, _placements, inner in self.written.values() for name in inner.random]

    def notes(self) -> list[str]:
        """What the backwards gather, for the report."""
        alive, sentences = set(self.sharder.graph.nodes), []
        for written, (node, _placements, inner) in self.written.items():
            if written not in alive or not inner.gathers:
                continue
            size = bytes_text(sum(note.bytes for note in inner.gathers))
            ops = ", ".join(sorted({op_name(note.reader) for note in inner.gathers}))
            where = f" ({line})" if (line := source_line(node)) else ""
            sentences.append(f"the backward of a custom autograd.Function{where} gathers {size} for {ops}")
        return sentences


def needed(results: Iterable[fx.Node]) -> list[fx.Node]:
    """In order, the nodes that the results are made from."""
    found, todo = set[fx.Node](), list(results)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return sorted(found)
