"""A table of `ringopt bench`, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringopt.tools.cli import main


def tables(*arguments: str) -> dict[str, Any]:
    """The JSON of one run."""
    target = Path(arguments[-1])
    assert main(["bench", *arguments[:-1], "--json", str(target)]) == 0
    return dict(json.loads(target.read_text()))
