"""`ringopt bench gpu` in small on the CPU: it runs, and what it should notice is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringopt.distributed.mesh import Mesh
from ringopt.kernels.base import TileInputs
from ringopt.kernels.cpu_flash import CpuFlash
from ringopt.tools.benchmarks.gpu import checks
from ringopt.tools.benchmarks.gpu.processes import worst
from ringopt.tools.benchmarks.gpu.stream_mesh import StreamMesh
from ringopt.tools.benchmarks.tables.gpu import PARTS
from ringopt.tools.cli import main
from tests.harness.benches import tables

CPU = torch.device("cpu")


def test_it_runs_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MASKS", ("window", "dropout"))
    monkeypatch.setattr(checks, "STRATEGIES", ("ring", "ulysses"))
    found = tables("gpu", "--only", "kernels", "sums", "ranks", "speed", str(tmp_path / "gpu.json"))
    verdicts = {row["what"]: row["verdict"] for row in found["rows"]}
    assert found["totals"]["wrong"] == 0 and found["totals"]["right"] >= 4 + 5
    assert verdicts["dropout, ulysses, 8 ranks"] == verdicts["math, heads of 64"] == "right"
    assert {row["part"] for row in found["rows"]} == {"kernels", "sums", "ranks", "speed", "prediction", "memory"}
    assert all(row["why"] for row in found["rows"] if row["verdict"] == "not run")


@pytest.mark.zoo
@pytest.mark.parametrize("how", [("--only", "compiled"), ("--ranks", "2")])
def test_the_rest_runs_in_small(how: tuple[str, str], tmp_path: Path) -> None:
    found = tables("gpu", *how, str(tmp_path / "gpu.json"))
    assert found["totals"]["wrong"] == 0 and found["totals"]["right"] > 0


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CpuFlash._forward

    def off(self: CpuFlash, tile: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(self, tile)
        return out, lse + 0.5 * (tile.mask is not None)

    monkeypatch.setattr(CpuFlash, "_forward", off)
    found = {row["what"]: row["verdict"] for row in checks.kernels(CPU, 16)}
    assert found["flash_cpu, heads of 64"] == "wrong" and found["math, heads of 64"] == "right"


def test_what_is_read_too_early_is_no_number() -> None:
    def body(mesh: Mesh) -> tuple[bool, float]:
        mine, theirs = torch.full((3,), float(mesh.rank)), torch.zeros(3)
        posted = mesh.exchange([(1 - mesh.rank, mine)], [(1 - mesh.rank, theirs)], "swap")
        early = bool(theirs.isnan().all())
        posted.wait()
        return early, float(theirs.sum())

    assert StreamMesh(2, CPU).run(body) == [(True, 3.0), (True, 0.0)]


def test_of_all_ranks_the_worst_counts() -> None:
    good, bad = (checks.verdict("processes", "causal", error) for error in (1e-3, 1.0))
    assert worst([[good], [bad], [good]]) == [bad] and bad["verdict"] == "wrong"


def test_unknown_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--only", "links"]) == 2
    assert f"--only links: expected one of {', '.join(PARTS)}" in " ".join(capsys.readouterr().err.split())
