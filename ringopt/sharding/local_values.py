"""The fake value that each node of a sharded graph has on this rank, and whether its size is that of its placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.autograd_function import HigherOrder
from ringopt.ir.fake_cache import Answers
from ringopt.ir.nodes import is_tensor, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.symbolic_sizes import divides, note_value, same
from ringopt.torch_compat.fake_tensors import (
    FakeTensorMode,
    enable_python_dispatcher,
    open_strides_undecided,
)


@contextmanager
def as_aot_traces(mode: FakeTensorMode) -> Iterator[None]:
    """What AOTAutograd will run the graph under: some kernels (negative padding) know only numbers, and some (istft)
    read numbers, but for their Python forms."""
    with enable_python_dispatcher(), open_strides_undecided() if mode.shape_env is not None else nullcontext():
        yield


class LocalValues(fx.Interpreter):
    """Gives each node the fake value it has on this rank."""

    def __init__(self, gm: fx.GraphModule, answers: Answers):
        super().__init__(gm)
        self.answers = answers

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        run = super().call_function
        return self.answers.call(target, args, kwargs, lambda: run(target, args, kwargs))

    def run_node(self, node: fx.Node) -> Any:
        if isinstance(node.target, HigherOrder):  # on every rank what it is in the program
            value = [torch.empty_like(x) for x in value_of(node)]
        else:
            value = super().run_node(node)
        if node.op == "call_function":
            note_value(node, value)
        return value


def check_sizes(graph: fx.Graph) -> None:
    """Raises AssertionError where the local size or dtype of a node does not fit its placement and its global value."""
    for node in graph.nodes:
        whole, placement = node.meta.get(WHOLE), node.meta.get(PLACEMENT)
        if not isinstance(whole, torch.Tensor) or not is_tensor(node):
            continue
        here, expected = list(value_of(node).shape), list(whole.shape)
        if placement is not None:
            expected[placement.dim] = here[placement.dim]
            even = divides(placement.outer * placement.inner, here[placement.dim])
        equal = len(here) == len(expected) and all(map(same, here, expected))
        if not equal or (placement is not None and not even) or value_of(node).dtype != whole.dtype:
            raise AssertionError(
                f"{node.format_node()}: {here} {value_of(node).dtype} on this rank, but {list(whole.shape)} "
                f"{whole.dtype} placed {placement or 'on every rank'}"
            )
