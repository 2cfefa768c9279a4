"""What one expects of a command line tool without reading about it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringopt
from ringopt.hardware.devices import device_of, link_of
from ringopt.output.files import write_whole
from ringopt.tools import doctor
from ringopt.tools.cli import main
from ringopt.tools.common.command import SHOWN, CommandError, console, load_example, working


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "explain" in capsys.readouterr().out


def test_python_m_is_the_command() -> None:
    command = [sys.executable, "-m", "ringopt", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"ringopt {ringopt.__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("explian a.pt2", "did you mean 'explain'?; see ringopt --help"),
        ("bench speedpu", "did you mean 'speedup'?; see ringopt bench --help"),
        ("explain a.pt2 --ranks 2", "unrecognized arguments: --ranks 2; did you mean '--world-size'?"),
        ("explain a.pt2 --word-size 2", "unrecognized arguments: --word-size 2; did you mean '--world-size'?"),
    ],
)
def test_what_was_meant(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and sentence in line


def test_hardware_in_any_case() -> None:
    assert device_of("H100") is device_of("h100") and link_of("NVLink4") is link_of("nvlink4")


def test_a_factory_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "models_of_a_user.py"
    file.write_text("def tiny():\n    return abs, (3,)\n")
    assert load_example(f"{file}:tiny").args == (3,)
    with pytest.raises(CommandError, match=r"tinny does not exist in .*models_of_a_user.py; did you mean 'tiny'\?"):
        load_example(f"{file}:tinny")


@pytest.mark.parametrize(
    ("error", "code", "line"), [(KeyboardInterrupt, 130, "ringopt: interrupted\n"), (BrokenPipeError, 141, "")]
)
def test_an_end_that_is_no_error(
    error: type[BaseException],
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ends(_environment: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "examined", ends)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == line
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        console().on_broken_pipe()


def test_quiet_and_without_colour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examined", lambda _environment: {"devices": {}})
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["doctor"]) == 0 and (SHOWN.quiet, SHOWN.colour) == (False, True)
    try:
        assert main(["--quiet", "doctor", "--no-color"]) == 0 and (SHOWN.quiet, SHOWN.colour) == (True, False)
        assert logging.getLogger("ringopt").level == logging.ERROR
        with working("explain"):
            pass
        console().print("[red]text[/red]")
    finally:
        logging.getLogger("ringopt").setLevel(logging.NOTSET)
        SHOWN.quiet, SHOWN.colour = False, True
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.endswith("\ntext\n")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "page.html", tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to(file)
    write_whole(link, "text")
    assert link.is_symlink() and file.read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"bytes")
    assert os.read(reader, 9) == b"bytes" and pipe.is_fifo()
    os.close(reader)
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "link.html", "pipe"}


def test_names_are_the_public_ones_and_texts_are_short() -> None:
    assert dir(ringopt) == sorted(ringopt.__all__)
    report = ringopt.Report(2)
    assert repr(report) == "<ringopt.Report: 2 ranks>"
    assert "<pre>ringopt: 2 ranks" in report._repr_html_() and report.to_html().startswith("<!doctype html>")


def test_doctor_names_what_a_report_of_an_error_needs() -> None:
    found = doctor.versions({"CXX": "no-such-compiler"})
    assert found["ringopt"] == ringopt.__version__ and found["python"].startswith(f"{sys.version_info[0]}.")
    assert found["torch"] and found["numpy"] and found["compiler"].startswith("none (no-such-compiler): Inductor")
    template = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE" / "bug_report.md"
    assert "`ringopt doctor`" in template.read_text()
