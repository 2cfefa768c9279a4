"""What a mask does to scores, written as a function in Triton: its value, its slope in the score, who is seen.

    mul(tanh(mul(score, 0.5)), 2.0)   ->   x0 = s * 0.5
                                           x1 = tanh(x0)
                                           x2 = x1 * 2.0      slope: 2.0 * (1 - x1 * x1) * 0.5

Floats are computed in float32 and rounded where the program has 16 bits, as ATen does it. A term that has no such form
is a Refusal, and its attention is left to matrix products.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch

from ringopt.expr.mask import Mask
from ringopt.expr.terms import Affine, Apply, Cast, Load, Number, Plain, Score, Term, walk
from ringopt.ir.refusal import Refusal

FLOATS = {torch.float32: "", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# value, then the slope in each argument ("" where there is none); y is the value.
OPS: dict[str, tuple[str, ...]] = {
    "add": ("{0} + {1}", "1.0", "1.0"),
    "sub": ("{0} - {1}", "1.0", "-1.0"),
    "rsub": ("{1} - {0}", "-1.0", "1.0"),
    "mul": ("{0} * {1}", "{1}", "{0}"),
    "div": ("{0} / {1}", "1.0 / {1}", "-{y} / {1}"),
    "neg": ("-{0}", "-1.0"),
    "abs": ("tl.abs({0})", "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))"),
    "exp": ("tl.exp({0})", "{y}"),
    "log": ("tl.log({0})", "1.0 / {0}"),
    "sqrt": ("tl.sqrt({0})", "0.5 / {y}"),
    "tanh": ("tanh({0})", "1.0 - {y} * {y}"),
    "sigmoid": ("tl.sigmoid({0})", "{y} * (1.0 - {y})"),
    "relu": ("tl.maximum({0}, 0.0)", "tl.where({0} > 0, 1.0, 0.0)"),
    "where": ("tl.where({0}, {1}, {2})", "", "tl.where({0}, 1.0, 0.0)", "tl.where({0}, 0.0, 1.0)"),
    "minimum": ("tl.minimum({0}, {1})", "half({0}, {1})", "half({1}, {0})"),
    "maximum": ("tl.maximum({0}, {1})", "half({1}, {0})", "half({0}, {1})"),
    "detach": ("{0}", ""),
    "le": ("{0} <= {1}", "", ""),
    "lt": ("{0} < {1}", "", ""),
    "ge": ("{0} >= {1}", "", ""),
    "gt": ("{0} > {1}", "", ""),
    "eq": ("{0} == {1}", "", ""),
    "ne": ("{0} != {1}", "", ""),
    "logical_and": ("{0} & {1}", "", ""),
    "logical_or": ("{0} | {1}", "", ""),
    "logical_not": ("{0} == 0", ""),
    "floor_divide": ("floored({0}, {1})", "", ""),
    "remainder": ("{0} - floored({0}, {1}) * {1}", "", ""),
}

HELPERS = """import triton
import triton.language as tl


@triton.jit
def tanh(x):
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(x < 0, -far, far)


@triton.jit
def half(x, y):
    return tl.where(x < y, 1.0, tl.where(x == y, 0.5, 0.0))


@triton.jit
def floored(x, y):
    whole = x // y
    return tl.where(whole * y > x, whole - 1, whole)


@triton.jit
def inside(place, size):
    place = tl.where(place < 0, place + size, place)
    return tl.minimum(tl.maximum(place, 0), size - 1)


"""
SIGNATURE = """@triton.jit
def scores(s, b, h, q, k, r, loads, steps, sizes):
"""


class NoForm(Exception):
    """Why a term has no such form."""


@lru_cache(maxsize=256)
def scores_program(mask: Mask, with_mask: bool) -> str | Refusal:
    """The text of `scores(s, b, h, q, k, r, loads, steps, sizes) -> (value, slope, seen)`; `with_mask`: bias and who is
    seen too, not the change of scores alone."""
    writer = Writer()
    try:
        value, slope = writer.write(mask.score) if mask.score is not None else ("s", "1.0")
        seen = "True"
        if with_mask and mask.bias is not None:
            bias, none = writer.write(mask.bias)
            if none:
                return Refusal("a bias that depends on the score")
            value = f'tl.where({bias} == float("-inf"), float("-inf"), {value} + {bias})'
        if with_mask and mask.visible is not None:
            seen, _ = writer.write(mask.visible)
    except NoForm as why:
        return Refusal(str(why))
    lines = (*writer.lines, f"return {value}, {slope or '0.0'}, {seen}\n")
    return HELPERS + SIGNATURE + "\n".join(f"    {line}" for line in lines)


class Writer:
    """`lines` of the function; each term has a name, and a slope in the score, "" where that is 0."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._found: dict[Term, tuple[str, str]] = {}

    def write(self, term: Term) -> tuple[str, str]:
        for each in walk(term):
            if each not in self._found:
                self._found[each] = self._named(each)
        return self._found[term]

    def _named(self, term: Term) -> tuple[str, str]:
        kind_of(term.dtype)
        for of, write in WRITERS.items():
            if isinstance(term, of):
                return write(self, term)
        raise NoForm(f"{type(term).__name__} has no form in Triton")

    def _name(self, value: str, dtype: torch.dtype, slope: str = "") -> tuple[str, str]:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {rounded(value, dtype)}")
        if slope:
            self.lines.append(f"d{name} = {slope.replace('{y}', name)}")
        return name, f"d{name}" if slope else ""

    def affine(self, term: Affine) -> tuple[str, str]:
        parts = [f"{axis} * {step}" for axis, step in term.steps]
        return self._name(" + ".join([*parts, str(term.start)]), term.dtype)

    def number(self, term: Number) -> tuple[str, str]:
        return number_text(term.value), ""

    def load(self, term: Load) -> tuple[str, str]:
        n, places = term.source, [self._found[index][0] for index in term.index]
        parts = [f"inside({place}, sizes[{n}][{dim}]) * steps[{n}][{dim}]" for dim, place in enumerate(places)]
        return self._name(f"tl.load(loads[{n}] + ({' + '.join(parts) or '0'}))", term.dtype)

    def score(self, term: Score) -> tuple[str, str]:
        return "s", "1.0"

    def cast(self, term: Cast) -> tuple[str, str]:
        value, slope = self._found[term.operand]
        return self._name(value, term.dtype, slope if kind_of(term.dtype) == "float" else "")

    def apply(self, term: Apply) -> tuple[str, str]:
        rule = OPS.get(term.op)
        if rule is None or term.kwargs or len(term.args) != len(rule) - 1:
            raise NoForm(f"{term.op} has no form in Triton")
        given = [self._found[arg] if isinstance(arg, Term) else (number_text(arg), "") for arg in term.args]
        names = [name for name, _ in given]
        ways = ((way.format(*names, y="{y}"), slope) for way, (_, slope) in zip(rule[1:], given, strict=True))
        parts = [f"({way}) * {slope}" for way, slope in ways if way and slope]
        return self._name(rule[0].format(*names), term.dtype, " + ".join(parts))


WRITERS: dict[type[Term], Callable[[Writer, Term], tuple[str, str]]] = {
    Affine: Writer.affine,  # type: ignore[dict-item]
    Number: Writer.number,  # type: ignore[dict-item]
    Load: Writer.load,  # type: ignore[dict-item]
    Score: Writer.score,  # type: ignore[dict-item]
    Cast: Writer.cast,  # type: ignore[dict-item]
    Apply: Writer.apply,  # type: ignore[dict-item]
}


def kind_of(dtype: torch.dtype) -> str:
    """ "float", "int" or "bool". Raises NoForm for what is computed in more than 32 bits."""
    if dtype in FLOATS:
        return "float"
    if dtype in INTEGERS:
        return "int"
    if dtype == torch.bool:
        return "bool"
    raise NoForm(f"{dtype} has no form in Triton")


def rounded(value: str, dtype: torch.dtype) -> str:
    """A value of that dtype, floats in float32."""
    kind = kind_of(dtype)
    if kind == "bool":
        return f"({value}) != 0"
    if kind == "int":
        return f"tl.cast({value}, tl.int64)"
    narrow = FLOATS[dtype]
    return f"tl.cast(tl.cast({value}, {narrow}), tl.float32)" if narrow else f"tl.cast({value}, tl.float32)"


def number_text(value: Plain) -> str:
    """Of a number. Raises NoForm for anything else."""
    if isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    raise NoForm(f"{value!r} has no form in Triton")


@lru_cache(maxsize=256)
def function_of(program: str, name: str) -> Any:
    """The function `name` of that text; Triton reads it again where Python keeps the lines of a file. It is called as
    that of no other text is: Triton 3.5 keeps what it compiled by the names of the functions that a kernel is given."""
    digest = sha256(program.encode()).hexdigest()  # the same in each process, as a cache needs it
    own, file = f"{name}_{digest[:16]}", f"<{name} {digest}>"
    program = program.replace(f"def {name}(", f"def {own}(")
    linecache.cache[file] = (len(program), None, program.splitlines(keepends=True), file)
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile(program, file, "exec"), found)
    return found[own]
