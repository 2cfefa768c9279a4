"""A call of an operator, at sizes that are numbers: what the table of traits (traits.py) computes from.

    call = SizedCall.of(node, ranks=4, rank=0, number=int)
    call["x"].bytes, call["length"], call.result.sizes

Who reads a graph says what an open size is: the length at hand, the rows of a rank in a program for any number of
ranks, or `Open`, raised where it cannot be told. Nothing is made a number before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import arguments_of, op_name, value_of


class Open(Exception):
    """A size cannot be told, or what a value is."""


@dataclass(frozen=True)
class Operand:
    """A tensor, by its sizes and its dtype. `number` of a size that nobody asks for is not asked."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    number: Callable[[Any], int] = int

    def size(self, dim: int) -> int:
        return self.number(self.shape[dim])

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(self.number, self.shape))

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def count(self) -> int:
        return prod(self.sizes)

    def count_from(self, dim: int) -> int:
        """Of the elements of `dim` and those behind it, at one place of the dims before it."""
        return prod(self.sizes[dim:])

    def place(self, dim: int) -> int:
        """Bytes of one place of `dim`."""
        return prod(size for at, size in enumerate(self.sizes) if at != dim) * self.dtype.itemsize


@dataclass(frozen=True)
class SizedCall:
    """`call[name]` is an argument by its name in the schema, defaults included: a tensor as an Operand, sizes as
    numbers.

    ranks, rank  of the mesh
    number       of a size, which may be open. Raises Open
    rows         that a rank has of the longest sequence: what has no more numbers does not grow with it
    most         rows times ranks, beyond which a plan of rows is not unrolled to be counted, and is Open
    """

    name: str
    arguments: Mapping[str, Any]
    value: Any
    ranks: int
    rank: int
    number: Callable[[Any], int] = int
    rows: int = 0
    most: float = inf

    @classmethod
    def of(cls, node: fx.Node, ranks: int, rank: int, **how: Any) -> SizedCall:
        return cls(op_name(node), arguments_of(node), value_of(node), ranks, rank, **how)

    def __getitem__(self, name: str) -> Any:
        return self.sized(self.arguments[name])

    @property
    def result(self) -> Operand:
        """The first."""
        first = self.value[0] if isinstance(self.value, (tuple, list)) else self.value
        found = self.sized(first)
        if not isinstance(found, Operand):
            raise Open(f"the result of {self.name}")
        return found

    def sized(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            x = value_of(x)
            if x is None:
                raise Open(f"an operand of {self.name}")
        if isinstance(x, (tuple, list)):
            return [self.sized(part) for part in x]
        if isinstance(x, torch.SymInt) or (isinstance(x, int) and not isinstance(x, bool)):
            return self.number(x)
        if hasattr(x, "shape") and not isinstance(x, Operand):
            return Operand(tuple(x.shape), x.dtype, self.number)
        return x

    def conjugate(self, name: str, value: Any, **arguments: Any) -> SizedCall:
        """Of the operator that the backward of this one calls: `arguments` in the place of those of this one."""
        return replace(self, name=name, value=value, arguments={**self.arguments, **arguments})

    def unrolled(self, rows: int) -> None:
        """Raises Open, where a plan of so many rows is larger than what is unrolled to be counted."""
        if rows * self.ranks > self.most:
            raise Open(f"{rows} rows of {self.ranks} ranks")
