"""The order in which a graph takes its inputs and returns its outputs, beside the one its caller has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ringopt.ir.nodes import outputs_of
from ringopt.ir.notes import MEMORY, STRIDES, Memory


@dataclass(frozen=True)
class Order:
    """`inputs` has, for each input of the graph, its place among those of the caller; `outputs` the same."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def back(self) -> Order:
        return Order(inverse(self.inputs), inverse(self.outputs))

    @property
    def is_that_of_caller(self) -> bool:
        return self == Order(tuple(range(len(self.inputs))), tuple(range(len(self.outputs))))

    def apply(self, graph: fx.Graph) -> None:
        """From the caller's order to this one."""
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
        """In whose memory outputs lie (ir/memory.py): places of inputs, and of the first output that lies there."""
        inputs, first, found = inverse(self.inputs), dict[int, int](), list[Memory | None]()
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
    """`run`, which takes and returns values in an order of its own, called in that of its caller."""

    def __init__(self, run: Callable[..., Any], order: Order):
        self.run, self.order, self.places = run, order, inverse(order.outputs)

    def __call__(self, *inputs: Any) -> Any:
        outputs = self.run(*self.order.of_inputs(inputs))
        return tuple(outputs[place] for place in self.places)


def inverse(places: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(places)), key=places.__getitem__))
