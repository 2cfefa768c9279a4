"""Operators as objects, and what their schemas say."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

__all__ = [
    "HigherOrderOperator",
    "OpNamespace",
    "OpOverload",
    "OpOverloadPacket",
    "can_decompose",
    "is_functorch",
    "is_pointwise_name",
    "names_of_all_operators",
    "operator_behind",
    "overload_name",
    "packet_name",
    "schema_of",
    "schema_or_none",
]

# OpOverload: the class of `torch.ops.aten.add.Tensor`, which every operator in a flat graph is an instance of.
# OpOverloadPacket: the class of `torch.ops.aten.add`, whose overloads() are names of its attributes.
# HigherOrderOperator: the class of operators that take graphs or functions, such as flex_attention.

# The class of `torch.ops.aten`; an attribute that is no operator is no OpOverloadPacket.
OpNamespace = _OpNamespace


def schema_of(operator: Any) -> torch.FunctionSchema:
    """`_schema` of an OpOverload: its name ("aten::add"), its arguments (each with name, default, kwarg_only and
    alias_info), its returns, and is_mutable."""
    schema: torch.FunctionSchema = operator._schema
    return schema


# What functions of `operator` are called, where their operators have other names.
SPELT = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "not": "logical_not",
}  # fmt: skip


def is_pointwise_name(name: str) -> bool:
    """Whether a function or a method of that name ("mul", "__and__") computes each element from those in its place."""
    plain = name.strip("_")
    packet = getattr(torch.ops.aten, SPELT.get(plain, plain), None)
    if not isinstance(packet, OpOverloadPacket):  # `torch.ops.aten.name` is a text
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def schema_or_none(target: Any) -> torch.FunctionSchema | None:
    """The same of what a node calls; None for what has no schema: Python functions, names of methods."""
    return getattr(target, "_schema", None)


def overload_name(operator: OpOverload) -> str:
    """`_overloadname`: "Tensor" of aten.add.Tensor, "default" where the schema names none."""
    return str(operator._overloadname)


def operator_behind(given: Any) -> Any:
    """`_opoverload` of what torch.library.custom_op returns; anything else as it is."""
    return getattr(given, "_opoverload", given)


def packet_name(given: Any) -> str:
    """`_qualified_op_name` of an OpOverloadPacket, "aten::add"; "" of anything else."""
    return str(getattr(given, "_qualified_op_name", ""))


def can_decompose(operator: OpOverload) -> bool:
    """Whether `decompose()` of the operator runs others that torch defines it by (CompositeImplicitAutograd)."""
    return bool(operator._can_decompose())


def is_functorch(target: Any) -> bool:
    """Whether it is a function of torch._functorch, in Python or in C: those that begin and end a vmap or a grad in
    Dynamo's graph."""
    return str(getattr(target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch"))


def names_of_all_operators() -> list[str]:
    """Of every library that is loaded: "aten::add.Tensor", "aten::linear"."""
    return list(torch._C._dispatch_get_all_op_names())
