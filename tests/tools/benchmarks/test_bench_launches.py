"""Budgets of what a rank launches on a GPU, and that it reads no number back, on tensors without numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringopt.context_parallel.executor.operands import spread_nan
from ringopt.hardware.to_host import to_host
from ringopt.ops.ring_misfits import agree_on_seeds
from ringopt.tools.benchmarks.lab.fake_cuda import LaunchCounter, fake_cuda, missing
from ringopt.tools.benchmarks.workers.launches import MASKS, Counting, Shape, launched
from ringopt.tools.cli import main
from tests.harness.benches import tables

COMPILER = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a compiler")

# Attention calls and other launches, forward and backward: at most, for rank 3 of 8 at 8192 tokens a rank, 32 heads
# over 8. One call for each block of the plan; of the results four are merged in one launch.
BUDGETS = {
    "causal": ((16, 8), (16, 45)),
    "sinks": ((16, 16), (16, 55)),
    "padding": ((16, 9), (16, 45)),
    "documents": ((16, 9), (16, 45)),
    "window": ((2, 3), (2, 17)),
    "softcap": ((16, 8), (16, 45)),
    "alibi": ((16, 9), (16, 45)),
    "dropout": ((16, 8), (16, 45)),
}
READ = ("padding", "documents", "alibi")  # masks that read tensors


@COMPILER
@pytest.mark.parametrize("mask", BUDGETS)
def test_launches_are_few_and_nothing_is_read_back(mask: str) -> None:
    layout = "contiguous" if mask == "window" else "zigzag"
    for row, (attention, others) in zip(launched(Shape(mask, layout=layout), 3), BUDGETS[mask], strict=True):
        assert row["reads"] == 0
        assert row["copies"] == (row["way"] == "forward" and mask in READ), "what a mask reads comes at once, and once"
        assert row["attention"] <= attention and row["others"] <= others, row


@COMPILER
def test_layers_share_what_their_mask_reads() -> None:
    forward, backward = launched(Shape("padding", tokens=64, layers=3), 3)
    assert (forward["copies"], backward["copies"], forward["reads"], backward["reads"]) == (1, 0, 0, 0)
    assert forward["attention"] == backward["attention"] == 48


@COMPILER
def test_one_exchange_has_one_batch_a_hop() -> None:
    forward, backward = launched(Shape(), 3)
    assert (forward["batches"], backward["batches"]) == (7, 14)


@pytest.mark.sample(3)
@COMPILER
@pytest.mark.parametrize("strategy", ["gather", "ring_q", "ulysses"])
def test_no_strategy_reads_back(strategy: str) -> None:
    for row in launched(Shape("padding", tokens=64, strategy=strategy), 1):
        assert row["reads"] == 0 and row["attention"] > 0


@COMPILER
def test_reads_and_copies_are_counted() -> None:
    with fake_cuda():
        x = torch.zeros(4, device="cuda")
        with LaunchCounter() as watched:
            assert x.sum().item() == 0.5 and bool((x > 0).any())
            (there,) = to_host([x])()
            spread_nan(x.view(1, 1, 4, 1), [x], torch.zeros(1, 1, 4, dtype=torch.bool, device="cuda"))
    assert there.device.type == "cpu" and (watched.reads, watched.copies) == (2, 1)


@COMPILER
def test_seeds_are_agreed_on_without_reading_them() -> None:
    """The numbers of a call are on the host when the next one reads them there."""
    with fake_cuda():
        mesh = Counting(1, 4)
        mesh.device = torch.device("cuda")
        seed = torch.zeros((), dtype=torch.int64, device="cuda")
        with LaunchCounter() as watched:
            agreed = agree_on_seeds(mesh, seed)
            assert mesh.seeds_arriving is not None and mesh.seeds_arriving()[0].device.type == "cpu"
    assert agreed.is_cuda and (watched.reads, watched.copies) == (0, 1)


def test_what_is_on_the_host_is_not_copied() -> None:
    given = [torch.ones(2), torch.ones(3)]
    assert all(one is other for one, other in zip(to_host(given)(), given, strict=True)) and to_host([])() == []


@COMPILER
def test_rows(tmp_path: Path) -> None:
    small = ("--tokens-per-rank", "32", "--world-size", "4", "--heads", "4", "--kv-heads", "2")
    found = tables("launches", *small, str(tmp_path / "launches.json"))
    assert [row["mask"] for row in found["rows"][::2]] == list(MASKS)
    assert all(row["reads"] == 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--hardware", "cpu"), "--hardware cpu: it is no GPU"),
        (("--hardware", "h101"), "hardware 'h101' is unknown"),
        (("--rank", "8"), "--rank 8: there are 8 ranks, from 0 on"),
        (("--mask", "holes"), "--only holes: expected one of causal"),
    ],
)
def test_refusals(words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "--hardware" not in words and missing():
        pytest.skip(missing())
    assert main(["bench", "launches", *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
