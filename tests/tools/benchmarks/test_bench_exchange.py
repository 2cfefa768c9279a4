"""`ringopt bench exchange` and `ringopt bench --calibrate`: their rows, and that the numbers in them are right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ringopt.hardware import profile
from ringopt.hardware.devices import Link
from ringopt.hardware.rates import Rates, Speed
from ringopt.tools import bench
from ringopt.tools.benchmarks.lab.numbers import WRONG
from ringopt.tools.benchmarks.tables import exchange
from ringopt.tools.benchmarks.workers import calibrate as calibrate_ranks
from ringopt.tools.benchmarks.workers import exchange as exchange_ranks
from ringopt.tools.benchmarks.workers.overlap_rank import Times
from ringopt.tools.cli import main
from ringopt.tools.common.command import WIDTH


def once(runs: dict[str, Any], repeats: int) -> dict[str, Times]:
    """In the place of a measurement."""
    return {name: Times(number + 1.0, 0.0) for number, name in enumerate(runs)}


def rows_on_a_rank(rank: int, ranks: int) -> list[dict[str, Any]]:
    with patch.object(exchange_ranks, "together", once), patch.object(exchange_ranks, "begin_rank"):
        return exchange_ranks.on_a_rank(rank, ranks, list(exchange.PATTERNS.values()), 64, 2, 1)


def test_every_strategy_and_both_baselines_agree_with_dense_attention(ranks: Any) -> None:
    rows = [exchange.row_of(list(both)) for both in zip(*ranks(2, on_ranks), strict=True)]
    assert [(row["pattern"], row["mode"]) for row in rows] == [
        (pattern, mode) for pattern in exchange.PATTERNS.values() for mode in ("inference", "training")
    ]
    for row in rows:
        assert max(row["errors"].values()) < WRONG, row["errors"]
        assert {"ring", "gather", "ulysses", "auto", "all-gather"} <= set(row["seconds"])
        windowed = row["pattern"] == "window(512)"
        assert set(exchange.TORCH).isdisjoint(row["errors"]) == (row["mode"] == "training" or windowed)
        assert ("SDPA" in row["seconds"]) != windowed and (row["over_torch"] is None) == (row["torch"] is None)
        assert ("halo" in row["seconds"]) == (row["pattern"] == "window(512)")
        assert row["same"]["ring2"] == "ring" and row["chosen"] in row["seconds"]
    sums = exchange.totals(rows)
    assert sums["wrong"] == 0 and sums["over_best"] >= 1


def on_ranks() -> list[dict[str, Any]]:
    import torch.distributed as dist

    return rows_on_a_rank(dist.get_rank(), dist.get_world_size())


def test_the_table_fits(capsys: pytest.CaptureFixture[str]) -> None:
    from ringopt.tools.benchmarks.lab.machine import this_machine

    wide = {who: 12.3456 for who in exchange.WHO}
    row = {"pattern": "window(512)", "length": 8192, "mode": "training", "chosen": "ulysses", "layout": "zigzag"}
    ratios = {f"over_{who}": 1.25 for who in ("best", "gather", "all-gather", "torch", "SDPA")}
    row |= {"torch": 12.3456, "seconds": wide, "errors": {}, "error": 1.5e-7, "same": {}, **ratios}
    result = exchange.Result("title", exchange.COLUMNS, [row], {}, (), (), exchange.KEYS)
    bench.show(this_machine(), result)
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= WIDTH


def test_a_length_that_torch_cannot_cut_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exchange", "--lengths", "66"]) == 2
    assert "--lengths 66: torch's ring takes multiples of 4" in capsys.readouterr().err


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_overhead_and_rate_are_fitted_to_the_slower_rank() -> None:
    amounts = [1e6, 1e7, 1e8]
    fast, slow = ([(x, overhead + x / 1e9) for x in amounts] for overhead in (1e-3, 2e-3))
    speed = calibrate_ranks.fitted([fast, slow])
    assert speed.rate == pytest.approx(1e9) and speed.overhead == pytest.approx(2e-3)
    assert calibrate_ranks.fitted([[(x, x / 1e9) for x in amounts]]).overhead == pytest.approx(0.0, abs=1e-9)


def test_what_each_query_costs_beside_its_pairs_is_told_from_them() -> None:
    """Triangles of n queries, of which a kernel takes 512 keys at once."""
    sizes = [512, 1024, 2048, 4096]
    samples = [(n * n / 2, 1e-5 + (n * n / 2 + n * 256) / 1e9) for n in sizes]
    speed = calibrate_ranks.fitted([samples], sizes)
    assert speed.rate == pytest.approx(1e9) and speed.overhead == pytest.approx(1e-5, rel=1e-3)
    assert speed.query == pytest.approx(256e-9) and speed.seconds(2e9, 10) == pytest.approx(2 + 2.56e-6 + 1e-5)


def test_what_is_fixed_about_calls_is_what_their_tiles_and_steps_leave() -> None:
    """Of a machine on which a tile costs 10 us beside its FLOPs, a step 20 us, a call 30 us, and one of heads 50."""
    bare = Rates("bare", Link("wire", 1e9, 1e-5), Speed(1e11), touch=1e30)
    calls = {"keys forward": 3e-5, "queries forward": 3e-5, "heads forward": 5e-5}
    machine = dataclasses.replace(bare, default=Speed(1e11, 1e-5), step=2e-5)

    def seconds(name: str) -> tuple[float, float]:
        what = {"queries": "queries", "heads": "heads"}.get(name, "keys")
        forward, backward = (calibrate_ranks.predicted(name, machine, way) for way in (False, True))
        return forward + calls[f"{what} forward"], backward

    measured = {name: seconds(name) for name in calibrate_ranks.CALLS}
    found = calibrate_ranks.with_calls(calibrate_ranks.with_tiles(bare, measured), measured)
    assert found.default.overhead == pytest.approx(1e-5) and found.step == pytest.approx(2e-5)
    assert {name: found.calls[name] for name in calls} == pytest.approx(calls)


@pytest.mark.parametrize(("both", "part"), [(3.0, 1.0), (5.0, 0.0), (4.0, 0.5), (2.9, 1.0)])
def test_what_is_hidden_is_a_part_of_the_shorter(both: float, part: float) -> None:
    assert calibrate_ranks.hidden(compute=3.0, exchange=2.0, both=both) == part


def test_calibrating_writes_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what the ranks measure in place of measuring."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speeds = ("flash_cpu float32 forward full", "math float32 backward masked")
    samples = [(x, 1e-3 + x / 9e9) for x in (1e6, 1e7, 2e7, 5e7, 1e8, 1e9, 1e10)]
    calls = dict.fromkeys(calibrate_ranks.CALLS, (1e-3, 2e-3))
    kernels = {"tiles": dict.fromkeys(speeds, samples), "touch": 1e10, "calls": calls}
    beside = {"compute": 1.0, "exchange": 1.0, "both": 1.5}
    both_ways, one_way = [(1e3, 1e-3), (1e6, 2e-3), (2e6, 3e-3)], [(1e3, 4e-4), (1e6, 1.2e-3), (2e6, 3e-3)]
    link = {"both_ways": both_ways, "one_way": one_way, "beside": beside}
    found = iter([[kernels] * 2, [link] * 2])
    with patch("ringopt.tools.benchmarks.lab.link_lab.as_ranks", lambda *_: next(found)):
        assert main(["bench", "--calibrate"]) == 0
    said = capsys.readouterr().out
    (path,) = (tmp_path / "ringopt").iterdir()
    assert path.name in said.replace("\n", "") and "link between two processes" in said
    rates = profile.here()
    assert (rates.overlap, rates.touch) == (0.5, 1e10) and set(rates.speeds) == set(speeds)
    assert rates.link.one_way == pytest.approx(0.6)
    assert json.loads(path.read_text())["format"] == profile.FORMAT
    assert rates.speeds[speeds[0]].rate == pytest.approx(9e9)
