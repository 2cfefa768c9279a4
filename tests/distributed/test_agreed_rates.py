"""All ranks choose by one set of rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringopt.distributed import agreed_rates as module
from ringopt.hardware.rates import Rates, cautious
from tests.harness.threads import ThreadMesh, run_on_threads


def sources(monkeypatch: pytest.MonkeyPatch, *mine: Rates) -> list[tuple[str, float]]:
    """Where the rates of each rank are from, and their link's."""

    def body(mesh: ThreadMesh) -> Rates:
        return module.agreed_rates(mesh)

    ranks = iter(mine)
    monkeypatch.setattr(module, "cleanly", lambda device: (next(ranks), ""))
    return [(rates.source, rates.link.rate) for rates in run_on_threads(len(mine), body)]


def test_rates_that_all_ranks_have_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources(monkeypatch, cautious(), cautious()) == 2 * [(cautious().source, cautious().link.rate)]


def test_of_different_ones_those_of_rank_0_are_taken_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(cautious(), link=replace(cautious().link, rate=7.0))
    one, two = sources(monkeypatch, cautious(), other)
    assert one == two and one[0].endswith("(of rank 0; other ranks have other rates)") and one[1] != two[0]
