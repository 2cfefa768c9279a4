"""Gradients of parameters: a bucket is one message; left to a wrapper, their mean over the ranks is the gradient."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline

import ringopt
from ringopt.errors import OptionError
from ringopt.ir.printer import short
from ringopt.passes import sync_gradients
from tests.harness.translation import captured, difference, validate, values_and_gradients
from tests.sharding.programs import Model, inputs


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        q, k, v = self.first(x).chunk(3, -1)
        return self.last(F.scaled_dot_product_attention(q[None], k[None], v[None])[0]).sum()


def test_the_copies_of_parameters_become_one_node():
    verdict = validate(2, Tiny().double(), torch.randn(1, 6, 4, dtype=torch.float64))
    assert verdict.wrong == ""
    copies = [line for line in short(verdict.graph.graph).splitlines() if "bucket" in line]
    assert_expected_inline(
        "\n".join(copies),
        """\
%bucket = copy_all_to_group([%last_weight, %first_weight, %first_bias])
%first_weight_copied = getitem(%bucket, 1)
%first_bias_copied = getitem(%bucket, 2)
%last_weight_copied = getitem(%bucket, 0)""",
    )


def step(model, x):
    """Used twice, not at all, and only where nothing is sharded."""
    y = model.linear(F.gelu(model.linear(x)))
    return y + model.norm(model.vector) * model.table.weight.mean(0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("size, buckets, alone", [(10**9, 1, 1), (1000, 1, 4), (0, 0, 6)])
def test_a_bucket_is_one_message(p, size, buckets, alone):
    """Beside them one more: of the normed vector, which is no parameter."""
    torch.manual_seed(0)
    with patch.object(sync_gradients, "BUCKET", size), ringopt.record_traffic() as traffic:
        verdict = validate(p, Model(step).double(), *inputs())
    assert verdict.wrong == ""
    labels = [event.label for event in traffic.of(0).events if event.kind == "all_reduce"]
    assert (labels.count("gradients"), labels.count("")) == (buckets, alone)
    first, *others = (gradients for _outputs, gradients in verdict.found)
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one is None or torch.equal(one, another)  # the same bits


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_the_mean_of_what_is_left_to_a_wrapper(p):
    torch.manual_seed(0)
    module, args = Model(step).double(), inputs()
    verdict = validate(p, module, *args, sync_gradients=False)
    gm, given = captured(module, *args)
    expected = values_and_gradients(gm, given)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    gradients = [found[1] for found in verdict.found]
    mean = [sum(parts) / p if parts[0] is not None else None for parts in zip(*gradients, strict=True)]
    assert difference(expected, (expected[0], mean), 1e-10) == ""
    whole = names.index("l_x_")  # of an input every rank has the whole gradient
    assert all(torch.allclose(found[whole], expected[1][whole]) for found in gradients)


def test_neither_true_nor_false():
    with pytest.raises(OptionError, match="option sync_gradients='ddp': expected True or False"):
        ringopt.Options(sync_gradients="ddp")
