"""Whatever order a program is written in, it has one text, one order of its nodes, and one of who reads what."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringopt.distributed.lookup import mesh_of
from ringopt.frontend.capture import capture
from ringopt.ir.canonical_order import canonical_order, program_of
from ringopt.options import Options
from ringopt.passes import LINE, with_options
from ringopt.passes.canonicalize import Canonicalize
from ringopt.passes.normalize import Normalize
from ringopt.pipeline import Context, Pipeline
from tests.harness.custom_functions import Clipped
from tests.harness.translation import captured
from tests.overlap.test_async_collectives import Outputs
from tests.overlap.test_start_early import Model, data

SHUFFLES = 4


class Twins(nn.Module):
    """Values that are computed alike and read by others, outputs that are, and one that nothing tells apart."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d = (x.relu() for _ in range(4))
        table = torch.zeros(3).index_fill(0, torch.tensor([1]), 2.0) * torch.tensor([4.0, 5.0, 6.0]).sum()
        return a + 1, b + 1, (a * 2).sum(), c * y, d, d.clone(), table, y.sin(), y.sin()


class Regions(nn.Module):
    """Checkpointed branches side by side, the second made of the first, and a gradient that the program defines."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        def run(layer: nn.Module, z: Tensor) -> Any:
            return checkpoint(lambda z: F.gelu(layer(z)), z, use_reentrant=False)

        first, other = run(self.a, x), run(self.b, y)
        return run(self.c, other) + Clipped.apply(first), run(self.a, first)


class Writes(nn.Module):
    """Two buffers and a tensor of its own, written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.zeros_like(x)
        made[:, 0] = y[:, 1]
        with torch.no_grad():
            self.seen.add_(x.mean(0))
            self.count.add_(1)
        return made + self.count, F.dropout(x, 0.5) + y * self.seen


def small() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)


MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "attention": lambda: (Model(2).double(), (data(),)),
    "outputs": lambda: (Outputs().double(), (data(),)),
    "twins": lambda: (Twins(), small()),
    "regions": lambda: (Regions(), small()),
    "writes": lambda: (Writes(), small()),
}


def has_order(node: fx.Node) -> bool:
    """Of Dynamo's nodes: what may write, draw or mark a region, by the looks of it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op != "placeholder" and (name.endswith("_") or name in ("setitem", "dropout", "_set_grad_enabled"))


def shuffled(gm: fx.GraphModule, inputs: list[Any], seed: int) -> tuple[fx.GraphModule, list[Any]]:
    """The same program with inputs, nodes and outputs in another order, under other names."""
    draw = random.Random(seed)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    places = list(range(len(inputs)))
    draw.shuffle(places)
    originals = gm.graph.find_nodes(op="placeholder")
    for place in places:
        copies[originals[place]] = graph.node_copy(originals[place])
    segment: list[fx.Node] = []
    for node in gm.graph.nodes:
        if has_order(node) or node.op == "output":
            while segment:
                ready = [each for each in segment if all(arg in copies for arg in each.all_input_nodes)]
                chosen = draw.choice(ready)
                segment.remove(chosen)
                copies[chosen] = graph.node_copy(chosen, copies.__getitem__)
                copies[chosen]._rename(f"n{draw.randrange(10**6)}")
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        elif node.op != "placeholder":
            segment.append(node)
    outputs = [copies[x] if isinstance(x, fx.Node) else x for x in gm.graph.output_node().args[0]]
    draw.shuffle(outputs)
    graph.output(tuple(outputs))
    return fx.GraphModule(gm, graph), [inputs[place] for place in places]


def canonical(gm: fx.GraphModule, inputs: list[Any]) -> tuple[str, list[list[str]], str]:
    """The text, who reads each node, and what all passes make of it."""
    options = Options(strategy="ring")
    context = Context(options, mesh_of("pretend:0/2"))
    flat = capture(gm, inputs).begin(context)
    readers: list[list[str]] = []

    def passed(step: Any, gm: fx.GraphModule) -> None:
        if isinstance(step, Canonicalize):
            readers.extend([user.name for user in node.users] for node in gm.graph.nodes)

    Pipeline(with_options(LINE, options), passed).run(flat, context)
    assert context.canonical is not None and context.program is not None
    context.canonical.apply(flat.graph)
    return context.program.text, readers, "\n".join(map(str, flat.graph.nodes))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_one_text_in_any_order(name: str) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    gm, inputs = captured(model, *args)
    expected = canonical(gm, inputs)
    for seed in range(SHUFFLES):
        assert canonical(*shuffled(gm, inputs, seed)) == expected


def test_what_is_computed_is_in_the_text() -> None:
    """One number, one operand or one constant less alike is another text."""

    def text(function: Callable[..., Any]) -> str:
        gm, inputs = captured(function, *small())
        context = Context(Options(), mesh_of("pretend:0/2"))
        Pipeline((Normalize(), Canonicalize())).run(capture(gm, inputs).begin(context), context)
        assert context.program is not None
        return str(context.program.text)

    texts = [
        text(lambda x, y: x * 2 - y),
        text(lambda x, y: x * 2.5 - y),
        text(lambda x, y: y - x * 2),
        text(lambda x, y: x * 2 - y.detach().clone()),
        text(lambda x, y: x * 2 - y * torch.tensor([1.0, 2.0, 3.0, 4.0])),
        text(lambda x, y: x * 2 - y * torch.tensor([1.0, 2.0, 3.0, 5.0])),
    ]
    assert len(set(texts)) == len(texts)


def test_what_an_op_is_given_by_name_is_of_its_text() -> None:
    """floor and trunc, say, are given by keyword alone."""
    texts = set()
    for mode in ("floor", "trunc"):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.ops.aten.div.Tensor_mode, (x, x), {"rounding_mode": mode}))
        texts.add(str(program_of(graph, canonical_order(graph)[0])))
    assert len(texts) == 2
