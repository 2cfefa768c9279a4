"""A cache of fake values: each operator is run once for operands of the same kinds.

A graph of many equal layers calls torch's fake kernels with the same kinds of operands again and again, and each call
goes through the dispatcher. The result depends on the operator and its arguments, and of tensors on their kinds and on
which of them share storage; on a hit it is a new tensor of the known kind, in storage of its own or in an operand's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringopt.torch_compat.autograd import autocast_is_on
from ringopt.torch_compat.fake_tensors import FakeTensor, unset_fake_temporarily
from ringopt.torch_compat.schema import OpOverload, schema_of
from ringopt.torch_compat.tensors import storage_key

# Arguments that are compared by type and value.
PLAIN = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# Sizes, strides, offset, dtype, device: all of a tensor but its storage.
Kind = tuple[Any, ...]
# A result: its kind; the index of the operand whose storage it shares, or None; whether it is that operand itself.
Result = tuple[Kind, int | None, bool]


# What an operator returned: tuple, list, or None for a single value; and the results.
Answer = tuple[type | None, list[Result]]

# Of ATen operators, which depend on nothing else: shared by all graphs of a process.
SHARED: dict[Any, Answer] = {}
MOST = 20_000  # answers that are kept


class Answers:
    """Calls operators on fake tensors, without gradients, and caches the kinds of their results. Operators of other
    libraries may read more than their arguments (ringopt's read the mesh): their entries hold for one graph."""

    def __init__(self) -> None:
        self.own: dict[Any, Answer] = {}

    def call(self, target: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """The result of `run()`, which calls `target(*args, **kwargs)`; `run` is skipped on a hit."""
        operands: list[FakeTensor] = []
        if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
            return run()
        key = frozen((args, sorted(kwargs.items())), operands)
        if key is None or not operands:
            return run()
        memory = [storage_key(x) for x in operands]
        key = target, key, tuple(map(memory.index, memory)), torch.get_default_dtype()
        known = SHARED if target.namespace == "aten" and not autocast_is_on() else self.own
        if key in known:
            return _made(*known[key], operands)
        value = run()
        several = type(value) if type(value) in (tuple, list) else None
        results = [result_of(x, operands, memory) for x in (value if several else (value,))]
        found = [result for result in results if result is not None]
        if len(found) == len(results):
            if len(known) >= MOST:
                known.clear()
            known[key] = several, found
            return _made(*known[key], operands)  # as in the next call: torch's own may say that it has a gradient
        return value


def frozen(argument: Any, operands: list[FakeTensor]) -> Any:
    """A key of arguments, equal for tensors of one kind; appends these to `operands`. None where equal keys could hide
    a difference."""
    if isinstance(argument, Tensor):
        operands.append(argument)  # type: ignore[arg-type]
        return kind_of(argument)
    if isinstance(argument, (tuple, list)):
        parts = tuple(frozen(part, operands) for part in argument)
        return None if None in parts else parts
    return (type(argument), argument) if isinstance(argument, PLAIN) else None  # by type: True, 1 and 1.0 are equal


def kind_of(x: Any) -> Kind | None:
    """None for tensors with symbolic sizes, and for subclasses, sparse, conjugate and constant ones."""
    plain = type(x) is FakeTensor and x.layout is torch.strided and not x.is_conj() and not x.is_neg()
    if not plain or x.constant is not None:
        return None
    sizes = (*x.shape, *x.stride(), x.storage_offset())
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device


def result_of(x: Any, operands: list[FakeTensor], memory: list[int]) -> Result | None:
    """None for a value without a kind, or in new storage that is larger than it."""
    kind = kind_of(x)
    if kind is None:
        return None
    same = next((place for place, operand in enumerate(operands) if operand is x), None)
    if same is not None:
        return kind, same, True
    if storage_key(x) in memory:
        return kind, memory.index(storage_key(x)), False
    return (kind, None, False) if x.untyped_storage().nbytes() == smallest(x) else None


def smallest(x: Tensor) -> int:
    """The bytes that a tensor of its sizes and strides needs, from the start of its storage."""
    if not x.numel():
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _made(several: type | None, results: list[Result], operands: list[FakeTensor]) -> Any:
    with unset_fake_temporarily():
        values = [_tensor(*result, operands) for result in results]
    return several(values) if several else values[0]


def _tensor(kind: Kind, memory: int | None, itself: bool, operands: list[FakeTensor]) -> FakeTensor:
    if memory is not None and itself:
        return operands[memory]
    size, stride, offset, dtype, device = kind
    if memory is None:
        raw = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    else:
        raw = torch.empty(0, dtype=dtype, device="meta")
        raw.set_(operands[memory].untyped_storage(), offset, size, stride)
    return FakeTensor(operands[0].fake_mode, raw, device)
