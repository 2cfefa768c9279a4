"""Links of known speed, and what happens to ranks when one is cut, mended, or a peer is killed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringopt.distributed.lookup import process_mesh
from ringopt.errors import RingCommError
from ringopt.tools import bench
from ringopt.tools.benchmarks.lab import link_lab
from ringopt.tools.benchmarks.lab.emulated_link import EmulatedLink
from ringopt.tools.benchmarks.lab.link_lab import LabError, LinkLab, as_ranks, why_unavailable
from ringopt.tools.benchmarks.lab.machine import this_machine
from ringopt.tools.benchmarks.lab.result import Result
from ringopt.tools.benchmarks.tables import overlap
from ringopt.tools.benchmarks.workers.overlap import rows_of
from ringopt.tools.benchmarks.workers.overlap_rank import OverlapCase
from ringopt.tools.cli import main
from ringopt.tools.common.command import WIDTH
from tests.harness.threads import ThreadMesh, run_on_threads

STARTED_OUTSIDE = link_lab.context  # the tests fork their ranks, see tests/conftest.py
UNAVAILABLE = why_unavailable()
LAB = pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
TIMEOUT = 5.0  # also for a busy machine to start its ranks


# ---- faults ----------------------------------------------------------------------------------------------------------
def rounds(rank: int, ranks: int, folder: str, seconds: float) -> str:
    """Exchanges messages until all agree that `seconds` are over. Touches a file when the first have arrived."""
    dist.init_process_group("gloo")
    mesh = process_mesh(None, TIMEOUT)
    begin = last = time.monotonic()
    try:
        for number in range(1_000_000):
            sent, came = torch.zeros(100_000), torch.empty(100_000)
            mesh.exchange([((rank + 1) % ranks, sent)], [((rank - 1) % ranks, came)], f"round {number}").wait()
            if mesh.all_reduce(torch.tensor(float(time.monotonic() - begin > seconds)), "enough") > 0:
                return "done"
            last = time.monotonic()
            if number == 2:
                Path(folder, str(rank)).touch()
    except RingCommError as error:
        return f"{time.monotonic() - last:.1f} {error}"
    return "never"


def when_under_way(folder: Path, act: Any) -> Any:
    def meanwhile(lab: LinkLab) -> None:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < lab.ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        act(lab)

    return meanwhile


@LAB
def test_a_link_that_is_cut_and_mended_goes_on(tmp_path: Path) -> None:
    def blink(lab: LinkLab) -> None:
        lab.cut(1)
        time.sleep(1.0)
        lab.mend(1)

    with LinkLab(2, 400) as lab:
        outcomes = lab.outcomes(rounds, str(tmp_path), 2.0, timeout=60, meanwhile=when_under_way(tmp_path, blink))
    # TCP waits ever longer before it tries again: if that takes longer than the timeout, it is an error on both.
    values = {outcome.value for outcome in outcomes}
    assert values == {"done"} or all("failed after" in value for value in values)


@LAB
def test_a_link_that_is_cut_is_an_error_on_both_ranks(tmp_path: Path) -> None:
    with LinkLab(2, 400) as lab:
        cut = when_under_way(tmp_path, lambda lab: lab.cut(1))
        outcomes = lab.outcomes(rounds, str(tmp_path), 60.0, timeout=60, meanwhile=cut)
    for rank, outcome in enumerate(outcomes):
        seconds, said = outcome.value.split(" ", 1)
        assert float(seconds) < TIMEOUT + 5
        assert f"rank {rank} of 2" in said and "failed after" in said


@LAB
def test_a_killed_rank_is_an_error_on_its_neighbours(tmp_path: Path) -> None:
    with LinkLab(3, 400) as lab:
        kill = when_under_way(tmp_path, lambda lab: lab.kill(1))
        outcomes = lab.outcomes(rounds, str(tmp_path), 60.0, timeout=60, meanwhile=kill)
    assert outcomes[1].error == "died: SIGKILL"
    for rank in (0, 2):
        seconds, said = outcomes[rank].value.split(" ", 1)
        assert float(seconds) < TIMEOUT + 5
        assert f"rank {rank} of 3" in said


# ---- the lab ---------------------------------------------------------------------------------------------------------
@LAB
def test_nothing_is_left_behind() -> None:
    with pytest.raises(KeyboardInterrupt), LinkLab(2, 400) as lab:
        assert Path(link_lab.NAMESPACES, lab.namespace(1)).exists()
        raise KeyboardInterrupt
    assert not list(link_lab.NAMESPACES.glob(f"{lab.name}*"))


def nothing(rank: int, ranks: int) -> int:
    return rank


def fails(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")


@pytest.mark.zoo
def test_the_error_of_a_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processes that are started as outside the tests."""
    monkeypatch.setattr(link_lab, "context", STARTED_OUTSIDE)
    with pytest.raises(LabError, match=r"^rank 1: ValueError: of rank 1$"):
        as_ranks(2, fails)


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("linux", "network namespaces need Linux, and this is darwin"),
        ("root", "making network namespaces takes root, and this is user 7"),
        ("tools", "tc not found; install iproute2"),
    ],
)
def test_what_is_missing_is_named(missing: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin" if missing == "linux" else "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 7 if missing == "root" else 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert why_unavailable() == sentence
    with pytest.raises(LabError, match=f"no link lab on this machine: {sentence}"), LinkLab(2, 400):
        pass


# ---- emulated links --------------------------------------------------------------------------------------------------
def test_an_emulated_link_carries_one_message_after_the_other() -> None:
    rate = 1e6

    def body(mesh: ThreadMesh) -> tuple[float, bool]:
        link = EmulatedLink(mesh, rate, latency=0.01)
        sent, came = [torch.full((5000,), float(mesh.rank)) for _ in range(2)], [torch.empty(5000) for _ in range(2)]
        begin = time.monotonic()
        works = [
            link.exchange([(1 - mesh.rank, a)], [(1 - mesh.rank, b)], str(i))
            for i, (a, b) in enumerate(zip(sent, came, strict=True))
        ]
        for work in works:
            work.wait()
        return time.monotonic() - begin, all(bool((x == 1 - mesh.rank).all()) for x in came)

    for seconds, right in run_on_threads(2, body):
        assert right
        assert seconds >= 2 * 20_000 / rate + 0.01


@pytest.mark.zoo
def test_rows_of_overlap() -> None:
    slept = OverlapCase("full", 64, 2, slept=True)
    cases = [OverlapCase("causal", 64, 2), slept, OverlapCase("causal", 64, 2, slept=True, hoisted=True)]
    rows = rows_of(cases, [0.5, 1.0], 1, emulated=True)
    assert [row["pass"] for row in rows] == 3 * ["forward", "forward", "backward", "backward"]
    assert [row["slept"] for row in rows] == 4 * [False] + 8 * [True]
    assert [row["written"] is not None for row in rows] == 8 * [False] + 4 * [True]
    for row in rows:
        assert row["error"] < 1e-5
        assert row["rate"] > 0 and row["total"] > 0 and row["moving"] >= 0 and row["exposed"] >= 0


def test_the_table_of_overlap_fits(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"pattern": "causal", "length": 16384, "ranks": 8, "slept": False, "hoisted": True, "pass": "backward"}
    row |= dict.fromkeys(("compute", "exchange", "moving", "total", "exposed", "written"), 12.345)
    row |= {"rate": 1.25e9, "hidden": 1.01, "over_longer": 12.25, "error": 1.5e-7}
    bench.show(this_machine(), Result("title", overlap.COLUMNS, [row], {}, (), (), overlap.KEYS))
    printed = capsys.readouterr().out
    assert "…" not in printed and "hoisted b" in printed and max(map(len, printed.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "1"], "one rank has nobody to exchange with: 2 or more"),
        (["--shares", "x"], "'x' is not a number from 0.01 to 100"),
        (["--shares", "0"], "'0' is not a number from 0.01 to 100"),
    ],
)
def test_nonsense_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "overlap", *words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err
