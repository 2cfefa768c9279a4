"""Whole numbers in a loop that follow from the number of the turn: `start = i * size`, `min(start + size, n)`."""

from __future__ import annotations

import ast

import sympy

ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp)


class Numbers:
    """Of a loop that counts in the name `number`. An atom is a part of an expression that the loop does not change."""

    def __init__(self, number: str):
        self.number = number
        self.turn = sympy.Symbol("turn")
        self.named: dict[str, sympy.Expr] = {}  # names that are set in a turn to such numbers
        self.atoms: dict[str, tuple[sympy.Symbol, ast.expr]] = {}
        self.limits: list[tuple[sympy.Expr, sympy.Expr]] = []  # of the last turn the first is at most the second
        self.used: set[sympy.Symbol] = set()

    def counts(self, node: ast.AST) -> bool:
        """Whether the number of the turn is in it, or one that grows with it."""
        names = [found.id for found in ast.walk(node) if isinstance(found, ast.Name)]
        return any(name == self.number or self.grows(self.named.get(name)) for name in names)

    def grows(self, value: sympy.Expr | None) -> bool:
        """Whether a number is another in each turn."""
        return value is not None and self.turn in value.free_symbols

    def value(self, node: ast.expr | None) -> sympy.Expr | None:
        """A polynomial in the number of the turn and atoms; None of what is none."""
        if node is None:
            return None
        if isinstance(node, ast.Name) and (node.id == self.number or node.id in self.named):
            return self.turn if node.id == self.number else self.named[node.id]
        if not self.counts(node):
            return self.atom(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "min" and len(node.args) == 2 and not node.keywords:
            return self.least(*map(self.value, node.args))
        return self.combined(node)

    def combined(self, node: ast.expr) -> sympy.Expr | None:
        """Of a sum, a difference or a product."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            found = self.value(node.operand)
            return None if found is None else -found
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            return None
        a, b = self.value(node.left), self.value(node.right)
        if a is None or b is None:
            return None
        return sympy.expand(a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b)

    def least(self, a: sympy.Expr | None, b: sympy.Expr | None) -> sympy.Expr | None:
        """Of a number that grows from turn to turn and one that does not, the first, as far as that holds."""
        if a is None or b is None or self.grows(a) == self.grows(b):
            return None
        grows, limit = (a, b) if self.grows(a) else (b, a)
        self.limits.append((grows, limit))
        return grows

    def atom(self, node: ast.expr) -> sympy.Expr | None:
        """Of what is the same in all turns."""
        if isinstance(node, ast.Constant):
            return sympy.Integer(node.value) if type(node.value) is int else None
        found = self.combined(node)
        if found is not None:
            return found
        parts = [part for part in ast.walk(node) if isinstance(part, ast.expr) and not isinstance(part, ast.UnaryOp)]
        if not all(isinstance(part, ATOMS) for part in parts):
            return None
        symbol = sympy.Symbol(f"_ringopt_atom_{len(self.atoms)}")
        return self.atoms.setdefault(ast.unparse(node), (symbol, node))[0]

    def written(self, value: sympy.Expr, turn: str = "") -> str:
        """As source, with a name for the number of the turn."""
        self.used |= value.free_symbols - {self.turn}
        names = {symbol: sympy.Symbol(f"({text})") for text, (symbol, _) in self.atoms.items()}
        return str(sympy.sstr(value.subs({**names, self.turn: sympy.Symbol(turn)})))

    def used_atoms(self) -> list[ast.expr]:
        """Those of what was written."""
        return [node for symbol, node in self.atoms.values() if symbol in self.used]
