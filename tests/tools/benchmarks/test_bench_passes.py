"""`ringopt bench passes`: its rows on real ranks, and the table made of them. No time is asserted."""

from __future__ import annotations

import argparse
from unittest.mock import MagicMock, patch

import pytest

from ringopt.tools.benchmarks.lab import link_lab
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.tables import passes
from ringopt.tools.benchmarks.workers.passes import inductor, of_decoder


@pytest.mark.zoo
def test_a_row_on_each_rank(ranks) -> None:
    for row in ranks(2, of_decoder, 1, 1):
        assert row["layers"] == 1 and row["error"] < 1e-5
        assert row["nodes"] > 50 and row["node"] == row["passes"] / row["nodes"] > 0


def test_a_table_of_rows() -> None:
    def as_ranks(count: int, function: object, *_arguments: object, timeout: float) -> list[object]:
        if function is inductor:
            return [[4.0, 8.0]]
        some: Row = {"layers": 1, "nodes": 100, "passes": 0.2, "node": 2e-3, "error": 1e-7}
        more: Row = {"layers": 2, "nodes": 200, "passes": 0.3, "node": 1.5e-3, "error": 3e-7}
        return [[some, more], [some | {"error": 2e-7}, more]]

    arguments = argparse.Namespace(layers=[1, 2], repeats=1)
    with patch.object(link_lab, "as_ranks", as_ranks):
        result = passes.measure(arguments, MagicMock())
    assert result.totals == {"node": 2e-3, "share": 0.05, "error": 3e-7}
    cells = [[column.cell(row) for column in result.columns] for row in result.rows]
    assert cells == [
        ["1", "100", "0.20", "2.00", "4.0", "5.0%", "2e-07"],
        ["2", "200", "0.30", "1.50", "8.0", "3.8%", "3e-07"],
    ]
    assert result.sentences == ("at most 2.00 ms a node and 5.0% of Inductor's compilation",)
