"""`ringopt bench scan`: its rows, and that its layers are what their names say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ringopt.tools.benchmarks.lab.link_lab import LabError
from ringopt.tools.benchmarks.lab.numbers import WRONG
from ringopt.tools.benchmarks.models.recurrent_layers import Loop, gated_delta_rule, state_space
from ringopt.tools.benchmarks.workers import scan
from ringopt.tools.common.command import WIDTH
from ringopt.tools.common.resident import STATUS
from tests.harness.benches import tables

OF_RANK = {
    **{"states_seconds": 0.1, "heads_seconds": 0.4, "gathered_seconds": 0.3, "apart_seconds": 0.1},
    **{"alone_seconds": 0.2, "states_error": 1e-7},
    **{"states_bytes": 10 * 2**20, "gathered_bytes": 20 * 2**20, "sent": 2**11, "formula": 2**11},
}


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_rows_of_scans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process here; what ranks find is made up. At the longer one, what Inductor does takes too long."""

    def here(ranks: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        if function is scan.over_ranks:
            return [OF_RANK] * ranks
        if function is scan.alone and args[0].length == 256 and args[1] != "ring":
            raise LabError("rank 0: it took longer than 9 s")
        return [function(0, ranks, *args)]

    with patch.object(scan, "as_ranks", here), patch.object(torch, "set_num_threads"):
        asked = ["--lengths", "128", "256", "--repeats", "1", "--only", "mamba2", "--inner", "aot_eager"]
        found = tables("scan", *asked, str(tmp_path / "scan.json"))
    short, long = found["rows"]
    for row in (short, long):
        assert row["ring_error"] < WRONG and found["totals"] == {"rows": 2, "wrong": 0}
        faster = [row[f"faster_{way}"] for way in ("states", "heads", "gathered", "apart")]
        assert faster == pytest.approx([2, 1 / 2, 2 / 3, 2])
        assert (row["plain_seconds"] is None) == (row is long) == bool(row["failed"])
    assert short["ring_nodes"] == long["ring_nodes"] > 50
    printed, shown = capsys.readouterr()
    assert shown.index("mamba2: heads 4; n 128; ") < shown.index("mamba2: heads 4; n 256; ")  # each when it is there
    assert "n = 256, as written: rank 0: it took longer than 9 s" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= WIDTH and "…" not in printed


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def test_the_gated_delta_rule_is_that_of_its_tokens() -> None:
    torch.manual_seed(0)
    heads, length = 2, 100
    q, k, v = (drawn(1, heads, length, 64) for _ in range(3))
    k, decay, beta = k / k.norm(dim=-1, keepdim=True), -0.1 * drawn(1, heads, length).abs(), drawn(1, heads, length)
    state, rows = torch.zeros(1, heads, 64, 64).double(), []
    for t in range(length):
        state = state * decay[:, :, t, None, None].exp()
        new = beta[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0])
        state = state + k[:, :, t, :, None] * new[:, :, None]
        rows.append((q[:, :, t, None] @ state)[:, :, 0] / 8)
    for loop in get_args(Loop):
        found = gated_delta_rule(q, k, v, decay, beta, loop)
        torch.testing.assert_close(found, torch.stack(rows, 2), rtol=1e-9, atol=1e-9)


def test_the_state_space_is_that_of_its_tokens() -> None:
    torch.manual_seed(0)
    heads, length = 2, 128
    value, decay = drawn(1, length, heads, 5), -0.1 * drawn(1, length, heads).abs()
    key, query = drawn(1, length, 3), drawn(1, length, 3)
    state, rows = torch.zeros(1, heads, 5, 3).double(), []
    for t in range(length):
        state = state * decay[:, t, :, None, None].exp() + value[:, t, :, :, None] * key[:, t, None, None]
        rows.append((state * query[:, t, None, None]).sum(-1))
    torch.testing.assert_close(state_space(value, decay, key, query), torch.stack(rows, 1), rtol=1e-9, atol=1e-9)
