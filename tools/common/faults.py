"""Faults that a real mistake could make in a Python file: each changes one place of the source.

for fault in faults_of(source): fault.line, fault.what, fault.source
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Nothing there is computed: messages, checks of the code by itself, what a type checker reads.
SILENT = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
SHOWING = {"__repr__", "__str__", "warn", "warning", "info", "debug", "print"}  # functions that only show something

Place = Callable[[ast.expr | ast.stmt], tuple[int, int]]  # where a node begins and ends, in bytes of the file
Change = tuple[int, int, str]  # the bytes from, up to, and the text in their place


@dataclass(frozen=True)
class Fault:
    """One changed place.

    `line` counts from 1, `what` says the change in a few words, `source` is the whole file with it."""

    line: int
    what: str
    source: str


def faults_of(source: str) -> Iterator[Fault]:
    """All faults of a file, in order of the syntax tree. Every one of them compiles."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for node in _computing(ast.parse(source)):
        for start, end, text in _replacements(node, raw, place):
            changed = (raw[:start] + text.encode() + raw[end:]).decode()
            before = " ".join(raw[start:end].decode().split())
            try:
                compile(changed, "fault", "exec")
            except SyntaxError:
                continue
            yield Fault(node.lineno, f"{_short(before)} -> {_short(' '.join(text.split()))}", changed)


def _computing(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions under a node that compute: no annotations, decorators, docstrings, messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, SILENT) or _shows(child) or _for_types(child):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            yield from _computing(child)


def _shows(node: ast.AST) -> bool:
    """Texts, methods that make one of an object, and calls that warn or log."""
    match node:
        case ast.JoinedStr() | ast.Expr(value=ast.Constant()):
            return True
        case ast.FunctionDef(name=name) | ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in SHOWING
    return False


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _replacements(node: ast.expr | ast.stmt, raw: bytes, place: Place) -> Iterator[Change]:
    """The changes that begin at this node."""

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        start, end = place(left)[1], place(right)[0]
        gap = raw[start:end].decode()
        if gap.count(old) == 1:
            yield start, end, gap.replace(old, new)

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            new = COMPARISONS[type(operator)]
            old = _spelled(operator)
            yield from between(left, right, old, new)
        case ast.BoolOp(op=ast.And(), values=[left, right]):
            yield from between(left, right, "and", "or")
        case ast.BoolOp(op=ast.Or(), values=[left, right]):
            yield from between(left, right, "or", "and")
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield (*place(node), raw[slice(*place(inner))].decode())
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            yield from between(left, right, _spelled(operator), ARITHMETIC[type(operator)])
        case ast.Constant(value=bool() as value):
            yield (*place(node), str(not value))
        case ast.Constant(value=int() as value):
            yield (*place(node), str(value + 1))
        case ast.Call(func=ast.Name(id=name) as called) if name in OPPOSITES:
            yield (*place(called), OPPOSITES[name])
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *_]) if first.id != second.id:
            (start, middle), (after, end) = place(first), place(second)
            yield start, end, second.id + raw[middle:after].decode() + first.id
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield (*place(node), "pass")
        case ast.Continue() | ast.Break():
            yield (*place(node), "pass")
        case ast.If(test=test) if not isinstance(test, (ast.Compare, ast.UnaryOp)):
            yield (*place(test), "False")


def _spelled(operator: ast.cmpop | ast.operator) -> str:
    """An operator as it is written."""
    if isinstance(operator, ast.cmpop):
        return ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))[2:-2]
    return ast.unparse(ast.BinOp(ast.Name("a"), operator, ast.Name("b")))[2:-2]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
