"""Writes examples/tutorial.ipynb from the script beside it: `python -m tests.documents.notebook`.

Cells of the script begin with `# %%`, those of text with `# %% [markdown]`. A cell that ends with `print(name)` ends in
the notebook with `name`, which a notebook shows as it shows tables. Cells are run here, one after the other, without
Jupyter: what they print and what the last line is worth are their outputs.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "tutorial.py", EXAMPLES / "tutorial.ipynb"


@dataclass(frozen=True)
class Cell:
    kind: str  # "markdown" or "code"
    source: str


def cells(script: str) -> list[Cell]:
    """Of the text of a script."""
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            found.append(Cell("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            found.append(Cell("code", re.sub(r"(^|\n)print\((\w+)\)$", r"\1\2", body.strip())))
    return found


def run(parts: list[Cell], folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The outputs of each cell; what a cell raises is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for number, cell in enumerate(parts):
            yield list(outputs_of(cell.source, f"cell {number}", names)) if cell.kind == "code" else []
    finally:
        os.chdir(before)


def outputs_of(source: str, name: str, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a cell prints, then what its last line is worth."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for reports and tracebacks
    tree = ast.parse(source, name)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())}
    if value is not None:
        html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
        shown = {"text/plain": lines(str(value) if html else repr(value))}
        if html:
            shown["text/html"] = lines(html)
        yield {"output_type": "execute_result", "execution_count": None, "data": shown, "metadata": {}}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(parts: list[Cell], outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """In the form of nbformat 4.5."""
    made = []
    for number, (cell, shown) in enumerate(zip(parts, outputs, strict=True)):
        entry = {"id": f"cell-{number}", "cell_type": cell.kind, "metadata": {}, "source": lines(cell.source)}
        made.append(entry | ({"execution_count": None, "outputs": shown} if cell.kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    return {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": language},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


if __name__ == "__main__":
    found = cells(SCRIPT.read_text())
    NOTEBOOK.write_text(json.dumps(notebook(found, list(run(found, EXAMPLES))), indent=1) + "\n")
