"""Gives functions that are imported already the code of a changed file: a fault is planted without importing anew.

swap(before, after, "ringopt/dims/rule.py")     # two texts of that file; False where more than functions changed
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import CodeType, FunctionType

OPTIMIZED = 0x1  # a flag of the code of functions, which modules and bodies of classes lack


def take_code(before: str, after: str, path: str) -> bool:
    """Whether the living functions of the file at `path` now run as in `after`. What stands outside of functions has
    run: a change there is none of them."""
    pairs = differing(compile(before, path, "exec"), compile(after, path, "exec"))
    if pairs is None:
        return False
    changed = {old: new for old, new in pairs}
    found = {each for each in gc.get_objects() if type(each) is FunctionType and each.__code__ in changed}
    if {function.__code__ for function in found} != set(changed):
        return False
    for function in found:
        function.__code__ = changed[function.__code__].replace(co_filename=path)
    return True


def differing(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that are not the same, outermost ones; None where anything else is not."""
    if before == after:
        return []
    if before.co_flags & OPTIMIZED:
        return [(before, after)]
    inner, changed = list(codes_in(before)), list(codes_in(after))
    same = [one for one in before.co_consts if not isinstance(one, CodeType)]
    other = [one for one in after.co_consts if not isinstance(one, CodeType)]
    alike = (before.co_code, before.co_names, same) == (after.co_code, after.co_names, other)
    if len(inner) != len(changed) or not alike:
        return None
    found = [differing(one, new) for one, new in zip(inner, changed, strict=True)]
    return None if None in found else [pair for pairs in found if pairs is not None for pair in pairs]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Of the functions and classes that stand in a code."""
    return (const for const in code.co_consts if isinstance(const, CodeType))
