"""What README.md and the pages beside it say that can be checked without running their commands."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from ringopt.options import Options
from ringopt.passes import LINE
from ringopt.tools.cli import parser
from tests.documents import picture, reference
from tests.structure import modules

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "REFERENCE.md", "BENCHMARKS.md", "COVERAGE.md", "LIMITATIONS.md", "ARCHITECTURE.md")
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
README, REFERENCE = TEXT["README.md"], TEXT["REFERENCE.md"]
FENCED = re.compile(r"```.*?```", re.DOTALL)


def section(page: str, heading: str) -> str:
    _, _, rest = page.partition(f"\n## {heading}\n")
    return rest.partition("\n## ")[0]


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


def test_readme_is_read_in_five_minutes() -> None:
    """What stands between blanks counts as a word, of tables, links and code too, as `wc -w` counts."""
    assert len(README.split()) <= 1000
    words = FENCED.sub("", README).split()
    own = {"row", "rows", "site", "sites", "told", "pairs", "whole on every rank"}  # words of ringopt only
    assert own & {re.sub(r"\W", "", word.lower()) for word in words} == set()


def test_the_table_of_options_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| `(.+?)` \|", section(REFERENCE, "Options"), re.MULTILINE)
    assert [(name, default) for name, _, default in rows] == [
        (field.name, str(field.default)) for field in dataclasses.fields(Options) if field.name in Options.names()
    ]
    hints = get_type_hints(Options, localns={"DeviceMesh": object})
    for name, values, _ in rows:
        choices = [f"`{choice}`" for choice in get_args(hints[name]) if isinstance(choice, str)]
        assert not choices or values.split(", ") == choices


def test_the_options_of_readme_are_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section(README, "Options"), re.MULTILINE)
    known = {field.name: str(field.default) for field in dataclasses.fields(Options)}
    assert rows and [row for row in rows if known.get(row[0]) != row[1]] == []


def test_options_in_the_text_can_be_used() -> None:
    given = [found for text in TEXT.values() for found in re.findall(r'options=(\{"[^}]*\})', text)]
    assert given
    for options in given:
        if '"mesh"' not in options and "folder" not in options:
            Options.of(ast.literal_eval(options))
        else:
            assert set(re.findall(r'"(\w+)":', options)) <= {field.name for field in dataclasses.fields(Options)}


def test_architecture_is_read_in_ten_minutes_and_leaves_nothing_out() -> None:
    text = TEXT["ARCHITECTURE.md"]
    assert len(text.split()) <= 2000
    rooms = [path.parent.name for path in (ROOT / "ringopt").glob("*/__init__.py") if not path.parent.is_symlink()]
    assert [room for room in rooms if f"`ringopt/{room}/`" not in text] == []
    [line] = re.findall(r"flowchart LR\n(.*?)```", text, re.DOTALL)
    assert re.findall(r"\w+", line) == ["capture", *(step.name for step in LINE)]
    assert [step.name for step in LINE if not re.search(rf"^\|.*\b{step.name}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_named_exists(page: str) -> None:
    named = re.findall(r"`((?:ringopt|passes|tools|tests|examples)/[\w./]*)", TEXT[page])
    assert [path for path in named if not (ROOT / path).exists()] == []


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)]*)\)", FENCED.sub("", TEXT[page])):
        target, _, anchor = link.partition("#")
        assert (ROOT / (target or page)).exists(), link
        assert not anchor or anchor in anchors(TEXT[target or page]), link


def test_a_link_to_a_heading_that_is_not_there_is_found() -> None:
    assert "beside-ddp-fsdp-and-trainers" in anchors("## Beside DDP, FSDP and trainers\n```\n## Not this\n```")
    assert "not-this" not in anchors("```\n## Not this\n```")


def test_every_page_is_linked_from_readme() -> None:
    assert [page for page in PAGES[1:] if f"]({page}" not in README] == []


def commands(text: str) -> Iterator[list[str]]:
    """Of ringopt, in code blocks and in the text; what stands in brackets may be left out."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    found = re.findall(r"`(ringopt [a-z][^`\n]*)`", text) + re.findall(r"^(ringopt [a-z].*)", blocks, re.MULTILINE)
    for line in found:
        yield shlex.split(line.replace("[", " ").replace("]", " "))[1:]


def options_of(path: list[str]) -> set[str]:
    """What the parser of a command takes, with those of the command within it (`bench overlap`)."""
    found = parser()
    taken: set[str] = set()
    for name in path:
        if not any(action.choices for action in found._actions if action.nargs == "A..."):
            break
        within = reference.subcommands(found)
        if name not in within:
            assert name.startswith("-") or name.isupper(), f"ringopt has no command {' '.join(path)}"
            break
        found = within[name]
        taken |= set(found._option_string_actions)
    return taken


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    for words in commands(TEXT[page]):
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= options_of(words), f"ringopt {' '.join(words)}"


def test_every_table_of_bench_is_among_the_benchmarks() -> None:
    tables = reference.subcommands(reference.subcommands(parser())["bench"])
    assert sorted(name for name in tables if f"| `{name}` |" not in TEXT["BENCHMARKS.md"]) == []


@pytest.mark.parametrize("words", ["explian model.pt2", "bench overlapp", "diff --stats"])
def test_a_command_that_does_not_exist_is_found(words: str) -> None:
    with pytest.raises(AssertionError):
        assert {word for word in words.split() if word.startswith("--")} <= options_of(words.split())


def test_the_generated_parts_say_what_the_code_says() -> None:
    assert reference.written(REFERENCE) == REFERENCE, "run: python -m tests.documents.reference"


def test_the_picture_is_what_its_script_draws() -> None:
    assert picture.FILE.read_text() == picture.drawn(), "run: python -m tests.documents.picture"


def test_every_environment_variable_that_is_read_is_in_the_reference() -> None:
    """By a name in the text, or one of the module; what is read by a table is in the generated part."""
    read = set[str]()
    for module in modules().values():
        text = module.path.read_text()
        read |= set(re.findall(r'environ(?:\.get)?[(\[]"(\w+)"(?!\] =)', text))
        for name in re.findall(r"environ(?:\.get)?[(\[]([A-Z_]+)\b", text):
            read |= set(re.findall(rf'^{name} = "(\w+)"', text, re.MULTILINE))
    assert {"LOCAL_WORLD_SIZE", "RINGOPT_OPTIONS"} <= read
    assert read and sorted(name for name in read if f"`{name}`" not in REFERENCE) == []


def test_the_figures_of_readme_are_those_of_the_benchmarks() -> None:
    """In its table, what was measured: the columns "one process" and "achieved"."""
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|(.*)\|$", section(README, "Measured"), re.MULTILINE)
    measured = [figure for _, one, _, achieved in rows for figure in re.findall(r"\d[\d.e-]*\d", one + achieved)]
    assert len(measured) > 10
    known = set(re.findall(r"\d[\d.e-]*\d", TEXT["BENCHMARKS.md"]))
    assert [figure for figure in measured if figure not in known] == []
    [(sharded, found)] = re.findall(r"(\d+) attentions in \d+ models .* (\d+) are sharded", README)
    assert f"{found} of {sharded}" in TEXT["COVERAGE.md"]
