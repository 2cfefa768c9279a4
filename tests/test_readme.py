"""What README.md says that can be checked without running its commands."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from ringopt.options import Options
from ringopt.passes import LINE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def command(name: str) -> str:
    [block] = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
    return str(block).strip()


@pytest.mark.parametrize("name", ["main", "tests"])
def test_a_command_is_one_line_that_sets_itself_up(name: str) -> None:
    assert "\n" not in command(name)
    assert command(name).startswith("python3 -m venv .venv && .venv/bin/pip install -q -e ")


def test_ci_runs_the_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == command("tests")


def test_the_table_of_options_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| `(.+?)` \|", README, re.MULTILINE)
    assert [(name, default) for name, _, default in rows] == [
        (field.name, str(field.default)) for field in dataclasses.fields(Options)
    ]
    hints = get_type_hints(Options, localns={"DeviceMesh": object})
    for name, values, _ in rows:
        choices = [f"`{choice}`" for choice in get_args(hints[name]) if isinstance(choice, str)]
        assert not choices or values.split(", ") == choices


def test_architecture_is_read_in_ten_minutes_and_leaves_nothing_out() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 2000
    rooms = [path.parent.name for path in (ROOT / "ringopt").glob("*/__init__.py") if not path.parent.is_symlink()]
    assert [room for room in rooms if f"`ringopt/{room}/`" not in text] == []
    [picture] = re.findall(r"flowchart LR\n(.*?)```", text, re.DOTALL)
    assert re.findall(r"\w+", picture) == ["capture", *(step.name for step in LINE)]
    assert [step.name for step in LINE if not re.search(rf"^\|.*\b{step.name}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_every_path_named_exists(document: str) -> None:
    named = re.findall(r"`((?:ringopt|passes|tools|tests|examples)/[\w./]*)`", (ROOT / document).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
