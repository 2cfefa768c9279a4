"""Rows of tensors that a turn of a loop reads and writes, or puts behind a list: names stand in their place.

    q_i = q[:, i]                                          q_i = row_0
    k_i = k[:, start:end, None]                     ->     k_i = row_1[:, :, None]
    out[:, i] = q_i @ k_i                                  row_2 = (q_i @ k_i).clone()
    states.append(q_i)                                     row_3 = q_i

Where they begin and how many a turn has may follow from the number of the turn by sums and products.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, TypeVar

import sympy

from ringopt.frontend.loops.numbers import Numbers
from ringopt.torch_compat.dynamo_ranges import RowsInTurns

N = TypeVar("N", bound=ast.AST)
ROW, LISTED = "_ringopt_row_", "_ringopt_listed_"
FIRST, LAST, STEP = "_ringopt_first", "_ringopt_last", "_ringopt_step"  # numbers of turns
ANOTHER_FORM = "it reads rows in a form that is not known here"


class NotATurn(Exception):
    """A loop is no function of the rows of a turn, for this reason."""


class RowsByName(ast.NodeTransformer):
    """`read`, `written` and `lists`: the names of rows, and what they are rows of."""

    def __init__(self, number: str):
        self.numbers = Numbers(number)
        self.read: dict[str, RowsInTurns] = {}
        self.written: dict[str, RowsInTurns] = {}
        self.lists: dict[str, str] = {}
        self.cuts: dict[str, tuple[sympy.Expr, sympy.Expr]] = {}  # the first number of a row, and how many it has
        self.depth = 0

    def visit(self, node: ast.AST) -> Any:
        """A number that is the same in all turns has no number of a turn in it any more."""
        if isinstance(node, ast.expr):
            node = self.settled(node)
        self.depth += isinstance(node, ast.stmt)
        try:
            return super().visit(node)
        finally:
            self.depth -= isinstance(node, ast.stmt)

    def settled(self, node: ast.expr) -> ast.expr:
        """A number, without that of the turn where it is the same in all turns."""
        known = isinstance(node, ast.Name) and node.id in self.numbers.named
        value = self.numbers.value(node) if is_read(node) and (known or self.numbers.counts(node)) else None
        return node if value is None or self.numbers.grows(value) else parsed(self.numbers.written(value), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """`out[:, i] = value`, and `start = i * size`."""
        target = node.targets[0]
        if len(node.targets) > 1:
            return self.generic_visit(node)
        if self.depth == 1 and self.is_number(target, node.value):
            return None
        known = len(self.written)
        if isinstance(target, ast.Tuple):
            target.elts = [self.row_written(part) for part in target.elts]
        node.value = self.visit(node.value)
        node.targets = [self.visit(self.row_written(target))]
        return [node, *(copied(name, node) for name in [*self.written][known:])]

    def row_written(self, target: ast.expr) -> ast.expr:
        """A name for a row that is set; anything else as it is."""
        if not isinstance(target, ast.Subscript) or not self.numbers.counts(target.slice):
            return target
        rows, key = self.row_of(target)
        if key is not None or self.depth > 1:
            raise NotATurn("it writes a part of a row, or not in each turn")
        return ast.copy_location(ast.Name(self.name_of(rows, self.written), ast.Store()), target)

    def is_number(self, target: ast.expr, value: ast.expr) -> bool:
        """Whether it only sets names to numbers that follow from that of the turn; they are known from here on."""
        pairs = list(parts_of(target, value))
        names = [name.id for name, _ in pairs if isinstance(name, ast.Name)]
        values = [self.numbers.value(part) if self.numbers.counts(part) else None for _, part in pairs]
        if len(names) < len(pairs) or None in values:
            return False
        self.numbers.named.update(zip(names, values, strict=True))
        return True

    def visit_Expr(self, node: ast.Expr) -> Any:
        """`states.append(value)`."""
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"):
            return self.generic_visit(node)
        return self.appended(node, call.func.value, call.args)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """`states += [value]`."""
        if not isinstance(node.op, ast.Add) or not isinstance(node.value, ast.List):
            return self.generic_visit(node)
        return self.appended(node, node.target, node.value.elts)

    def appended(self, node: ast.stmt, into: ast.expr, values: list[ast.expr]) -> ast.stmt:
        """A name for a row that is put behind a list."""
        one = len(values) == 1 and not isinstance(values[0], ast.Starred)
        if self.depth > 1 or not one or not isinstance(into, ast.Name):
            raise NotATurn("it appends to a list in a form that is not known here, or not in each turn")
        name = f"{LISTED}{len(self.lists)}_{into.id}"
        self.lists[name] = into.id
        row = ast.Assign([ast.Name(name, ast.Store())], self.visit(values[0]))
        return ast.copy_location(row, node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """`x[:, i, None]`."""
        node.slice = self.visit(node.slice)
        if not self.numbers.counts(node.slice):
            node.value = self.visit(node.value)
            return node
        if not isinstance(node.ctx, ast.Load):
            raise NotATurn("it writes rows in a form that is not known here")
        rows, key = self.row_of(node)
        row = ast.copy_location(ast.Name(self.name_of(rows, self.read), ast.Load()), node)
        return row if key is None else ast.copy_location(ast.Subscript(row, key, node.ctx), node)

    def name_of(self, rows: tuple[RowsInTurns, sympy.Expr, sympy.Expr], known: dict[str, RowsInTurns]) -> str:
        """That of a row; rows that are read twice have one."""
        again = (name for name, found in self.read.items() if (found, *self.cuts[name]) == rows and known is self.read)
        name = next(again, f"{ROW}{len(self.cuts)}_{rows[0].tensor}")
        known[name], self.cuts[name] = rows[0], rows[1:]
        return name

    def row_of(self, node: ast.Subscript) -> tuple[tuple[RowsInTurns, sympy.Expr, sympy.Expr], ast.expr | None]:
        """What it takes a row of and where, and what it takes of the row, None for all of it."""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        places = [place for place, part in enumerate(parts) if self.numbers.counts(part)]
        if not isinstance(node.value, ast.Name) or len(places) != 1:
            raise NotATurn(ANOTHER_FORM)
        front, part, behind = parts[: places[0]], parts[places[0]], parts[places[0] + 1 :]
        is_slice = isinstance(part, ast.Slice)
        start, width = self.slice_of(part) if isinstance(part, ast.Slice) else (self.number_of(part), sympy.Integer(1))
        if not all(map(is_plain, [*front, *behind])):
            raise NotATurn(ANOTHER_FORM)
        dotted = any(map(is_dots, front))
        if dotted and not (len(front) == 1 and all(map(is_whole, behind))):
            raise NotATurn(ANOTHER_FORM)
        dim = -1 - len(behind) if dotted else sum(not is_none(each) for each in front)
        kept = [*front, *([ast.Slice()] if is_slice else []), *behind]
        whole = all(is_whole(each) or is_dots(each) for each in kept)
        key = None if whole else ast.copy_location(ast.Tuple(kept, ast.Load()), node)
        return (RowsInTurns(node.value.id, dim, is_slice), start, width), key

    def number_of(self, part: ast.expr | None) -> sympy.Expr:
        """A number that grows by the same from turn to turn."""
        value, grows = self.numbers.value(part), self.numbers.grows
        if value is None or not grows(value) or grows(sympy.expand(value.diff(self.numbers.turn))):
            raise NotATurn(ANOTHER_FORM)
        return value

    def slice_of(self, part: ast.Slice) -> tuple[sympy.Expr, sympy.Expr]:
        """Its first number and how many it has."""
        start, end = self.number_of(part.lower), self.numbers.value(part.upper)
        if part.step is not None or end is None or self.numbers.grows(width := sympy.expand(end - start)):
            raise NotATurn(ANOTHER_FORM)
        return start, width

    def sizes(self, at: ast.stmt) -> ast.expr:
        """How the rows lie, of those that are read and then those that are written: the first number and how many there
        are, `(start, size)`; None if turn by turn they do not lie behind one another."""
        turn, found = self.numbers.turn, list[str]()
        asked = [f"{self.numbers.written(a, LAST)} <= {self.numbers.written(b)}" for a, b in self.numbers.limits]
        for name in (*self.read, *self.written):
            start, width = self.cuts[name]
            first, size = self.numbers.written(start, FIRST), self.numbers.written(width)
            found.append(f"({first}, {size}), ")
            asked += [f"({self.numbers.written(start.diff(turn))}) * {STEP} == {size}", f"{first} >= 0"]
        whole = [f"isinstance({ast.unparse(node)}, int)" for node in self.numbers.used_atoms()]
        return parsed(f"({''.join(found)}) if {' and '.join([*whole, *asked])} else None", at)


def parsed(text: str, at: ast.AST) -> ast.expr:
    """An expression that stands where `at` does."""
    return placed(ast.parse(text, mode="eval").body, at)


def copied(name: str, at: ast.stmt) -> ast.stmt:
    """A row is what was written: its value may be written in place later."""
    return placed(ast.parse(f"{name} = {name}.clone()").body[0], at)


def placed(found: N, at: ast.AST) -> N:
    """All of it, where `at` stands."""
    for node in ast.walk(found):
        ast.copy_location(node, at)
    return found


def parts_of(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """`a, b = c, d` sets one after the other, if they are as many."""
    both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    if both and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
        yield from zip(target.elts, value.elts, strict=True)  # type: ignore[attr-defined]
    else:
        yield target, value


def is_read(node: ast.expr) -> bool:
    """And not set."""
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def is_whole(part: ast.expr) -> bool:
    """`:`."""
    return isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None


def is_dots(part: ast.expr) -> bool:
    """`...`."""
    return isinstance(part, ast.Constant) and part.value is Ellipsis


def is_none(part: ast.expr) -> bool:
    """`None`, which makes a dim."""
    return isinstance(part, ast.Constant) and part.value is None


def is_plain(part: ast.expr) -> bool:
    """A slice, a constant number, None or dots: no tensor of places, and no truth, which makes a dim too."""
    part = part.operand if isinstance(part, ast.UnaryOp) else part
    return isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and not isinstance(part.value, bool))
