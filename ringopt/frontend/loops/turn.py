"""One turn of a loop as a function of what it reads, from the source of the loop.

    for i in range(n):                                def turn(state, k_i, v_i, decay):
        state = state * decay + k[:, i] * v[:, i]         state = state * decay + k_i * v_i
        out[:, i] = state.sum(-1)                         out_i = state.sum(-1)
                                                          return (state,), (out_i,)

The number of the turn may say nothing but which row of a tensor is read or written, so that all turns are alike. What
is named in the loop and read before it is set, or behind the loop, is carried. All else that decides whether this is
the loop is for Dynamo to say, which traces it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from copy import deepcopy
from types import CodeType, FunctionType
from typing import Any

from ringopt.torch_compat.dynamo_ranges import Turn

# Which may leave the loop, bind names elsewhere, or run later.
NOT_IN_A_TURN = (
    ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global,
    ast.Nonlocal, ast.Delete, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Try, ast.Raise,
    ast.Match, *([ast.TryStar] if hasattr(ast, "TryStar") else []),
)  # fmt: skip
OF_A_KIND = ("dtype", "device", "shape", "ndim")
OF_A_ROW = "_ringopt_row_"


class NotATurn(Exception):
    """A loop is no such function, for this reason."""


def turn_of(loop: ast.For, code: CodeType, live: set[str], names: dict[str, Any]) -> Turn:
    """`live`: the local names of the function `code` that are read from the loop on before they are set. `names`: the
    globals of the function. Raises NotATurn."""
    body = deepcopy(loop.body)
    for node in (found for statement in body for found in ast.walk(statement)):
        if isinstance(node, NOT_IN_A_TURN):
            raise NotATurn(f"{type(node).__name__.lower()} stands in it")
    if loop.orelse or not isinstance(loop.target, ast.Name):
        raise NotATurn("it has an else, or counts in several names")
    rows = Rows(loop.target.id)
    statements = [rows.visit(statement) for statement in body]
    stored, loaded = names_in(statements, ast.Store), names_in(statements, ast.Load)
    own = {rows.name_of(*place) for place in (*rows.read, *rows.written)}
    check(rows, code, stored | loaded, stored - own, statements)
    carried = sorted((stored - own) & live)
    rest = sorted((loaded - own - stored) & set(code.co_varnames))
    given = [*carried, *(rows.name_of(*place) for place in rows.read), *rest]
    returned = ([*carried], [rows.name_of(*place) for place in rows.written])
    function = made(statements, given, returned, loop, code, names)
    return Turn(function, tuple(carried), tuple(rows.read), tuple(rows.written), tuple(rest))


def names_in(statements: Iterable[ast.stmt], kind: type[ast.expr_context]) -> set[str]:
    """The names that are loaded, or stored."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}


def check(rows: Rows, code: CodeType, named: set[str], stored: set[str], statements: list[ast.stmt]) -> None:
    """Raises NotATurn."""
    tensors = {name for name, _ in (*rows.read, *rows.written)}
    written = [name for name, _ in rows.written]
    if rows.number in named:
        raise NotATurn("the number of the turn is read for more than rows of tensors")
    if not rows.read:
        raise NotATurn("it reads no rows")
    if tensors & stored:
        raise NotATurn("a tensor of which it reads or writes rows is another in each turn")
    if len({*written}) < len(written) or {*written} & {*values_read(statements), *(name for name, _ in rows.read)}:
        raise NotATurn("it reads what it writes, or writes it twice")
    if not tensors <= set(code.co_varnames) or (named | tensors) & {*code.co_cellvars, *code.co_freevars}:
        raise NotATurn("a name in it is not of its function alone")
    nodes = [node for statement in statements for node in ast.walk(statement)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if any(name.startswith("__") and not name.endswith("__") for name in named | attributes):
        raise NotATurn("a name in it is private to a class")


def values_read(statements: Iterable[ast.stmt]) -> set[str]:
    """The names that are read for more than what a tensor is."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    kinds = [id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in OF_A_KIND]
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in kinds}


class Rows(ast.NodeTransformer):
    """Puts a name in the place of each row that is read or written: (tensor, dim) of these are `read` and `written`."""

    def __init__(self, number: str):
        self.number = number
        self.read: list[tuple[str, int]] = []
        self.written: list[tuple[str, int]] = []
        self.depth = 0

    def name_of(self, tensor: str, dim: int) -> str:
        return f"{OF_A_ROW}{'end_' if dim < 0 else ''}{abs(dim)}_{tensor}"

    def visit(self, node: ast.AST) -> Any:
        self.depth += isinstance(node, ast.stmt)
        try:
            return super().visit(node)
        finally:
            self.depth -= isinstance(node, ast.stmt)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """`out[:, i] = value`."""
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Subscript) and self.counts(target.slice):
            tensor, dim, key = self.row_of(target)
            if key is not None or self.depth > 1:
                raise NotATurn("it writes a part of a row, or not in each turn")
            self.written.append((tensor, dim))
            node.targets = [ast.copy_location(ast.Name(self.name_of(tensor, dim), ast.Store()), target)]
        node.value = self.visit(node.value)
        node.targets = [self.visit(found) for found in node.targets]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """`x[:, i, None]`."""
        if not self.counts(node.slice):
            return self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            raise NotATurn("it writes rows in a form that is not known here")
        tensor, dim, key = self.row_of(node)
        if (tensor, dim) not in self.read:
            self.read.append((tensor, dim))
        row = ast.copy_location(ast.Name(self.name_of(tensor, dim), ast.Load()), node)
        return row if key is None else ast.copy_location(ast.Subscript(row, key, node.ctx), node)

    def counts(self, key: ast.AST) -> bool:
        """Whether the number of the turn is in it."""
        return any(isinstance(node, ast.Name) and node.id == self.number for node in ast.walk(key))

    def row_of(self, node: ast.Subscript) -> tuple[str, int, ast.expr | None]:
        """The tensor, the dim of which it takes a row, and what it takes of the row, None for all of it."""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        places = [place for place, part in enumerate(parts) if self.counts(part)]
        if not isinstance(node.value, ast.Name) or len(places) != 1:
            raise NotATurn("it reads rows in a form that is not known here")
        front, part, behind = parts[: places[0]], parts[places[0]], parts[places[0] + 1 :]
        wide = ast.unparse(part) == f"{self.number}:{self.number} + 1"
        if not (wide or isinstance(part, ast.Name)) or not all(map(is_plain, behind)):
            raise NotATurn("it reads rows in a form that is not known here")
        if all(map(is_whole, front)):
            dim = len(front)
        elif len(front) == 1 and is_dots(front[0]) and all(map(is_whole, behind)) and not wide:
            return node.value.id, -1 - len(behind), None
        else:
            raise NotATurn("it reads rows in a form that is not known here")
        if not wide and all(map(is_whole, behind)):
            return node.value.id, dim, None
        kept = [*front, *([ast.Constant(None)] if wide else []), *behind]
        return node.value.id, dim, ast.copy_location(ast.Tuple(kept, ast.Load()), node)


def is_whole(part: ast.expr) -> bool:
    """`:`."""
    return isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None


def is_dots(part: ast.expr) -> bool:
    """`...`."""
    return isinstance(part, ast.Constant) and part.value is Ellipsis


def is_plain(part: ast.expr) -> bool:
    """A slice, a constant number, None or dots: no tensor of places."""
    return isinstance(part, (ast.Slice, ast.Constant)) or (
        isinstance(part, ast.UnaryOp) and isinstance(part.operand, ast.Constant)
    )


def made(
    statements: list[ast.stmt],
    given: list[str],
    returned: tuple[list[str], list[str]],
    loop: ast.For,
    code: CodeType,
    names: dict[str, Any],
) -> FunctionType:
    """The function, whose lines are those of the program."""
    parts = [ast.Tuple([ast.Name(name, ast.Load()) for name in part], ast.Load()) for part in returned]
    end = ast.copy_location(ast.Return(ast.Tuple(list[ast.expr](parts), ast.Load())), loop)
    arguments = ast.arguments(posonlyargs=[], args=[ast.arg(name) for name in given], kwonlyargs=[], kw_defaults=[],
                              defaults=[])  # fmt: skip
    function = ast.FunctionDef(code.co_name, arguments, [*statements, end], [])
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(function, loop)], []))
    compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    return FunctionType(next(found for found in compiled.co_consts if isinstance(found, CodeType)), names)
