"""`ringopt bench memory`: its rows, its peers, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringopt.cost.simulate import Heads
from ringopt.distributed.lookup import process_mesh
from ringopt.tools import bench
from ringopt.tools.benchmarks.lab import names
from ringopt.tools.benchmarks.lab.machine import this_machine
from ringopt.tools.benchmarks.lab.memory_peers import peers
from ringopt.tools.benchmarks.lab.names import TORCH
from ringopt.tools.benchmarks.lab.numbers import WRONG
from ringopt.tools.benchmarks.lab.result import Result, Row
from ringopt.tools.benchmarks.lab.tensor_bytes import peak_bytes
from ringopt.tools.benchmarks.tables import memory
from ringopt.tools.benchmarks.workers.memory import error, row_of
from ringopt.tools.cli import main
from ringopt.tools.common.command import WIDTH
from tests.harness.benches import tables

SMALL = Heads(1, 2, 2, 16, 16, 4, 4, "float32", "flash_cpu")
LENGTH = 64


@pytest.mark.zoo  # 35 attentions, each on two processes
def test_rows_of_memory(tmp_path: Path) -> None:
    found = tables("memory", "--length", "64", "--ranks", "2", str(tmp_path / "memory.json"))
    assert {row["strategy"] for row in found["rows"]} == {*names.STRATEGIES, *names.PEERS}
    assert {row["ranks"] for row in found["rows"]} == {2} and found["totals"]["slope"] is None
    assert max(row["error"] for row in found["rows"]) < WRONG and found["totals"]["wrong"] == 0


def test_the_memory_of_one_rank_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--ranks", "1", "2"]) == 2
    said = "ringopt: error: --ranks 1: one process has nobody to exchange with; expected 2 or more\n"
    assert capsys.readouterr().err == said


# ---- peers -----------------------------------------------------------------------------------------------------------


def of_peers() -> list[Row]:
    mesh = process_mesh()
    every = peers(mesh.size, LENGTH, SMALL, list(names.PATTERNS))
    return [row_of(mesh, each) | {"error": error(mesh, each)} for each in every]


@pytest.mark.parametrize("p", [2, 4])
def test_peers_hold_what_they_must_and_are_right(ranks: Any, p: int) -> None:
    """An all-gather holds keys and values of all rows, and in training their gradients as well; torch's ring has no
    window and no backward here."""
    found = list(zip(*ranks(p, of_peers), strict=True))
    assert max(rank["error"] for each in found for rank in each) < WRONG
    rows = [memory.largest(list(each)) for each in found]
    both = [(pattern, who) for pattern in ("full", "causal") for who in names.PEERS]
    assert [(row["pattern"], row["strategy"]) for row in rows] == [*both, ("window(512)", "all-gather")]
    keys_and_values = 2 * LENGTH * SMALL.kv_heads * SMALL.key_dim * 4
    for row in rows:
        assert row["forward predicted"] is row["forward off"] is row["training predicted"] is None
        assert (row["training"] is None) == (row["strategy"] in TORCH)
        assert row["forward"] > (2 * keys_and_values / p if row["training"] is None else keys_and_values)
        assert row["training"] is None or row["training"] > 2 * keys_and_values


def test_shards_that_are_not_equal_have_no_peers() -> None:
    assert not list(peers(2, 66, SMALL, ["full"])) and list(peers(2, 68, SMALL, ["full"]))


def gathered() -> tuple[int, int]:
    """Bytes held by an all-gather, and bytes gathered."""
    x = torch.ones(2**16)

    def gather() -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return parts

    return min(peak_bytes(gather) for _ in range(5)), x.nbytes * dist.get_world_size()


def test_what_gloo_holds_for_a_message_is_counted_when_it_is_held(ranks: Any) -> None:
    """Its threads gather in a buffer of their own, beside the tensors that they fill then."""
    for held, moved in ranks(2, gathered):
        assert 2 * moved <= held < 2.5 * moved


# ---- what the table says ---------------------------------------------------------------------------------------------


def row(strategy: str, ranks: int, forward: int, training: int | None, peer: bool = False) -> Row:
    sizes = {"forward": forward, "training": training, "error": 1e-6}
    off = {"forward off": None if peer else 0.02, "training off": None if peer else -0.03}
    return {"pattern": "full", "strategy": strategy, "ranks": ranks, **sizes, **off}


def test_the_memory_of_the_ring_beside_1_over_p() -> None:
    sums = memory.totals([row("ring", 2, 100, 200), row("ring", 4, 52, 90), row("ring", 8, 23, 45)])
    said = "ring falls as 1/p within 8%; predictions within 3% of measured"
    assert memory.sentences(sums) == (said,)
    assert memory.sentences(memory.totals([row("ring", 4, 52, 90)])) == ("predictions within 3% of measured",)


def test_who_holds_least_and_does_the_ring() -> None:
    ours = [row("ring", 2, 100, 240), row("ring", 4, 50, 120), row("ring_q", 4, 55, 110), row("ring", 8, 25, 60)]
    gather = [row("all-gather", ranks, 200, 220, peer=True) for ranks in (2, 4, 8)]
    rings = [row("torch ring", ranks, 90 if ranks == 2 else 60, None, peer=True) for ranks in (2, 4, 8)]
    sums = memory.totals([*ours, *gather, *rings])
    assert memory.sentences(sums)[1:] == (
        "holds least (on so many ranks): full f torch ring (2), ring (4, 8); "
        "full f+b all-gather (2), ring_q (4), ring (8)",
        "from 4 ranks on the ring holds at most, of the lowest peer: full f 0.83, full f+b 0.55; "
        "it is the lowest of all but in full f+b (1.091 of the least)",
    )
    assert memory.sentences(memory.totals([*ours[1:2], *gather[1:2]]))[2].endswith("it is the lowest of all")
    assert sums["least"][0] == {
        "way": "forward", "pattern": "full", "ranks": 2, "strategy": "torch ring", "peer": "torch ring",
        "ring over least": 100 / 90, "ring over peer": 100 / 90,
    }  # fmt: skip


def test_the_table_fits(capsys: pytest.CaptureFixture[str]) -> None:
    long = {"pattern": "window(512)", "strategy": "torch ring, all-to-all", "ranks": 8, "error": 1.5e-7}
    sizes = dict.fromkeys(("forward", "training", "forward predicted", "training predicted"), 123 * memory.MIB)
    found = long | sizes | {"forward off": -0.11, "training off": None}
    bench.show(this_machine(), Result("title", memory.COLUMNS, [found], {}, (), (), memory.KEYS))
    printed = capsys.readouterr().out
    assert "…" not in printed and max(map(len, printed.splitlines())) <= WIDTH
