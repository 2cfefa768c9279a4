"""A table of `ringopt bench`, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringopt.tools.bench import TABLES
from ringopt.tools.cli import main


def tables(*arguments: str) -> dict[str, Any]:
    """The JSON of one run, in which the keys of the table tell its rows apart."""
    target = Path(arguments[-1])
    assert main(["bench", *arguments[:-1], "--json", str(target)]) == 0
    found = dict(json.loads(target.read_text()))
    (table,) = (one for one in TABLES if one.__name__.endswith(f".{arguments[0].replace('-', '_')}"))
    assert len({tuple(row[key] for key in table.KEYS) for row in found["rows"]}) == len(found["rows"])
    return found
