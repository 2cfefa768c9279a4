"""What a training step holds at once, in bytes of tensors: of p ranks, each a part, with checkpoints or without."""

from __future__ import annotations

import pytest
import torch

from ringopt.distributed.lookup import mesh_of
from ringopt.drivers.compile import transform
from ringopt.frontend.capture import capture
from ringopt.options import Options
from ringopt.planner.liveness import live_of, partitioned
from ringopt.tools.benchmarks.workers.training import VOCABULARY, Llama
from tests.harness.translation import captured

WIDTH = 128


def step(flat, rows):
    return live_of(flat, partitioned(flat), rows).step


def held(length, layers, checkpointed):
    """Bytes at the peak, of one process as torch does it and of a rank of 2 and of 4."""
    gm, inputs = captured(Llama(layers, WIDTH, checkpointed), torch.randint(VOCABULARY, (1, length)))
    found = [step(capture(gm, inputs).graph, length)]
    for p in (2, 4):
        made = transform(gm, inputs, Options(), mesh_of(f"pretend:0/{p}"))
        assert made.report.sharded_fraction == 1.0
        found.append(step(made.graph, length // p))
    return found


@pytest.mark.zoo
@pytest.mark.parametrize(("length", "layers"), [(1024, 1), pytest.param(8192, 8, marks=pytest.mark.zoo)])
def test_memory_falls_as_1_over_p(length, layers):
    alone, two, four = held(length, layers, False)
    assert two == pytest.approx(alone / 2, rel=0.15) and four == pytest.approx(alone / 4, rel=0.15)
    again, two_again, four_again = held(length, layers, True)
    # What an exchange brought is kept, so a checkpoint gains a little less than without ranks.
    assert two / two_again > 0.8 * alone / again > 1 and four / four_again > 0.8 * alone / again
