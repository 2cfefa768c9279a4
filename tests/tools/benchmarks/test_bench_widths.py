"""`ringopt bench widths`: its rows, of layers that are not wide."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringopt.tools.benchmarks.lab.numbers import WRONG
from ringopt.tools.benchmarks.models import real_widths
from ringopt.tools.benchmarks.models.real_widths import FAMILIES, Family, build_wide
from ringopt.tools.benchmarks.workers import widths
from ringopt.tools.benchmarks.workers.widths import Wide, over_ranks
from ringopt.tools.cli import main
from ringopt.tools.common.command import WIDTH
from ringopt.tools.common.resident import STATUS
from tests.harness.benches import tables

NARROW = Family(
    "llama",
    {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "hardly any width",
)


def on_a_rank(wide: Wide) -> dict[str, Any]:
    """In a process that has been started already."""
    with patch.object(widths, "begin_rank"):
        return over_ranks(dist.get_rank(), dist.get_world_size(), wide)


def test_rows_of_widths(ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def as_ranks(count: int, _function: object, wide: Wide, timeout: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ranks(count, on_a_rank, wide)
        return found

    words = ["widths", "--lengths", "67", "--repeats", "1", "--inner", "aot_eager"]
    with patch.object(widths, "as_ranks", as_ranks), patch.object(real_widths, "FAMILIES", {"narrow": NARROW}):
        found = tables(*words, str(tmp_path / "widths.json"))
    (row,) = found["rows"]
    assert row["error"] < WRONG and found["totals"] == {"rows": 1, "wrong": 0}
    parameters = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 1024 * 32
    assert row["parameters"] == parameters and row["sent"] > 4 * parameters  # their gradients are summed over the ranks
    held = [row[f"{who}{what}"] for who in ("alone_", "") for what in ("kept", "peak")]
    assert all(size is not None and size >= 0 for size in held) if STATUS.exists() else held == [None] * 4
    printed, shown = capsys.readouterr()
    assert shown.index("narrow: M p. ") < shown.index("; n 67; alone first ")  # when it is there
    assert "narrow: hardly any width." in printed
    assert max(map(len, printed.splitlines())) <= WIDTH and "…" not in printed


@pytest.mark.parametrize(
    ("name", "times", "words", "left_out", "billions"),
    [
        ("Llama-3-8B", (16, 16), 128256, 0, 8.03),
        ("DeepSeek-V2-Lite", (1, 26), 102400, 0, 15.7),
        ("Qwen3-Next-80B", (36, 12), 151936, 480, 79.7),
    ],
)
def test_layers_are_those_of_the_model(
    name: str, times: tuple[int, int], words: int, left_out: int, billions: float
) -> None:
    """As often as the model has each, with all of its experts and words, they have its number of parameters."""
    family = FAMILIES[name]
    with torch.device("meta"):
        model = build_wide(family)
    width = family.sizes["hidden_size"]
    experts = left_out * 3 * width * family.sizes.get("moe_intermediate_size", 0)
    layers = [sum(x.numel() for x in layer.parameters()) + experts for layer in model.model.layers]
    whole = sum(count * size for count, size in zip(times, layers, strict=True)) + 2 * words * width
    assert whole / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_family_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "widths", "--only", "llama"]) == 2
    assert f"--only llama: expected one of {', '.join(FAMILIES)}" in capsys.readouterr().err
