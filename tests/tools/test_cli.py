"""The console script: what it prints, its exit codes and what its errors say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringopt
from ringopt.report import Site, bytes_text
from ringopt.tools.cli import main
from tests.harness.pages import data_of

HERE = f"{__name__}:"


class Causal(nn.Module):
    """One attention site, and a projection before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.before(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.after(mixed.transpose(1, 2).flatten(2))


def positional() -> tuple[nn.Module, tuple[Tensor]]:
    return Causal(), (torch.zeros(1, 64, 16),)


def by_keyword() -> tuple[nn.Module, dict[str, Tensor]]:
    return Causal(), {"x": torch.zeros(1, 64, 16)}


def fails() -> None:
    raise ValueError("no weights here")


def returns_a_model() -> nn.Module:
    return Causal()


def returns_a_list() -> tuple[nn.Module, list[Tensor]]:
    return Causal(), [torch.zeros(1, 64, 16)]


def gets_wrong_shapes() -> tuple[nn.Module, tuple[Tensor]]:
    return Causal(), (torch.zeros(1, 64, 17),)


def explain(*arguments: str) -> int:
    return main(["explain", *arguments])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"ringopt {ringopt.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["explain", "--help"]])
def test_help_names_the_commands_and_loads_no_torch(arguments: list[str]) -> None:
    code = (
        "import atexit, sys; from ringopt.tools.cli import main;"
        f"atexit.register(lambda: print('torch' in sys.modules)); main({arguments})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "explain" in result.stdout
    assert result.stdout.endswith("False\n")


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("ringopt")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"ringopt {ringopt.__version__}\n"


@pytest.mark.parametrize("factory", ["positional", "by_keyword"])
def test_explain_prints_the_report(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(HERE + factory, "--world-size", "4") == 0
    printed = capsys.readouterr().out
    first, *rest, last = printed.splitlines()
    assert first == "ringopt: 1 of 1 attention, 100% of matrix work on shards, 4 ranks"
    assert [line.split()[0] for line in rest[:4]] == ["sharded", "whole", "sends", "holds"]
    assert "causal, " in rest[0] and "gathered for output" in rest[1] and last.startswith("--verbose, or report.text(")
    assert explain(HERE + factory, "--world-size", "4", "--verbose") == 0
    assert "1 attention site on 4 ranks" in capsys.readouterr().out


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"layout": "contiguous", "strategy": "gather"}
    assert explain(HERE + "positional", "--world-size", "4", "--json", "--options", json.dumps(options)) == 0
    report = json.loads(capsys.readouterr().out)
    [site] = report["sites"]
    assert (report["world_size"], site["layout"], site["strategy"]) == (4, "contiguous", "gather")
    assert site["refusal"] is None


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """in.pt2, and out.pt2 converted from it."""
    folder = tmp_path_factory.mktemp("programs")
    torch.export.save(torch.export.export(Causal(), (torch.zeros(1, 64, 16),)), folder / "in.pt2")
    how = ["--options", '{"layout": "contiguous"}']
    assert main(["convert", str(folder / "in.pt2"), str(folder / "out.pt2"), *how]) == 0
    return folder


def test_explain_of_a_file_is_that_of_its_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for target in (str(files / "in.pt2"), HERE + "positional"):
        assert explain(target, "--world-size", "4", "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["sites"][0].pop("source") != ""
    found[1]["sites"][0].pop("source")
    assert found[0]["sites"] == found[1]["sites"]
    assert found[0]["memory"] == found[1]["memory"]
    [gather] = found[0]["gathers"]
    line, _, code = gather["source"].partition(": ")
    assert line.startswith("test_cli.py:") and code == "return self.after(mixed.transpose(1, 2).flatten(2))"


def test_explain_of_a_converted_file_is_what_it_holds(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(str(files / "out.pt2")) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"converted by ringopt {ringopt.__version__} with torch {torch.__version__}; options ")
    assert "layout=contiguous" in printed and "1 of 1 attention, 100% of matrix work on shards, 2 ranks" in printed
    assert explain(str(files / "out.pt2"), "--world-size", "4") == 2
    assert "out.pt2 was converted already and holds the report for 2 ranks; leave out " in capsys.readouterr().err


def test_explain_as_a_page(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert explain(str(files / "in.pt2"), "--world-size", "2", "--html", str(page)) == 0
    data = data_of(page.read_text())
    assert [site["strategy"] for site in data["report"]["sites"]] == ["ring"] and data["report"]["sites"][0]["picture"]
    assert data["graphs"][0]["frames"][-1]["name"] == "all passes"
    assert "100% of matrix work on shards, 2 ranks" in capsys.readouterr().out


def test_explain_for_other_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(HERE + "positional", "--world-size", "4", "--hardware", "h100", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert any(
        note.endswith("; data sheet of h100, nvlink4 in nodes of 8 and infiniband-ndr between")
        for note in report["sites"][0]["notes"]
    )
    assert report["sites"][0]["kernel"] == "efficient", "of float32 on a GPU"
    held = bytes_text(sum(report["memory"].values()))
    assert report["notes"][-1].startswith(f"{held} are 0.0% of the 80.0 GiB of h100; what a rank sends takes ")
    assert explain(HERE + "positional", "--hardware", "x100") == 2
    assert "hardware 'x100' is unknown; the table has cpu, p100, " in capsys.readouterr().err


def test_explaining_often_is_explaining() -> None:
    """Also after more runs than Dynamo compiles of one function."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert len(ringopt.explain(Causal(), torch.zeros(1, 64, 16), world_size=2).sites) == 1


def test_many_sites_that_are_alike_are_told_as_one() -> None:
    site = Site("layers.0", "sdpa", "causal", "ring", "math", "zigzag", None, 2048)
    windows = [replace(site, module=f"layers.{i}", pattern="window(4)" if i % 2 else "causal") for i in range(24)]
    report = ringopt.Report(2, (*windows, replace(site, module="head", pattern="full")))
    folded = "12 x causal, ring, zigzag (layers.0 to layers.22); 12 x window(4), ring, zigzag (layers.1 to layers.23)"
    assert f"{folded}; 1 more" in " ".join(str(report).split())
    assert repr(report) == "<ringopt.Report: 25 of 25 attentions, 2 ranks>"
    printed = report.text(verbose=True)
    told = " ".join(printed.replace("\u2502", " ").split())
    assert "ringopt: 25 attention sites on 2 ranks" in told
    assert "layers.0 and 11 like it, to layers.22 sdpa causal" in told
    assert "layers.1 and 11 like it, to layers.23 sdpa window(4)" in told
    assert "head sdpa full" in told


class Mixed(Causal):
    """Attention whose mask is made of its own scores, and frequencies of rows and columns."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        kept = scores >= scores.topk(4, -1).values[..., -1:]
        return scores.masked_fill(~kept, float("-inf")).softmax(-1) @ x + torch.renorm(super().forward(x), 2, 0, 0.5)


def test_the_text_of_a_report_tells_reasons_lines_and_memory() -> None:
    report = ringopt.explain(Mixed(), torch.zeros(1, 64, 16), world_size=4, options={"on_refusal": "ignore"})
    printed = report.text(verbose=True)
    assert max(map(len, printed.splitlines())) <= 100
    told = " ".join(printed.replace("\u2502", " ").split())
    assert "by topk (test_cli.py:" in told
    assert "renorm needs all rows of " in told and "torch.renorm(super().forward(x), 2, 0, 0.5))" in told
    sizes = report.memory
    assert f"memory of this rank: {bytes_text(sum(sizes.values()))}\n" in printed
    bars = {cause: line for line in printed.splitlines() for cause in sizes if line.startswith(f"  {cause} ")}
    assert list(bars) == list(sizes)
    drawn = sum(line.count("\u2588") for line in bars.values())
    assert abs(bars["parameters"].count("\u2588") / drawn - sizes["parameters"] / sum(sizes.values())) < 0.02


@pytest.mark.zoo
def test_the_report_without_the_letters_of_lines_and_bars(files: Path) -> None:
    command = [sys.executable, "-m", "ringopt.tools.cli", "explain", "--verbose", str(files / "in.pt2")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "1 attention site" in result.stdout
    assert result.stdout.isascii() and "####" in result.stdout


def test_the_report_without_colour_in_a_narrow_terminal(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    assert main(["explain", str(files / "in.pt2")]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 attention" in printed
    assert not re.search("\x1b\\[[0-9;]*(3[0-9]|4[0-9])m", printed)  # bold and italics stay, colours go
    assert max(map(len, re.sub("\x1b\\[[0-9;]*m", "", printed).splitlines())) <= 40


def test_a_program_has_its_inputs() -> None:
    program = torch.export.export(Causal(), (torch.zeros(1, 64, 16),))
    with pytest.raises(ringopt.errors.ProgramError, match="is explained at the sizes it was exported for"):
        ringopt.explain(program, torch.zeros(1, 32, 16))
    with pytest.raises(ringopt.errors.ProgramError, match="the program is converted already"):
        ringopt.explain(ringopt.convert(program))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_colon", "'no_colon' is not of the form module:factory, and no file that ends in .pt2"),
        ("not_there:tiny", "cannot import 'not_there': ModuleNotFoundError: No module named 'not_there'"),
        ("json:tiny", "json:tiny: tiny does not exist in "),
        (HERE + "HERE", f"{HERE}HERE: HERE is not callable in "),
        (HERE + "fails", f"{HERE}fails() raised ValueError: no weights here"),
        (HERE + "returns_a_model", f"{HERE}returns_a_model() returned Causal; expected (model, inputs)"),
        (HERE + "returns_a_list", f"{HERE}returns_a_list() returned inputs as list; expected a tuple or a dict"),
        (HERE + "gets_wrong_shapes", f"{HERE}gets_wrong_shapes could not be explained: "),
    ],
)
def test_a_wrong_target_says_what_is_wrong(target: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(target, "--world-size", "2") == 2
    captured = capsys.readouterr()
    assert f"\nringopt: error: {sentence}" in f"\n{captured.err}"
    assert captured.out == ""


def test_an_error_in_the_users_code_comes_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    explain(HERE + "fails", "--world-size", "2")
    assert 'raise ValueError("no weights here")' in capsys.readouterr().err


def test_an_unknown_option_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(HERE + "positional", "--world-size", "2", "--options", '{"laout": "zigzag"}') == 2
    error = capsys.readouterr().err
    assert "ringopt: error: unknown option 'laout'; the options are " in error
    assert "Traceback" not in error


def test_an_option_that_does_not_fit_the_model_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(HERE + "positional", "--world-size", "64", "--options", '{"layout": "zigzag"}') == 2
    assert 'option layout="zigzag": the shortest sequence has 64 rows' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain"], "the following arguments are required: TARGET"),
        (["explain", "a:b", "--world-size", "0"], "'0' is not a number of ranks, 1 or more"),
        (["explain", "a:b", "--world-size", "two"], "'two' is not a number of ranks, 1 or more"),
        (["explain", "a:b", "--world-size", "2", "--options", "{"], "not JSON: "),
        (["explain", "a:b", "--world-size", "2", "--options", "[]"], "'[]' is not a JSON object, such as "),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(
    arguments: list[Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
