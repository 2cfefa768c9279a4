"""One turn of a loop as a function of what it reads, from the source of the loop.

    for i in range(n):                                def turn(state, k_i, v_i, decay):
        state = state * decay + k[:, i] * v[:, i]         state = state * decay + k_i * v_i
        out[:, i] = state.sum(-1)                         out_i = state.sum(-1)
                                                          return (state,), (out_i,)

The number of the turn may say nothing but which row of a tensor is read, written or appended to a list (rows.py), so
that all turns are alike. What is named in the loop and read before it is set, or behind the loop, is carried. All else
that decides whether this is the loop is for Dynamo to say, which traces it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from copy import deepcopy
from types import CodeType, FunctionType
from typing import Any

from ringopt.frontend.loops.over_rows import OverRows
from ringopt.frontend.loops.rows import FIRST, LAST, STEP, NotATurn, RowsByName
from ringopt.torch_compat.dynamo_ranges import RowsInTurns, Turn

# Which may leave the loop, bind names elsewhere, or run later.
NOT_IN_A_TURN = (
    ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global,
    ast.Nonlocal, ast.Delete, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Try, ast.Raise,
    ast.Match, *([ast.TryStar] if hasattr(ast, "TryStar") else []),
)  # fmt: skip
AS_EVERYWHERE = {"min", "int", "isinstance"}  # Python's own, which sizes are told with
OF_A_KIND = ("dtype", "device", "shape", "ndim")


def turn_of(loop: ast.For, code: CodeType, live: set[str], names: dict[str, Any]) -> Turn:
    """`live`: the local names of the function `code` that are read from the loop on before they are set. `names`: the
    globals of the function. Raises NotATurn."""
    body = deepcopy(loop.body)
    for node in (found for statement in body for found in ast.walk(statement)):
        if isinstance(node, NOT_IN_A_TURN):
            raise NotATurn(f"{type(node).__name__.lower()} stands in it")
    if loop.orelse or not isinstance(loop.target, ast.Name):
        raise NotATurn("it has an else, or counts in several names")
    if loop.target.id in live:
        raise NotATurn("the number of its last turn is read behind it")
    if AS_EVERYWHERE & {*names, *code.co_varnames, *code.co_freevars}:
        raise NotATurn("a name of Python's own is another there")
    rows = RowsByName(loop.target.id)
    statements = [kept for statement in body for kept in as_list(rows.visit(statement))]
    stored, loaded = names_in(statements, ast.Store), names_in(statements, ast.Load)
    own = {*rows.read, *rows.written, *rows.lists}
    if not rows.read:
        raise NotATurn("it reads no rows")
    sizes = rows.sizes(loop)
    sized = names_in([ast.Expr(sizes)], ast.Load) - {FIRST, LAST, STEP}
    check(rows, code, live, sized, stored - own, [*statements, ast.Expr(sizes)])
    carried = sorted((stored - own) & live)
    rest = sorted(((loaded | sized) - own - stored) & set(code.co_varnames))
    function = made(
        statements,
        [*carried, *rows.read, *rest],
        tuple_of([tuple_of(map(load, part)) for part in (carried, [*rows.written, *rows.lists])]),
        loop,
        code,
        names,
    )
    lie = made([], [FIRST, LAST, STEP, *rest], sizes, loop, code, names)
    over = number_over_rows(loop)
    counted = sorted(names_in([ast.Expr(over)], ast.Load)) if over is not None else []
    return Turn(
        function,
        lie,
        tuple(carried),
        tuple(rows.read.values()),
        tuple(rows.written.values()),
        tuple(rows.lists.values()),
        tuple(rest),
        number=made([], counted, over, loop, code, names) if over is not None else None,
        counted=tuple(counted),
    )


def number_over_rows(loop: ast.For) -> ast.expr | None:
    """How many turns a loop over rows has, -1 where its tensors have another number of them each."""
    return loop.iter.args[0] if isinstance(loop, OverRows) and isinstance(loop.iter, ast.Call) else None


def as_list(visited: ast.stmt | list[ast.stmt] | None) -> list[ast.stmt]:
    """The statements that stand in the place of one."""
    return visited if isinstance(visited, list) else [] if visited is None else [visited]


def names_in(statements: Iterable[ast.stmt], kind: type[ast.expr_context]) -> set[str]:
    """The names that are loaded, or stored."""
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}


def check(
    rows: RowsByName, code: CodeType, live: set[str], sized: set[str], stored: set[str], statements: list[ast.stmt]
) -> None:
    """Raises NotATurn. `sized`: the names that say how rows lie; `stored`: those that a turn sets."""
    numbers = {rows.numbers.number, *rows.numbers.named}
    named = names_in(statements, ast.Load) | names_in(statements, ast.Store)
    tensors = tensors_of(rows.read) | tensors_of(rows.written)
    written = [found.tensor for found in rows.written.values()]
    lists = [*rows.lists.values()]
    if numbers & named or rows.numbers.named.keys() & live:
        raise NotATurn("the number of the turn is read for more than rows of tensors")
    if tensors & stored:
        raise NotATurn("a tensor of which it reads or writes rows is another in each turn")
    if sized & stored:
        raise NotATurn("the size of a row is another in each turn")
    if {*lists} & named or len({*lists}) < len(lists):
        raise NotATurn("it reads a list to which it appends, or appends to it twice")
    if len({*written}) < len(written) or {*written} & {*values_read(statements), *tensors_of(rows.read)}:
        raise NotATurn("it reads what it writes, or writes it twice")
    own = named | tensors | {*lists}
    if not tensors | {*lists} <= set(code.co_varnames) or own & {*code.co_cellvars, *code.co_freevars}:
        raise NotATurn("a name in it is not of its function alone")
    nodes = [node for statement in statements for node in ast.walk(statement)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if any(name.startswith("__") and not name.endswith("__") for name in own | attributes):
        raise NotATurn("a name in it is private to a class")


def tensors_of(rows: dict[str, RowsInTurns]) -> set[str]:
    """The names of those of which rows are taken."""
    return {found.tensor for found in rows.values()}


def values_read(statements: Iterable[ast.stmt]) -> set[str]:
    """The names that are read for more than what a tensor is."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    kinds = [id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in OF_A_KIND]
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in kinds}


def load(name: str) -> ast.expr:
    """A name that is read."""
    return ast.Name(name, ast.Load())


def tuple_of(parts: Iterable[ast.expr]) -> ast.expr:
    """`(a, b)`."""
    return ast.Tuple([*parts], ast.Load())


def made(
    statements: list[ast.stmt], given: list[str], returned: ast.expr, loop: ast.For, code: CodeType,
    names: dict[str, Any],
) -> FunctionType:  # fmt: skip
    """The function, whose lines are those of the program."""
    end = ast.copy_location(ast.Return(returned), loop)
    arguments = ast.arguments(posonlyargs=[], args=[ast.arg(name) for name in given], kwonlyargs=[], kw_defaults=[],
                              defaults=[])  # fmt: skip
    function = ast.FunctionDef(code.co_name, arguments, [*statements, end], [])
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(function, loop)], []))
    compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    return FunctionType(next(found for found in compiled.co_consts if isinstance(found, CodeType)), names)
