"""Expressions in a .pt2 file are arithmetic, or the file is refused.

torch hands sizes to `sympy.sympify`, which evaluates them as Python, and compiles guards as Python. So each text is
parsed here first, which runs nothing, and its syntax tree may hold numbers, symbols, arithmetic and calls of what is
listed. `parts` that two grammars share come first, then sizes (sympy's `srepr`), keys of ranges, and guards.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache

# A size is a number of 64 bits; products of a few are met in guards and never larger ones.
WORD, MOST_BITS = 64, 4096
MOST_POWER = 64
MOST_LETTERS = 1 << 16
MOST_DEPTH = 100

SYMBOL = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
# torch counts up to the number of an unbacked symbol.
UNBACKED = re.compile(r"(?:u|zuf)(\d+)", re.ASCII)
MOST_UNBACKED = 10**6
FLOAT = re.compile(r"-?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})(?:e[+-]?\d{1,3})?", re.ASCII)
# A key of a dict of inputs, as guards have it; torch writes it between quotes into code.
KEY = re.compile(r"[^'\"\\\x00-\x1f\x7f\u2028\u2029]*")

ASSUMED = {"positive", "negative", "nonnegative", "nonpositive", "integer", "real", "nonzero", "zero", "finite"}
NAMES = {"true", "false", "oo", "zoo", "nan", "int_oo"}
POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift"}
# sympy's own, and those of torch.utils._sympy.functions.
FUNCTIONS = POWERS | {
    "Integer", "Rational", "Add", "Mul", "Mod", "Max", "Min", "Abs", "floor", "ceiling", "sign", "Piecewise",
    "ExprCondPair", "And", "Or", "Not", "Xor", "Equality", "Unequality", "StrictLessThan", "StrictGreaterThan",
    "LessThan", "GreaterThan", "Eq", "Ne", "Lt", "Le", "Gt", "Ge",
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "RShift",
    "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt",
    "RoundDecimal", "ToFloat", "Identity", "BitwiseFn_bitwise_and", "BitwiseFn_bitwise_or", "BitwiseFn_bitwise_xor",
    "OpaqueUnaryFn_sqrt", "OpaqueUnaryFn_exp", "OpaqueUnaryFn_log", "OpaqueUnaryFn_log2", "OpaqueUnaryFn_sin",
    "OpaqueUnaryFn_cos", "OpaqueUnaryFn_tan", "OpaqueUnaryFn_asin", "OpaqueUnaryFn_acos", "OpaqueUnaryFn_atan",
    "OpaqueUnaryFn_sinh", "OpaqueUnaryFn_cosh", "OpaqueUnaryFn_tanh", "OpaqueUnaryFn_asinh",
}  # fmt: skip
# What a guard calls by name, of a tensor, and of the modules torch and math.
GUARD_FUNCTIONS = {
    "IsNonOverlappingAndDenseIndicator",
    "cast_symbool_to_symint_guardless",
    "float",
    "int",
    "max",
    "min",
}
GUARD_METHODS = {"size", "stride", "storage_offset", "dim", "numel"}
GUARD_MODULES = {
    "torch": {"sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite", "_sym_sqrt"},
    "math": {"isnan", "floor", "ceil", "trunc", "sqrt", "inf", "nan"},
}


class NoArithmetic(ValueError):
    """Says what was found in place of arithmetic."""


# ---- parts -----------------------------------------------------------------------------------------------------------
def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression; nothing of it is run. Raises NoArithmetic."""
    if len(text) > MOST_LETTERS:
        raise NoArithmetic(f"{len(text):,} letters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoArithmetic("no expression") from None
    if "#" in text or deeper(tree, MOST_DEPTH):
        raise NoArithmetic("a comment" if "#" in text else f"more than {MOST_DEPTH} levels")
    return tree


def deeper(tree: ast.AST, levels: int) -> bool:
    """Whether it has more; without recursion."""
    row: list[ast.AST] = [tree]
    for _ in range(levels):
        row = [child for node in row for child in ast.iter_child_nodes(node)]
    return bool(row)


def _bits_of_number(number: object) -> int:
    if isinstance(number, bool) or number is None:
        return 1
    if isinstance(number, int):
        return _bounded(number.bit_length())
    if isinstance(number, float):
        return WORD
    raise NoArithmetic(f"a {type(number).__name__}")


def _bounded(bits: int) -> int:
    if bits > MOST_BITS:
        raise NoArithmetic(f"numbers of more than {MOST_BITS} bits")
    return bits


def power(base: int, exponent: ast.expr) -> int:
    """Of the result, where the base has so many: the exponent has to be a small number, as it is in every size."""
    found = constant(exponent)
    if found is None or abs(found) > MOST_POWER:
        raise NoArithmetic(f"a power other than a number up to {MOST_POWER}")
    return _bounded(int(base * max(1.0, abs(found))) + 1)


def constant(tree: ast.expr) -> float | None:
    """The number that is written there: 2, -2, Integer(2), Rational(1, 2), Float('0.5', precision=53)."""
    if isinstance(tree, ast.Constant) and isinstance(tree.value, (int, float)):
        return float(tree.value) if abs(tree.value) < 2**WORD else None
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        found = constant(tree.operand)
        return None if found is None else -found
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        parts = [constant(part) for part in tree.args]
        if tree.func.id == "Integer" and len(parts) == 1:
            return parts[0]
        if tree.func.id == "Rational" and len(parts) == 2 and None not in parts and parts[1]:
            return parts[0] / parts[1]  # type: ignore[operator]
        text = tree.args[0] if tree.func.id == "Float" and tree.args else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and FLOAT.fullmatch(text.value):
            return float(text.value)
    return None


def operation(tree: ast.expr, bits: Callable[[ast.expr], int]) -> int | None:
    """Bits of what operators of Python make; None for another kind of expression."""
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, (ast.USub, ast.UAdd, ast.Not)):
        return bits(tree.operand)
    if isinstance(tree, ast.BinOp):
        if isinstance(tree.op, (ast.Pow, ast.LShift)):
            bits(tree.right)
            return power(bits(tree.left), tree.right)
        if isinstance(tree.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.RShift)):
            return _bounded(bits(tree.left) + bits(tree.right))
    if isinstance(tree, ast.BoolOp):
        return max(map(bits, tree.values))
    if isinstance(tree, ast.Compare):
        return max(map(bits, (tree.left, *tree.comparators)))
    return None


def _bits_of_symbol(name: str) -> int:
    found = UNBACKED.fullmatch(name)
    if not SYMBOL.fullmatch(name) or (found and int(found[1]) > MOST_UNBACKED):
        raise NoArithmetic(f"the symbol {name[:20]!r}")
    return WORD


# ---- sizes -----------------------------------------------------------------------------------------------------------
@cache
def check_size(text: str) -> None:
    """`Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(1))`. Raises NoArithmetic."""
    size_bits(parsed(text))


def size_bits(tree: ast.expr) -> int:
    """The most bits that a size may have, written as sympy's `srepr`. Raises NoArithmetic for anything else."""
    if isinstance(tree, ast.Constant):
        return _bits_of_number(tree.value)
    if isinstance(tree, ast.Name) and tree.id in NAMES:
        return WORD
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return size_bits(tree.operand)
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise NoArithmetic(f"{_source_text(tree)}")
    name = tree.func.id
    if name == "Symbol":
        return _symbol_bits(tree)
    if name == "Float":
        return _float_bits(tree)
    if name not in FUNCTIONS or tree.keywords or not tree.args:
        raise NoArithmetic(f"{_source_text(tree)}")
    parts = [size_bits(part) for part in tree.args]
    if name in POWERS:
        if len(parts) != 2:
            raise NoArithmetic(f"{_source_text(tree)}")
        return power(parts[0], tree.args[1])
    return _bounded(sum(parts))


def _symbol_bits(tree: ast.Call) -> int:
    for keyword in tree.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg not in ASSUMED or not isinstance(value, bool):
            raise NoArithmetic(f"{_source_text(tree)}")
    return _bits_of_symbol(text_of(tree))


def _float_bits(tree: ast.Call) -> int:
    for keyword in tree.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg != "precision" or type(value) is not int or not 0 < value <= MOST_BITS:
            raise NoArithmetic(f"{_source_text(tree)}")
    if not FLOAT.fullmatch(text_of(tree)):
        raise NoArithmetic(f"{_source_text(tree)}")
    return WORD


def text_of(tree: ast.Call) -> str:
    """The one argument, a string."""
    value = tree.args[0].value if len(tree.args) == 1 and isinstance(tree.args[0], ast.Constant) else None
    if not isinstance(value, str):
        raise NoArithmetic(f"{_source_text(tree)}")
    return value


def _source_text(tree: ast.AST) -> str:
    """What stands there, in short."""
    text = ast.unparse(tree)
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")


# ---- keys of ranges --------------------------------------------------------------------------------------------------
@cache
def check_range(text: str) -> None:
    """`s0`, `2*s0`, `Mod(s0, 2)`: what `str` makes of a size. Raises NoArithmetic."""
    range_bits(parsed(text))


def range_bits(tree: ast.expr) -> int:
    """The most bits that the key of a range may have. Raises NoArithmetic for anything else."""
    if isinstance(tree, ast.Name):
        return _bits_of_symbol(tree.id)
    if isinstance(tree, ast.Constant):
        return _bits_of_number(tree.value)
    if (
        isinstance(tree, ast.Call)
        and isinstance(tree.func, ast.Name)
        and not tree.keywords
        and tree.func.id in FUNCTIONS
    ):
        return _bounded(sum(map(range_bits, tree.args)))
    found = operation(tree, range_bits)
    if found is None:
        raise NoArithmetic(f"{_source_text(tree)}")
    return found


# ---- guards ----------------------------------------------------------------------------------------------------------
@cache
def check_guard(text: str) -> None:
    """`L['x'].size()[1] // 2 <= 8`: torch compiles it when the program is made to run. Raises NoArithmetic."""
    if any(letter in text for letter in '\n\r\f"\\'):
        raise NoArithmetic("quotes or lines")
    guard_bits(parsed(text))


def guard_bits(tree: ast.expr) -> int:
    """The most bits that the value of a guard may have. Raises NoArithmetic for anything else."""
    if isinstance(tree, ast.Constant):
        return _bits_of_number(tree.value)
    if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name) and tree.value.id in GUARD_MODULES:
        return _module_bits(tree.value.id, tree.attr, tree)
    if isinstance(tree, (ast.Subscript, ast.Attribute)):
        check_path(tree)
        return WORD
    if isinstance(tree, ast.Call):
        return _call_bits(tree)
    found = operation(tree, guard_bits)
    if found is None:
        raise NoArithmetic(f"{_source_text(tree)}")
    return found


def _module_bits(module: str, name: str, tree: ast.AST) -> int:
    if name not in GUARD_MODULES[module]:
        raise NoArithmetic(f"{_source_text(tree)}")
    return WORD


def _call_bits(tree: ast.Call) -> int:
    called = tree.func
    if tree.keywords or any(isinstance(part, ast.Starred) for part in tree.args):
        raise NoArithmetic(f"{_source_text(tree)}")
    if isinstance(called, ast.Name) and called.id in GUARD_FUNCTIONS:
        pass
    elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in GUARD_MODULES:
        _module_bits(called.value.id, called.attr, tree)
    else:
        check_path(tree)
    return _bounded(sum(map(guard_bits, tree.args)) + WORD)


def check_path(tree: ast.expr) -> None:
    """From `L` to an input, by keys and names, and to its sizes."""
    while not (isinstance(tree, ast.Name) and tree.id == "L"):
        if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Constant):
            key, following = tree.slice.value, tree.value
            fine = type(key) is int or (isinstance(key, str) and KEY.fullmatch(key) is not None)
        elif isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and not tree.keywords:
            following = tree.func.value
            fine = tree.func.attr in GUARD_METHODS and all(isinstance(part, ast.Constant) for part in tree.args)
        elif isinstance(tree, ast.Attribute):
            following, fine = tree.value, not tree.attr.startswith("_")
        else:
            fine = False
        if not fine:
            raise NoArithmetic(f"{_source_text(tree)}")
        tree = following
