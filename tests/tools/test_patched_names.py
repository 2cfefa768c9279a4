"""What a benchmark patches is there: a name that was renamed would be patched all the same by a mock that creates it,
or on a branch that no test takes, and the benchmark would measure nothing."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.structure import Module, modules

PATCHERS = ("patch.object", "mock.patch.object", "monkeypatch.setattr", "setattr")


def patched(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(what, name) of every call that puts something else in the place of an attribute."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in PATCHERS and len(call.args) > 1:
            yield call.args[0], call.args[1]


def missing(tree: ast.Module, names: dict[str, Any]) -> list[str]:
    """Of the attributes of modules that are patched, those that the module lacks. `names` are those of the file."""
    found = []
    for what, name in patched(tree):
        root = next(each.id for each in ast.walk(what) if isinstance(each, ast.Name))
        if root in names and isinstance(module := eval(ast.unparse(what), names), ModuleType):
            attribute = eval(ast.unparse(name), names)
            if not hasattr(module, attribute):
                found.append(f"{ast.unparse(what)}.{attribute}")
    return found


def with_local_imports(module: Module) -> dict[str, Any]:
    """The names of a file, and those that its functions import."""
    names = dict(vars(importlib.import_module(module.name)))
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), names)
    return names


PATCHING = [each for name, each in modules().items() if name.startswith("ringopt.tools") and any(patched(each.tree))]


@pytest.mark.parametrize("module", PATCHING, ids=lambda module: module.name)
def test_what_is_patched_is_there(module: Module) -> None:
    assert missing(module.tree, with_local_imports(module)) == []


def test_a_name_that_was_renamed_is_noticed() -> None:
    assert len(PATCHING) >= 4
    tree = ast.parse("with patch.object(json, 'lods', 1), mock.patch.object(json, dumps.__name__): setattr(x, 'y', 1)")
    assert missing(tree, {"json": json, "dumps": json.dumps}) == ["json.lods"]
