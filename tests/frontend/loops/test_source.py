"""The loops of a function, where its source is that of the code that runs."""

from __future__ import annotations

import linecache
from types import CodeType
from typing import Any

from ringopt.frontend.loops.source import loop_at, loops_of

LOOP = "def f(x, h):\n    for t in range(9):\n        h = h + x[:, t]\n    return h\n"


def defined(text: str, file: str) -> CodeType:
    """The code of the function that a file defines."""
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    found: CodeType = names["f"].__code__
    return found


def test_the_source_has_to_be_that_of_the_code_that_runs(tmp_path: Any) -> None:
    """A file that was edited after it was imported says something else than runs."""
    file = tmp_path / "program.py"
    file.write_text(LOOP)
    runs = defined(LOOP, str(file))
    assert loop_at(runs, (2, 13)) is not None and loop_at(runs, (3, 13)) is None
    file.write_text(LOOP.replace("+ x", "- x"))
    linecache.checkcache()
    assert loops_of(runs) == {}
    file.write_text("def f(x, h:\n")
    linecache.checkcache()
    assert loops_of(runs) == {}


def test_what_has_no_source_has_no_loops() -> None:
    assert loops_of(defined(LOOP, "<no file>")) == {}
