"""`ringopt bench one-process`: its rows, its memory, and that its models are what their names say."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ringopt
from ringopt.tools import bench
from ringopt.tools.benchmarks.lab.machine import this_machine
from ringopt.tools.benchmarks.lab.numbers import WRONG
from ringopt.tools.benchmarks.models.small_models import CASES, DEPTH, HEADS, build
from ringopt.tools.benchmarks.tables import one_process
from ringopt.tools.benchmarks.workers import one_process as beside
from ringopt.tools.common.command import WIDTH
from ringopt.tools.common.resident import STATUS
from tests.harness.benches import tables


def without_code_generation(model: torch.nn.Module, backend: str, compile: Any = torch.compile) -> Any:
    """Compiling C++ takes the better part of a minute."""
    if backend == "ring":
        return compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    return compile(model, backend="aot_eager")


@pytest.mark.zoo
def test_rows_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["one-process", "--lengths", "16", "--repeats", "1", "--only", "causal", "sdpa"]
    held = dict.fromkeys(("inference", "training"), 2**20 if STATUS.exists() else None)
    with patch.object(torch, "compile", without_code_generation), patch.object(beside, "peaks", lambda *_: held):
        result = tables(*asked, str(tmp_path / "one.json"))
    assert [(row["model"], row["length"], row["mode"]) for row in result["rows"]] == [
        ("sdpa", 16, "inference"),
        ("sdpa", 16, "training"),
        ("causal", 16, "inference"),
        ("causal", 16, "training"),
    ]
    for row in result["rows"]:
        assert row["ring_error"] < WRONG and row["inductor_error"] < WRONG
        assert row["time_ratio"] == pytest.approx(row["ring_seconds"] / row["inductor_seconds"])
        assert (row["ring_bytes"] is not None) == STATUS.exists()
    assert result["totals"]["rows"] == 4 and result["totals"]["ring_wrong"] == 0
    assert list(result["totals"]["ratios"]) == ["SDPA", "spelled out"]
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= WIDTH and "\x1b" not in "".join(printed)
    told = " ".join(" ".join(printed[:2]).split())  # the name of a processor may take most of a line
    assert f"torch {torch.__version__}, ringopt {ringopt.__version__}" in told


@pytest.mark.zoo
@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc")
def test_the_peak_is_that_of_one_call() -> None:
    """In eager both layers hold scores of 4 * 8 * n^2 bytes and what is made of them; in training for the backward."""
    found, scores = beside.peaks("plain", 512, "eager"), 4 * HEADS * 512**2
    assert found["inference"] is not None and found["training"] is not None
    assert scores < found["inference"] < found["training"] < 20 * scores


def test_wide_numbers_fit_too(capsys: pytest.CaptureFixture[str]) -> None:
    numbers_of = {f"{who}_{what}": value for who in one_process.BACKENDS for what, value in WIDE.items()}
    row = {"model": "sdpa-causal", "length": 65536, "mode": "inference", "time_ratio": 10.25, "memory_ratio": 0.01}
    result = one_process.Result("title", one_process.COLUMNS, [row | numbers_of], {}, (), (), one_process.KEYS)
    bench.show(this_machine(), result)
    printed = capsys.readouterr().out
    assert "…" not in printed and "12,345.7" in printed
    assert max(map(len, printed.splitlines())) <= WIDTH


WIDE = {"seconds": 12.3456789, "bytes": 20 * 2**30, "error": 1.234e-7}


@pytest.mark.parametrize("name", CASES)
def test_every_model_is_what_its_name_says(name: str) -> None:
    """One layer, against SDPA with the mask written down here."""
    length = 8
    model, x, kept = build(name, length)
    layer = model.eval().layers[0]
    expected, groups = MASKS.get(name, lambda kept: None)(kept), HEADS // CASES[name].kv_heads
    sizes = [HEADS * DEPTH, HEADS // groups * DEPTH, HEADS // groups * DEPTH]
    q, k, v = (part.unflatten(-1, (-1, DEPTH)).transpose(1, 2) for part in layer.project(x).split(sizes, -1))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, expected, enable_gqa=groups > 1)
    torch.testing.assert_close(layer(x, kept), layer.out(mixed.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-6)


def triangle(kept: torch.Tensor) -> torch.Tensor:
    length = kept.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril()


def slopes(kept: torch.Tensor) -> torch.Tensor:
    places = torch.arange(kept.shape[1])
    bias = torch.tensor([2.0**-head for head in range(1, HEADS + 1)]).view(-1, 1, 1) * (places - places[:, None])
    return bias.masked_fill(~triangle(kept), float("-inf"))


MASKS = {
    "causal": triangle,
    "gqa": triangle,
    "sdpa-causal": triangle,
    "sdpa-gqa": triangle,
    "dropout-values": triangle,
    "alibi": slopes,
    "padding": lambda kept: kept.bool()[:, None, None],
}
