"""Readers of a term: `evaluate` computes a block of it, `show` prints it for users.

`evaluate` runs the ATen ops of the program on block-shaped coordinates, so a block is bitwise equal to that block of
the dense mask, and autograd reaches the loaded tensors through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.expr.terms import Affine, Apply, Cast, Load, Number, Score, Term, walk

Sources = Mapping[Any, Tensor] | Sequence[Tensor]


def evaluate(term: Term, place: Mapping[str, Tensor], sources: Sources, device: torch.device | None = None) -> Tensor:
    """The elements at `place` (axis -> int64 coordinates, shaped to broadcast against each other; "score" -> the scaled
    products there, which keep their dtype).

    The result has the dims of the coordinates it depends on, and no dims where it depends on none. Raises KeyError or
    IndexError for an axis or a source that is missing.
    """
    values: dict[Term, Tensor] = {}
    for each in walk(term):
        values[each] = _value(each, values, place, sources, device)
    return values[term]


def _value(
    term: Term,
    values: Mapping[Term, Tensor],
    place: Mapping[str, Tensor],
    sources: Sources,
    device: torch.device | None,
) -> Tensor:
    if isinstance(term, Affine):
        total: Tensor | int = term.start
        for axis, step in term.steps:
            total = total + (place[axis] if step == 1 else place[axis] * step)
        if isinstance(total, Tensor):
            return total.to(term.dtype)
        return torch.full((), total, dtype=term.dtype, device=device)
    if isinstance(term, Number):
        return torch.full((), term.value, dtype=term.dtype, device=device)
    if isinstance(term, Load):
        source = sources[term.source]
        if not term.index:
            return source
        # The operator, not `source[...]`: that would turn an index without dims into a Python number.
        element: Tensor = torch.ops.aten.index.Tensor(source, alike([values[index].long() for index in term.index]))
        return element
    if isinstance(term, Score):
        return place["score"]
    if isinstance(term, Cast):
        return values[term.operand].to(term.dtype)
    assert isinstance(term, Apply)
    args = [values[arg] if isinstance(arg, Term) else arg for arg in term.args]
    result: Tensor = getattr(torch.ops.aten, term.op)(*args, **dict(term.kwargs))
    return result.to(term.dtype)


def alike(indices: list[Tensor]) -> list[Tensor]:
    """The indices with leading dims of size 1, so that all have one rank. Fake tensors would give the result the shape
    of the last index, where one has rank 0 (torch 2.13: meta_index_Tensor does not broadcast CPU scalars)."""
    dims = max(index.dim() for index in indices)
    return [index.view([1] * (dims - index.dim()) + list(index.shape)) for index in indices]


SIGNS = {
    "le": "<=", "ge": ">=", "lt": "<", "gt": ">", "eq": "==", "ne": "!=", "add": "+", "sub": "-", "mul": "*",
    "logical_and": "&", "logical_or": "|",
}  # fmt: skip


# A subterm whose text is longer than this is shown as "...".
LONGEST = 200


def show(term: Term, name: Callable[[Any], str] = str) -> str:
    """Text for users; `name` gives the name of a source."""
    texts: dict[Any, str] = {}
    for each in walk(term):
        text = _text(each, texts, name)
        texts[each] = text if len(text) <= LONGEST else "..."
    return texts[term]


def _text(term: Term, texts: Mapping[Any, str], name: Callable[[Any], str]) -> str:
    if isinstance(term, Affine):
        ordered = sorted(term.steps, key=lambda step: step[1] < 0)  # "k-q", not "-q+k"
        parts = [axis if step == 1 else f"-{axis}" if step == -1 else f"{step}{axis}" for axis, step in ordered]
        parts += [str(term.start)] if term.start or not parts else []
        return "+".join(parts).replace("+-", "-")
    if isinstance(term, Number):
        return _plain(term.value)
    if isinstance(term, Load):
        index = ", ".join(texts[each] for each in term.index)
        return f"{name(term.source)}[{index}]" if index else name(term.source)
    if isinstance(term, Score):
        return "score"
    if isinstance(term, Cast):
        return f"{str(term.dtype).removeprefix('torch.')}({texts[term.operand]})"
    assert isinstance(term, Apply)
    args = [texts[arg] if isinstance(arg, Term) else _plain(arg) for arg in term.args]
    if term.op in SIGNS and len(args) == 2:
        return f"({args[0]} {SIGNS[term.op]} {args[1]})"
    return f"{term.op}({', '.join(args + [f'{key}={value}' for key, value in term.kwargs])})"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
