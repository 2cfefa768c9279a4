"""The house: rooms of one size, imports that go one way, and nothing that is imported only for what it does then."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.structure import (
    MOST,
    ROOT,
    SIGNATURES,
    Module,
    circles,
    files_in_folders,
    folder_graph,
    homonyms,
    import_graph,
    imported,
    lines_of,
    many_parameters,
    modules,
    parameters_of,
    parsed,
    splatted_positions,
    undocumented,
)

MODULES = modules()

# Folders that are lists: each file is another of the same kind.
LISTS = {
    f"ringopt.{name}"
    for name in (
        *("sharding.handlers", "passes", "ops", "torch_compat", "tools"),
        *("tools.benchmarks.tables", "tools.benchmarks.workers"),
    )
}

# Functions that are named after the operator that they are of; the module says what of it they give.
BY_OPERATOR = {
    f"ringopt.{name}"
    for name in ("ops.traffic", "ops.work", "ops.conjugates", "recognize.lift_pointwise", "recognize.lift_views")
}

# Names that several modules define and others read from them.
ONE_ROLE = {
    "add": "one a command: adds it to the parser",
    "on_a_rank": "one a benchmark: what a rank of it measures",
    "rows_of": "one a benchmark: its rows",
    "patched": "one a config of torch: other settings within the context",
    "Operands": "the tensors of one call: ring attention's and dilated attention's",
    "Saved": "what a forward leaves for its backward: ring attention's and dilated attention's",
    "Config": "the arguments of one call that are no tensors: ring attention's and dilated attention's",
    "load": "ringopt.load reads a program; the builder of the term Load is called as the others are",
}


def test_no_module_imports_itself_in_a_circle() -> None:
    assert circles(import_graph(MODULES)) == []


def test_no_folder_imports_itself_in_a_circle() -> None:
    assert circles(folder_graph(MODULES)) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_the_root_holds_what_a_user_names() -> None:
    assert len(list((ROOT / "ringopt").glob("[!_]*.py"))) <= 12  # beside what `import` and `python -m` take


@pytest.mark.parametrize("folder", sorted(set(files_in_folders(MODULES)) - LISTS))
def test_a_folder_can_be_looked_over(folder: str) -> None:
    assert files_in_folders(MODULES)[folder] <= 16


@pytest.mark.parametrize("top", ["ringopt", "passes", "tools", "tests", "examples"])
def test_every_import_of_ours_is_there(top: str) -> None:
    """mypy does not read tests, and takes what it cannot find for anything."""
    missing = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / top).rglob("*.py")
        for module, _ in imported(parsed(path.read_text()))
        if module.partition(".")[0] in ("ringopt", "tests") and not exists(ROOT / module.replace(".", "/"))
    ]
    assert missing == []


def exists(place: Path) -> bool:
    return place.with_suffix(".py").exists() or place.is_dir()


def test_functions_take_values_with_names() -> None:
    """A function of many parameters takes one that has them, unless another says what it is called with."""
    assert many_parameters(MODULES) == []


def test_every_signature_that_is_excused_is_there_and_is_long() -> None:
    functions = [(name, each) for name, module in MODULES.items() for each in module.functions()]
    assert SIGNATURES.keys() <= {f"{name}.{each.name}" for name, each in functions if parameters_of(each) > MOST}


def test_nobody_splats_a_tuple_of_positions() -> None:
    assert splatted_positions(MODULES) == []


def test_a_tuple_of_positions_is_found(tmp_path: Path) -> None:
    text = """
    def taken(x, causal, scale): ...
    def any_number(*sizes): ...
    def calls(x, q, step, ctx):
        how, sizes = (True, 0.5), (1, 2)
        taken(x, *how)
        taken(*(x, True, 0.5))
        step(operators.scatter.default, x, *how)
        any_number(*sizes), x.view(*sizes), taken(*q), step(x, *how)
    """
    (tmp_path / "some.py").write_text(dedent(text))
    known = {"some": Module("some", tmp_path / "some.py")}
    assert [each.partition(":")[2].partition(":")[0] for each in splatted_positions(known)] == ["6", "7", "8"]


def test_functions_fit_a_screen() -> None:
    functions = [(name, each) for name, module in MODULES.items() for each in module.functions()]
    long = [f"{name}.{each.name}" for name, each in functions if lines_of(each) > 60]
    assert long == ["ringopt.functional.attention"]  # half of it is its docstring


def test_a_name_stands_for_one_thing() -> None:
    """A reader need not look where a name was imported from."""
    found = homonyms({name: module for name, module in MODULES.items() if name not in BY_OPERATOR})
    assert {name: where for name, where in found.items() if name not in ONE_ROLE} == {}
    assert set(ONE_ROLE) <= set(found), "an explanation that nothing needs"


def test_a_homonym_is_found(tmp_path: Path) -> None:
    texts = {
        "a": "def f(): pass\ndef g(): pass\nclass Only: pass",
        "b": "def f(): pass\ndef g(): pass",
        "pack.c": "def f(): pass",
        "d": "from a import f, Only\nfrom b import f as other\nfrom pack import c\nc.f()",
    }
    known = {}
    for name, text in texts.items():
        known[name] = Module(name, tmp_path / f"{name}.py")
        known[name].path.write_text(text)
    assert homonyms(known) == {"f": ["a", "b", "pack.c"]}  # g is read by nobody else


def test_what_is_public_has_a_docstring() -> None:
    assert undocumented(MODULES) == []


TOP = {"pyproject.toml", "LICENSE", "ringopt", "passes", "tests", "examples", "tools"}


def test_nothing_strays_to_the_top() -> None:
    """Beside these there are pages and dotfiles."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git, which knows what is part of the project")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name.partition("/")[0] for name in listed.splitlines()}
    assert {name for name in names if not name.startswith(".") and not name.endswith(".md")} == TOP
