"""Small models as people write them, none of them for ringopt: loss, outputs and every gradient are those of one
process, whatever torch.compile makes of them (fullgraph=False), and nothing is gathered but what a case says.

In the normal run some of them, on 2 or on 3 ranks; all on both with `-m zoo`.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness.translation import TOLERANCE, captured_graphs, validate_graph
from tests.ordinary import ends, layers, routes, styles  # noqa: F401  (registers the cases)
from tests.ordinary.model import CASES, Model, inputs


@pytest.mark.sample(40)
@pytest.mark.parametrize("p", (2, 3))
@pytest.mark.parametrize("name", CASES)
def test_right_and_sharded(name, p):
    torch.manual_seed(0)
    case = CASES[name]
    graphs = captured_graphs(Model(case).double(), inputs(case.rows), {}, fullgraph=False)
    found = [validate_graph(p, *graph, TOLERANCE) for graph in graphs]
    assert [verdict.wrong for verdict in found if verdict.wrong] == []
    assert {site.refusal for verdict in found for site in verdict.report.sites} <= {None}
    gathered = {gather.op for verdict in found for gather in verdict.report.gathers} - {"output"}
    assert gathered <= set(case.gathered)
