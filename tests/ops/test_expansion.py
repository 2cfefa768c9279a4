"""K and V made of what travels in their place, as the text of an operator's argument has it."""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ops.expansion import ExpansionCall, expansion_of
from ringopt.scans.body import to_text


def test_constants_and_their_gradients_are_those_behind_the_sources_of_the_mask() -> None:
    """Of two sources of the mask and two constants, the first and the last have gradients."""
    graph, aten = fx.Graph(), torch.ops.aten
    z, *weights = (graph.placeholder(name) for name in ("z", "keys", "values"))
    graph.output(tuple(graph.call_function(aten.mm.default, (z, weight)) for weight in weights))
    made = ExpansionCall(to_text(fx.GraphModule({}, graph), 0, 1, 2), 2, 1, 4, 5, 0)
    sources = [torch.ones(1), torch.ones(2), torch.randn(3, 4), torch.randn(3, 5)]
    expansion = expansion_of(made.to_text()).of(sources, [0, 3])
    assert expansion.wanted == (1,)
    (learned,) = expansion.learned
    assert learned is sources[3]
    rows = torch.randn(6, 3)
    for found, weight in zip(expansion.make(rows, *expansion.consts), sources[2:], strict=True):
        torch.testing.assert_close(found, rows @ weight)
