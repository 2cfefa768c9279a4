"""Checkpointed layers with experts: in line in the graph, computed again in the backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ringopt
from ringopt.frontend.data_sizes.checkpoints import write_out
from ringopt.ir.notes import CHECKPOINTED
from tests.frontend.data_sizes.test_expert_loops import over_those_hit
from tests.frontend.data_sizes.test_stretches import Experts, batch, written_in_place
from tests.harness.models import difference, run

ATEN = torch.ops.aten


def as_it_is(layer, x):
    return layer(x)


def whole(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def one_in_another(layer, x):
    return checkpoint(lambda x: whole(layer, x) * 2, x, use_reentrant=False)


def but_for_products(layer, x):
    contexts = partial(create_selective_checkpoint_contexts, [ATEN.mm.default, ATEN.addmm.default])
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


class Layers(nn.Module):
    def __init__(self, go, through):
        super().__init__()
        self.layers, self.through = nn.ModuleList([Experts(go)]), through

    def forward(self, x):
        for layer in self.layers:
            x = self.through(layer, x)
        return x


def on_rank(go, through):
    """The error, the shares, and the bytes other than weights that are kept for the backward."""
    torch._dynamo.reset()
    model, before, kept = Layers(go, through).double(), len(ringopt.reports()), []
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    wrong = difference(run(compiled, model, {"x": batch()}), run(model, model, {"x": batch()}))
    weights = {p.data_ptr() for p in model.parameters()}
    keep = lambda x: kept.append(x.nbytes if x.data_ptr() not in weights else 0) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        compiled(batch())
    return wrong, [report.sharded_fraction for report in ringopt.reports()[before:]], sum(kept)


@pytest.mark.sample(2)
@pytest.mark.parametrize("go", [written_in_place, over_those_hit])
def test_each_rank_works_on_its_own_tokens_and_keeps_little(ranks, go):
    bytes_of = {}
    for through in (as_it_is, one_in_another, but_for_products):
        for error, shares, kept in ranks(2, on_rank, go, through):
            assert error < 1e-10 and shares == [1]
            bytes_of[through] = kept
    assert bytes_of[one_in_another] < 0.5 * bytes_of[as_it_is]
    assert bytes_of[one_in_another] < bytes_of[but_for_products] < bytes_of[as_it_is]


def test_a_region_that_knows_its_sizes_stays_one():
    bodies = []

    def backend(gm, _inputs):
        write_out(gm)
        bodies.append([node for node in gm.graph.nodes if CHECKPOINTED in node.meta])
        return gm

    def program(x, decides):
        return checkpoint(lambda x: x[x > 0].sum() + x if decides else x * 2, x, use_reentrant=False)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for decides in (False, True):
            x = torch.randn(3, requires_grad=True)
            assert torch.equal(torch.compile(program, backend=backend)(x, decides), program(x, decides))
    assert not bodies[0] and len(bodies[1]) >= 4
