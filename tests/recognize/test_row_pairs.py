"""Two axes of a product, followed until one is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ringopt.ir.placement import Sharded
from ringopt.recognize.row_pairs import lengthened
from ringopt.torch_compat.fx import make_fx

QUERIES, KEYS = Sharded(1, 1, 5, 1), Sharded(2, 1, 7, 1)


@pytest.mark.parametrize(
    ("put_beside", "axes"),
    [
        (lambda scores: torch.cat([scores, scores[..., :1]], -1), (QUERIES, Sharded(2, 1, 8, 1))),
        (lambda scores: scores[..., 1:], (QUERIES, Sharded(2, 1, 6, 1))),
        (lambda scores: torch.cat([scores, scores[:, :2]], 1), (Sharded(1, 1, 7, 1), KEYS)),
        (lambda scores: torch.cat([scores, scores], 0), None),  # beside neither
        (lambda scores: F.pad(scores, (1, 0, 1, 0)), None),  # beside both
        (lambda scores: scores.exp(), None),
    ],
)
def test_an_axis_is_longer_where_something_is_put_beside_it(put_beside, axes):
    graph = make_fx(put_beside, pre_dispatch=True)(torch.zeros(2, 5, 7)).graph
    (scores,), (user,) = graph.find_nodes(op="placeholder"), graph.output_node().all_input_nodes
    assert lengthened(user, scores, (QUERIES, KEYS)) == axes
