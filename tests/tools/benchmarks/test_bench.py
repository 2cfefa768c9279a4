"""`ringopt bench`: what its tables hold, their JSON, and what its errors say. No time is asserted."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ringopt
from ringopt.kernels.choose import KERNELS
from ringopt.kernels.math import Math
from ringopt.tools import bench
from ringopt.tools.benchmarks.lab.against import compared
from ringopt.tools.benchmarks.lab.machine import this_machine
from ringopt.tools.benchmarks.lab.numbers import WRONG, distance, numbers
from ringopt.tools.benchmarks.lab.result import Result
from ringopt.tools.benchmarks.lab.timing import interleaved
from ringopt.tools.benchmarks.models.real_widths import FAMILIES
from ringopt.tools.benchmarks.models.recurrent_layers import LAYERS
from ringopt.tools.benchmarks.models.small_models import CASES
from ringopt.tools.benchmarks.models.spellings import FORMS, LOOKALIKES
from ringopt.tools.benchmarks.tables import forms, gpu
from ringopt.tools.benchmarks.workers.forms import by_inductor, by_ringopt
from ringopt.tools.cli import main, parser
from tests.harness.benches import tables

# ---- forms -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("bench") / "forms.json"
    return tables("forms", "--only", "dropout_train", "softcap", "over_queries", str(target))


@pytest.mark.zoo
def test_a_row_of_forms(found: dict[str, Any]) -> None:
    rows = {row["form"]: row for row in found["rows"]}
    assert list(rows) == ["softcap", "dropout_train", "over_queries"]
    for name in ("softcap", "dropout_train"):
        assert rows[name]["ringopt_inference"] and rows[name]["ringopt_training"] and not rows[name]["lookalike"]
    assert rows["over_queries"]["lookalike"]
    assert not rows["over_queries"]["ringopt_inference"] and not rows["over_queries"]["ringopt_training"]
    assert all(row["ringopt_error"] < WRONG for row in rows.values())


def test_the_totals_of_forms_count_rows(found: dict[str, Any]) -> None:
    expected = {"forms": 2, "lookalikes": 1, "ringopt_inference": 2, "ringopt_training": 2}
    expected |= {"ringopt_left_alone": 1, "ringopt_wrong": 0}
    assert expected.items() <= found["totals"].items()
    assert set(found["totals"]) == {key.replace("ringopt", who) for key in expected for who in forms.WHO}


def test_the_machine_is_named(found: dict[str, Any]) -> None:
    machine = found["machine"]
    assert (machine["torch"], machine["ringopt"]) == (torch.__version__, ringopt.__version__)
    assert machine["cpu"] and machine["cores"] >= 1


def test_without_only_every_unfused_form_and_lookalike_has_a_row() -> None:
    arguments = argparse.Namespace(only=None)
    with patch.object(forms, "look", lambda name, lookalike: dict.fromkeys(ROW, 0) | {"lookalike": lookalike}):
        result = forms.measure(arguments, Silent())
    assert len(result.rows) == 26 + len(LOOKALIKES) == len(FORMS) - 2 + len(LOOKALIKES)


ROW = [f"{who}_{what}" for who in forms.WHO for what in ("inference", "training", "error")]


class Silent:
    """In the place of rich's progress."""

    def track(self, items: Any, description: str) -> Any:
        return items


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.zoo), True])
def test_inductor_is_asked_by_its_own_counter(training: bool) -> None:
    """The first of Inductor's patterns, and one that is not among them."""
    assert by_inductor("div_scale", training).rewritten
    assert not by_inductor("softcap", training).rewritten


@pytest.mark.zoo
def test_where_dropout_draws_no_numbers_are_compared() -> None:
    assert by_ringopt("dropout_train", True).error is None
    assert by_inductor("dropout_train", True).error is None
    assert by_ringopt("dropout_train", False).error is not None


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_calls_are_timed_by_turns() -> None:
    order: list[str] = []
    seconds = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abbaab"
    assert set(seconds) == {"a", "b"}


def test_the_median_is_taken() -> None:
    clock = iter([0, 1, 0, 2, 0, 90])
    with patch.object(time, "perf_counter", lambda: next(clock)):
        assert interleaved({"a": lambda: None}, 3) == {"a": 2}


def test_the_distance_is_that_of_the_worst_tensor() -> None:
    one, two = torch.tensor([4.0, 1.0]), torch.tensor([4.0, 2.0])
    assert distance([one, one], [one, two]) == 0.25
    assert distance([one * torch.nan], [one]) == float("inf")


def test_gradients_are_among_the_numbers() -> None:
    x, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    outputs, gradient, none = numbers(lambda x, unused: 3 * x, [x, unused], [x, unused])
    assert not outputs.requires_grad
    torch.testing.assert_close(gradient, torch.tensor([1.5, 4.5]))
    torch.testing.assert_close(none, torch.zeros(3))


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["forms", "--only", "softcup"], "--only softcup: expected one of div_scale, mul_scale, "),
        (["one-process", "--only", "mamba"], "--only mamba: expected one of sdpa, sdpa-causal, sdpa-gqa, plain, "),
        (["speedup", "--lengths", "3"], "--lengths 3: 2 ranks share 4 rows or more"),
        (["scan", "--lengths", "192"], "--lengths 192: 2 ranks have whole chunks of 64: a multiple of 128"),
        (["kernels", "--lengths", "64", "5"], "--lengths 5: 8 ranks share 16 rows or more"),
        (["overlap", "--lengths", "7"], "--lengths 7: 4 ranks share 8 rows or more"),
        (["forms", "--json", "not_there/forms.json"], "--json not_there/forms.json: there is no folder not_there"),
        (["forms", "--json", "."], "--json .: it is a folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_measuring(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"ringopt: error: {sentence}") and captured.out == ""


def test_what_fails_while_measuring_comes_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(forms, "look", side_effect=RuntimeError("no compiler\nmore of it")):
        assert main(["bench", "forms"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("ringopt: error: the measurement failed: RuntimeError: no compiler\n")
    assert "Traceback" in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "expected a TABLE, or --calibrate"),
        (["speed"], "invalid choice: 'speed' (choose from "),
        (["one-process", "--lengths", "0"], "'0' is not a whole number, 1 or more"),
        (["soak", "--ranks", "1"], "one rank has nobody to exchange with: 2 or more"),
        (["one-process", "--repeats", "x"], "'x' is not a whole number, 1 or more"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


KERNEL_NAMES = {"ring", "copy", *(kernel.name for kernel in KERNELS)}


@pytest.mark.parametrize("module", [bench, *bench.TABLES])
def test_the_examples_of_the_help_are_commands(module: Any) -> None:
    _, *examples = module.EXAMPLES.splitlines()
    assert len(examples) >= 2
    for example in examples:
        program, *arguments = shlex.split(example.replace("compute-sanitizer ", ""))
        chosen = parser().parse_args(arguments)
        assert program == "ringopt" and set(getattr(chosen, "only", None) or ()) <= {
            *FORMS,
            *LOOKALIKES,
            *CASES,
            *KERNEL_NAMES,
            *gpu.PARTS,
            *LAYERS,
            *FAMILIES,
        }


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "one-process", "--help"]])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    code = (
        "import atexit, sys; from ringopt.tools.cli import main;"
        f"atexit.register(lambda: print('torch' in sys.modules)); main({arguments})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ringopt bench one-process --" in result.stdout and result.stdout.endswith("False\n")


# ---- speedup ---------------------------------------------------------------------------------------------------------


def test_rows_of_speedup(tmp_path: Path) -> None:
    found = tables("speedup", "--lengths", "67", "--repeats", "1", str(tmp_path / "speedup.json"))
    assert [(row["length"], row["ranks"], row["training"]) for row in found["rows"]] == [(67, 2, False), (67, 2, True)]
    assert max(row["error"] for row in found["rows"]) < WRONG


# ---- dilated ---------------------------------------------------------------------------------------------------------


def test_rows_of_dilated(tmp_path: Path) -> None:
    found = tables("dilated", "--scale", "64", "--repeats", "1", str(tmp_path / "dilated.json"))
    assert [(row["length"], row["ranks"], row["sent"]) for row in found["rows"]] == [
        (1024, 1, 0), (8192, 1, 0), (128, 1, 0), (512, 2, 0)
    ]  # fmt: skip
    assert max(row["error"] for row in found["rows"]) < WRONG


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.zoo  # six processes compile with Inductor
def test_rows_of_training(tmp_path: Path) -> None:
    words = ["training", "--length", "64", "--layers", "1", "--heads", "1", "--ranks", "2", "--checkpoints"]
    found = tables(*words, str(tmp_path / "training.json"))
    assert [(row["checkpointed"], row["ranks"]) for row in found["rows"]] == [
        (False, 1), (False, 2), (True, 1), (True, 2)
    ]  # fmt: skip
    assert max(row["error"] for row in found["rows"]) < WRONG and found["totals"]["wrong"] == 0


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", WRONG), ("bfloat16", 3e-2)])
def test_rows_of_kernels(dtype: str, tolerance: float, tmp_path: Path) -> None:
    words = ["kernels", "--lengths", "50", "--ranks", "3", "--repeats", "1", "--dtype", dtype]
    found = tables(*words, str(tmp_path / "kernels.json"))
    kinds = {(row["pattern"], row["heads"], row["kernel"]) for row in found["rows"]}
    who = ("flash_cpu", "math", "ring of 3", "copy")
    assert kinds == {
        (pattern, heads, name) for pattern in ("causal", "full") for heads in ("8/8", "8/2") for name in who
    }
    assert max(row["error"] for row in found["rows"]) < tolerance
    assert found["totals"]["wrong"] == 0
    assert any("kernel flash runs on NVIDIA GPUs" in note for note in found["notes"])
    for row in found["rows"]:
        assert (row["part_seconds"] is None) == (row["kernel"] in ("flash_cpu", "math"))
        assert (row["hidden"] is None) == (row["kernel"] != "copy")


def test_a_kernel_without_memory_leaves_its_rows_out(tmp_path: Path) -> None:
    """And the others stay."""
    out = torch.OutOfMemoryError("CUDA out of memory")
    with patch.object(Math, "forward", side_effect=out):
        found = tables("kernels", "--lengths", "50", "--ranks", "3", "--repeats", "1", str(tmp_path / "kernels.json"))
    assert {row["kernel"] for row in found["rows"]} == {"flash_cpu", "ring of 3", "copy"}
    assert "math runs out of memory at 50 tokens, causal" in found["notes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err


# ---- soak ------------------------------------------------------------------------------------------------------------


def test_rows_of_soak(tmp_path: Path) -> None:
    found = tables("soak", "--steps", "12", "--ranks", "2", "--delay", "1", str(tmp_path / "soak.json"))
    assert found["totals"] == {"steps": 12, "wrong": 0}
    assert {"ring", "halo", "ulysses", "merge"} <= {row["strategy"] for row in found["rows"]}
    assert max(row["error"] for row in found["rows"]) < 1e-12


@pytest.mark.zoo
def test_soak_of_compiled_models(tmp_path: Path) -> None:
    words = ("--compiled", "--steps", "16", "--ranks", "2", "--delay", "1")
    found = tables("soak", *words, str(tmp_path / "soak.json"))
    assert found["totals"] == {"steps": 16, "wrong": 0}
    assert max(row["error"] for row in found["rows"]) < 1e-11


# ---- an earlier run --------------------------------------------------------------------------------------------------


def test_an_earlier_run_beside_this_one() -> None:
    machine = this_machine()
    row: dict[str, Any] = {"model": "plain", "length": 8, "ring_seconds": 1.0, "ring_error": 1e-7, "bytes": 40}
    row |= {"chosen": "halo", "seconds": {"halo": 0.5, "ring": None}, "mask": False}
    found = [row, row | {"length": 16, "ring_seconds": 3.0}, row | {"length": 32}]
    now = Result("", (), found, {}, (), (), ("model", "length"))
    rows = [row | {"ring_seconds": 2.0, "bytes": 80}, row | {"length": 16, "ring_seconds": 1.5}]
    table, notes = compared({"machine": {"cpu": "another"}, "title": "", "rows": rows}, now, machine)
    assert [list(column.cells) for column in table.columns] == [
        ["ring_seconds", "bytes", "seconds halo"],
        ["2", "2", "2"],
        ["1.00", "0.71", "1.00"],
        ["0.50", "0.50", "1.00"],
        ["2.00", "1.00", "1.00"],
        ["plain 16", "plain 16", "plain 8"],
    ]
    assert notes == [
        "2 of 3 rows are in both runs, of what they have in common above 0.", "another machine then: cpu another"
    ]  # fmt: skip


def test_a_second_run_finds_the_rows_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (tmp_path / name for name in ("first.json", "second.json"))
    words = ("speedup", "--lengths", "67", "--repeats", "1")
    then = tables(*words, str(first))
    tables(*words, "--against", str(first), str(second))
    assert "2 of 2 rows are in both runs" in capsys.readouterr().out
    assert main(["bench", "forms", "--against", str(first)]) == 2
    assert "it holds the table speedup, and this is forms" in capsys.readouterr().err.replace("\n", " ")
    assert then["table"] == "speedup" and json.loads(second.read_text())["rows"][0].keys() == then["rows"][0].keys()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "No such file"), ("no", "Expecting value"), ("{}", "was not written by ringopt bench")],
)
def test_what_is_no_earlier_run(
    content: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "then.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "forms", "--against", str(path)]) == 2
    assert sentence in capsys.readouterr().err.replace("\n", "")
