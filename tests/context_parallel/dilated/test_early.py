"""Exchanges of dilated attention that start before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringopt.backend import inner
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.drivers.compile import transform
from ringopt.ops.ring import VERSION
from ringopt.options import Options
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.harness.translation import Seat, captured, difference
from tests.overlap.test_start_early import Model, data, ordered, shown

LENGTH, DIM = 29, 4


@pytest.mark.parametrize("pattern", ["dilated(8:1,29:2,causal)", "dilated(5:1,20:2,torchscale mixing)"])
@pytest.mark.parametrize(("p", "strategy"), [(2, "gather"), (3, "ring"), (4, "auto")])
def test_by_a_ticket_or_without(p: int, strategy: str, pattern: str) -> None:
    operators = torch.ops.ringopt

    def body(mesh: ThreadMesh) -> None:
        rows = count(layout_of("contiguous", LENGTH, p).ranges(mesh.rank))
        draw = torch.Generator().manual_seed(mesh.rank)
        sizes = [(2, heads, rows, DIM) for heads in (4, 2, 2, 4)]
        q, k, v, dout = (torch.randn(size, dtype=torch.float64, generator=draw) for size in sizes)
        config = (LENGTH, pattern, 0.0, 0.5, "contiguous", strategy, "auto", mesh.name, VERSION)
        beside = (None, None, None)

        def ticket(backward: bool) -> Tensor:
            return operators.dilated_start(k, v, 4, backward, 0, *config)

        saved = operators.dilated_attention(q, k, v, *beside, *config)
        early = operators.dilated_attention(q, k, v, *beside, *config, "forward", ticket(False))
        given = (dout, q, k, v, *saved, *beside, *config)
        found = operators.dilated_attention_backward(*given)
        again = operators.dilated_attention_backward(*given, "backward", ticket(True))
        for one, other in zip((*saved, *found[:3]), (*early, *again[:3]), strict=True):
            assert torch.equal(one, other)

    run_on_threads(p, body)


@pytest.mark.zoo
def test_keys_travel_before_the_queries_are_projected() -> None:
    """Beside one process that dilates as well."""
    gm, inputs = captured(Model(2).double(), data(13))
    chosen = Options(inner_backend="aot_eager", segment_lengths=(4, 13), dilation_rates=(1, 2))

    def on(p: int) -> list[tuple[list[Tensor], list[str]]]:
        made = [transform(gm, inputs, chosen, Seat(rank, p)) for rank in range(p)]
        runs = [inner(one.graph, inputs, chosen, None, one.budget) for one in made]
        return run_on_threads(p, lambda mesh: ordered(runs[mesh.rank], inputs))

    ((alone, _),) = on(1)
    for values, ran in on(3):
        assert not difference(alone, values)
        assert shown(ran) == [
            "mm", "start", "mm", "ring", "mm", "start", "mm", "ring", "mm",
            "start", "mm", "ring backward", "start", "mm", "ring backward", "mm", "whole gather", "reduce", "reduced",
        ]  # fmt: skip
