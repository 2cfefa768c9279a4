"""The house: rooms of one size, imports that go one way, and nothing that is imported only for what it does then."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure import (
    ROOT,
    circles,
    files_in_folders,
    folder_graph,
    import_graph,
    imported,
    lines_of,
    modules,
)

MODULES = modules()

# Folders that are lists: each file is another of the same kind.
LISTS = {
    f"ringopt.{name}"
    for name in ("sharding.handlers", "passes", "ops", "tools", "tools.benchmarks.tables", "torch_compat")
}

def test_no_module_imports_itself_in_a_circle() -> None:
    assert circles(import_graph(MODULES)) == []


def test_no_folder_imports_itself_in_a_circle() -> None:
    assert circles(folder_graph(MODULES)) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_the_root_holds_what_a_user_names() -> None:
    assert len(list((ROOT / "ringopt").glob("*.py"))) <= 12


@pytest.mark.parametrize("folder", sorted(set(files_in_folders(MODULES)) - LISTS))
def test_a_folder_can_be_looked_over(folder: str) -> None:
    assert files_in_folders(MODULES)[folder] <= 16


@pytest.mark.parametrize("top", ["ringopt", "passes", "tools", "tests", "examples"])
def test_every_import_of_ours_is_there(top: str) -> None:
    """mypy does not read tests, and takes what it cannot find for anything."""
    missing = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / top).rglob("*.py")
        for module, _ in imported(ast.parse(path.read_text()))
        if module.partition(".")[0] in ("ringopt", "tests") and not exists(ROOT / module.replace(".", "/"))
    ]
    assert missing == []


def exists(place: Path) -> bool:
    return place.with_suffix(".py").exists() or place.is_dir()


def test_functions_fit_a_screen() -> None:
    functions = [(name, each) for name, module in MODULES.items() for each in module.functions()]
    long = [f"{name}.{each.name}" for name, each in functions if lines_of(each) > 60]
    assert long == ["ringopt.functional.attention"]  # half of it is its docstring
