"""What holds for every command: the examples of --help run as written, tables fit, wrong uses are one line."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import ringopt
from ringopt.planner.plan import Plan, Point
from ringopt.report import Site
from ringopt.tools.cli import main, parser
from ringopt.tools.common.command import WIDTH, console
from tests.tools.test_cli import HERE

# What their own tests run: one measures for minutes, one needs the traces of a run.
ELSEWHERE = ("bench", "timeline")
LONG = ("plan", "convert")


def commands() -> dict[str, argparse.ArgumentParser]:
    [found] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def examples(command: str) -> list[list[str]]:
    """The lines after "examples:", as words."""
    listed = (commands()[command].epilog or "").partition("examples:\n")[2]
    return [shlex.split(line) for line in listed.splitlines() if line.strip()]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "ringopt":
        assert main(words[1:]) in (0, 1)  # diff found differences: 1
        return
    assert words[:2] == ["python", "-m"]
    monkeypatch.setattr(sys, "argv", words[2:])
    runpy.run_module(words[2], run_name="__main__")


@pytest.mark.parametrize("command", commands())
def test_help_has_two_examples(command: str) -> None:
    assert sum(words[:2] == ["ringopt", command] for words in examples(command)) >= 2


@pytest.mark.parametrize(
    "command",
    [pytest.param(x, marks=[pytest.mark.zoo] if x in LONG else []) for x in commands() if x not in ELSEWHERE],
)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_examples_run_as_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in an empty folder; tables fit a log of WIDTH columns and have no colours."""
    monkeypatch.chdir(tmp_path)
    for words in examples(command):
        run(words, monkeypatch)
    printed = capsys.readouterr().out
    assert max((len(line) for line in printed.splitlines() if line[:1] in tuple("┏┃┡│└")), default=0) <= WIDTH
    assert "\x1b" not in printed


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("terminal", [{}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, {"CI": "true"}], ids=str)
def test_tables_fit_the_columns_that_there_are(
    columns: int, terminal: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no number is cut, in a log, in a terminal without colour, and where tests run."""
    for name, value in {**terminal, "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    point = Point(16_777_216, 1024, "contiguous", 10**11, True, 2 * 10**11, 10**11, 7.21e9, 3.5, 0.7, ())
    links = ("nvlink4", 8, "infiniband-ndr")
    console().print(Plan("h100", *links, True, (point,), {1024: None}, (), traced=Mock()))
    console().print(ringopt.Report(8, (Site("a.b.c" * 40, "unfused", "window(4096)", "ring", "math", "x", None, 1),)))
    printed = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= columns
    assert all(text in printed for text in ("16,777,216", "7.21 G", "50%"))
    assert "\u2026" not in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("explain no.pt2", "no.pt2 does not exist; expected a .pt2 file"),
        ("explain model.onnx", "'model.onnx' is not of the form module:factory"),
        (f"explain {HERE}positional --html no/a.html", "--html no/a.html: there is no folder no"),
        (f"explain {HERE}positional --html .", "--html .: it is a folder"),
        ("explain no.pt2 --import not_there", "cannot import 'not_there'"),
        ("convert no.pt2 out.pt2", "no.pt2 does not exist; expected a .pt2 file"),
        ("convert text.pt2 out.pt2", "text.pt2 is not a .pt2 file (no zip archive); write one with torch.export.save"),
        ("convert text.pt2 text.pt2", "text.pt2 exists; --force overwrites it"),
        ("diff text.pt2 text.pt2", "text.pt2 is not a .pt2 file"),
        ("diff text.pt2 text.pt2 --html no/a.html", "--html no/a.html: there is no folder no"),
        ("bench forms --json no/a.json", "--json no/a.json: there is no folder no"),
    ],
)
def test_a_wrong_use_is_one_line_and_writes_nothing(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt2").write_text("no archive")
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"ringopt: error: {sentence}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["text.pt2"]


@pytest.mark.parametrize("words", ["explain", "diff a.pt2", "convert a.pt2", "unknown", "explain a.pt2 --world-size 0"])
def test_a_wrong_command_line_ends_with_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("ringopt: error: ") and said.endswith(" --help")
