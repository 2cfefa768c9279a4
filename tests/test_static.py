"""Style, types and the direction of imports, so that the one test command covers them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["mypy"], ["lint-imports"]], ids=["style", "types", "direction of imports"]
)
def test_the_code_passes(command: list[str]) -> None:
    if command == ["mypy"] and torch.__version__ < (2, 13):
        pytest.skip("types are checked against the newest torch")
    tool, *arguments = command
    result = subprocess.run([BIN / tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
