"""Random numbers follow from the position of each element in the unsharded tensor, and from a seed.

    y = dropout(x, 0.1, True)     ->   kept = draw(select(seeds(2), 0, 0), [arange(b), arange(n)], "kept", [0.1])
    z = rand([2, 3])                   y = mul(mul(x, kept), 1 / 0.9)
                                       z = draw(select(seeds(2), 0, 1), [arange(2), arange(3)], "uniform", [0, 1])

So they are equal on any number of ranks, one included: a draw is pointwise in positions, which are cut as any `arange`
is (ringopt/ops/draws.py); rows that were sorted have the positions that they had before. The seeds come from the
program's generator, at every call one for each draw: so torch.manual_seed reproduces, no two draws and no two calls
share numbers, and what a checkpoint computes again is equal. The seeds of attention that drops weights are among them.

Before: a functional graph in which attention has been found. After: what draws by torch's own stream is what has no
form here (an explicit generator, multinomial, randperm, ...): every rank draws it whole and alike, and a note says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ringopt.frontend.functionalize import instead
from ringopt.ir.nodes import draws_by_stream, op_name, requires_grad
from ringopt.ops import operators
from ringopt.options import Random
from ringopt.pipeline import Context, Pass
from ringopt.sharding.by_position import FORMS, Draw, Seeds, is_plain


@dataclass(frozen=True)
class DrawByPosition(Pass):
    """By option `random`, for `torch` not at all."""

    name = "draw_by_position"
    writes = ("drawn", "notes")
    random: Random = "position"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if self.random == "torch":
            return
        graph = gm.graph
        seeds, carries = Seeds(graph), requires_grad(graph)
        for node in list(graph.nodes):
            if node.target is operators.seeds.default:
                seeds.adopt(node)
            elif draws_by_stream(node):
                if not rewrite(graph, node, seeds, carries):
                    context.notes.append(f"{node.name} draws by torch's own stream, whole and alike on every rank")
                    continue
            else:
                continue
            context.drawn.append(node.name)
        seeds.finish()


def rewrite(graph: fx.Graph, node: fx.Node, seeds: Seeds, carries: dict[fx.Node, bool]) -> bool:
    """Whether there is a form in which `node` is drawn by position."""
    form = FORMS.get(op_name(node))
    if form is None or not is_plain(node):
        return False
    draw = Draw(graph, node, seeds, carries)
    with graph.inserting_before(node), draw.mode:
        made = form(draw)
        if made is None:
            return False
        for operand in draw.without_gradient:  # its gradient is zeros, and not none
            made = instead(graph, operand, made, node)
    if isinstance(made, tuple):
        for user in list(node.users):
            replace(graph, user, made[user.args[1]], carries)
        graph.erase_node(node)
    else:
        replace(graph, node, made, carries)
    return True


def replace(graph: fx.Graph, node: fx.Node, made: fx.Node, carries: dict[fx.Node, bool]) -> None:
    """`made` is read in the place of `node`, by other draws too."""
    node.replace_all_uses_with(made)
    carries[made] = carries[node]
    graph.erase_node(node)
