"""An attention becomes an all-gather where what stands before it hides that, and the cost model was free to choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.nn as nn

from ringopt.cost import site
from ringopt.drivers.compile import transform
from ringopt.hardware.devices import Link
from ringopt.hardware.rates import Rates, Speed
from ringopt.options import Options
from ringopt.overlap import all_at_once as module
from tests.harness.translation import Seat, captured, difference
from tests.overlap.test_start_early import Model, data, on_ranks, ordered

RATES = Rates("made up", Link("slow", 4e6, 1e-9), Speed(1e8), touch=1e12, step=1e-9, memory=1 << 30, part=4)


def model() -> nn.Module:
    """Its queries take wide layers, which need no keys."""
    made = Model().double()
    made.blocks[0].q = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)).double()
    return made


@pytest.fixture
def given(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "agreed_rates", lambda *mesh: request.param)


@pytest.mark.parametrize(
    ("given", "asked", "strategy"),
    [
        (RATES, {}, "gather"),
        (RATES, {"strategy": "ring"}, "ring"),  # the user's
        (replace(RATES, memory=64 * 2048), {}, "ring"),  # a part of it is for what is under way
        (replace(RATES, link=Link("fast", 1e12, 1e-9)), {}, "ring"),  # nothing to hide
        (RATES, {"inner_backend": "eager"}, "ring"),  # nothing starts early
    ],
    indirect=["given"],
)
def test_where_it_pays(given: None, asked: dict[str, Any], strategy: str) -> None:
    (one,) = transform(*captured(model(), data(60)), Options(**asked), Seat(0, 3)).report.sites
    assert one.strategy == strategy
    changed = "strategy gather in place of ring: all keys are under way behind"
    assert any(changed in each for each in one.notes) == (strategy == "gather")


@pytest.mark.parametrize(("most", "strategy"), [(3, "gather"), (2, "ring")])
@pytest.mark.parametrize("given", [RATES], indirect=True)
def test_on_more_ranks_than_are_compared_nothing_is_changed(
    given: None, monkeypatch: pytest.MonkeyPatch, most: int, strategy: str
) -> None:
    """Of more, the predictions are of fewer ranks. The last number that is compared still is."""
    monkeypatch.setattr(module, "MOST_RANKS", most)
    (one,) = transform(*captured(model(), data(60)), Options(), Seat(0, 3)).report.sites
    assert one.strategy == strategy


@pytest.mark.parametrize("given", [RATES], indirect=True)
def test_its_numbers(given: None) -> None:
    found, _ = on_ranks(3, model(), data(60), ordered)
    for (values, ran), expected in found:
        assert not difference(expected, values)
        assert ran.index("ring_start") < ran.index("ring_attention") and "ring_backward_finish" in ran
