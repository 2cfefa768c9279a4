"""The code speaks the English of the field: the words that only this project used stay out of its names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.structure import ROOT, modules

# Names that say that something is a text, or was printed, and not what is in it: a sentence, a reason, a note, a value.
DIALECT = {"told", "said", "tell", "teller", "beside"}


def names_given(tree: ast.Module) -> Iterator[str]:
    """Parts of the names that the text gives to variables, parameters, functions and classes."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        yield from name.lower().split("_")


def test_names_are_none_of_a_dialect() -> None:
    found = {name: sorted(DIALECT & set(names_given(module.tree))) for name, module in modules().items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_word_of_the_dialect_is_found() -> None:
    tree = ast.parse("def tell(said): TOLD_FIRST = teller = beside = [x for x in said]")
    assert DIALECT & set(names_given(tree)) == DIALECT


def test_the_glossary_is_short() -> None:
    """A word that only this project uses has to earn its place."""
    _, _, glossary = Path(ROOT / "ARCHITECTURE.md").read_text().partition("## Words of ringopt only")
    words = re.findall(r"^\| (\w+) \|", glossary, re.MULTILINE)[1:]
    assert 0 < len(words) <= 25
