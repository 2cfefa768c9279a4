"""The loops of a function as its source says them, where that is the source of the code that runs."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import CodeType
from weakref import WeakKeyDictionary

from ringopt.frontend.loops.over_rows import by_number

Place = tuple[int, int]  # line and column of what a loop goes over, or of the first tensor whose rows it goes over

_loops = WeakKeyDictionary[CodeType, dict[Place, ast.For]]()


def loop_at(code: CodeType, place: Place) -> ast.For | None:
    """The `for` of a function that goes over what stands at `place`, or over the rows of a tensor there. None where the
    source is not at hand, or says something else than runs: it was edited since, or an import hook has rewritten it."""
    if code not in _loops:
        _loops[code] = loops_of(code)
    return _loops[code].get(place)


def loops_of(code: CodeType) -> dict[Place, ast.For]:
    """All loops of the file, if the function is compiled from it."""
    text = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(text)
        compiled = compile(text, code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # no source of Python, or one of another release
        return {}
    if not any(found == code for found in codes_in(compiled)):
        return {}
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    over_rows = [again for loop in loops if (again := by_number(loop)) is not None]
    return {begins_at(loop.iter): loop for loop in loops} | {begins_at(again.first): again for again in over_rows}


def begins_at(node: ast.expr) -> Place:
    """Line and column."""
    return node.lineno, node.col_offset


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """That of a file, and of all functions and classes within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
