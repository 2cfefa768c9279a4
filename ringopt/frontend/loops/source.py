"""The loops of a function as its source says them, where that is the source of the code that runs."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import CodeType
from weakref import WeakKeyDictionary

from ringopt.frontend.loops.over_rows import calls_in

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
    by_place = {(node.iter.lineno, node.iter.col_offset): node for node in loops}
    return by_place | {(call.lineno, call.col_offset): loop for call, loop in calls_in(loops)}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """That of a file, and of all functions and classes within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
