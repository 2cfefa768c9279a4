"""The order of a graph's inputs and outputs, as permutations of those of its caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ringopt.ir.nodes import outputs_of
from ringopt.ir.notes import MEMORY, STRIDES, Memory


@dataclass(frozen=True)
class Order:
    """`inputs[i]` is the index, among the caller's inputs, of input i of the graph; `outputs` likewise."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def back(self) -> Order:
        return Order(_inverse(self.inputs), _inverse(self.outputs))

    @property
    def is_that_of_caller(self) -> bool:
        return self == Order(tuple(range(len(self.inputs))), tuple(range(len(self.outputs))))

    def apply(self, graph: fx.Graph) -> None:
        """Permutes a graph in the caller's order to this one: placeholders, outputs and the notes on them."""
        placeholders, end = graph.find_nodes(op="placeholder"), graph.output_node()
        head = next(node for node in graph.nodes if node.op != "placeholder")
        for place in self.inputs:
            head.prepend(placeholders[place])
        found = outputs_of(graph)
        if isinstance(end.args[0], (tuple, list)):
            end.args = (tuple(found[place] for place in self.outputs),)
        if STRIDES in end.meta:
            end.meta[STRIDES] = [end.meta[STRIDES][place] for place in self.outputs]
        if MEMORY in end.meta:
            end.meta[MEMORY] = self.of_memory(end.meta[MEMORY])

    def of_memory(self, memory: Sequence[Memory | None]) -> list[Memory | None]:
        """The permuted note MEMORY (ir/memory.py): indices of inputs, and of the first output that shares a storage."""
        inputs, first, found = _inverse(self.inputs), dict[int, int](), list[Memory | None]()
        for new, old in enumerate(self.outputs):
            owner = memory[old]
            if owner is not None:
                kind, place = owner
                owner = (kind, inputs[place] if kind == "input" else first.setdefault(place, new))
            found.append(owner)
        return found

    def of_inputs(self, values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in self.inputs]


class Reordered:
    """`run`, which takes and returns values in `order`, called in the order of its caller."""

    def __init__(self, run: Callable[..., Any], order: Order):
        self.run, self.order, self.places = run, order, _inverse(order.outputs)

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.run(*self.order.of_inputs(inputs))
        return tuple(outputs[place] for place in self.places)


def _inverse(places: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(places)), key=places.__getitem__))
