"""A graph as short text, for goldens, logs and the README."""

from __future__ import annotations

import difflib
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import is_tensor, op_name, value_of
from ringopt.torch_compat.schema import schema_or_none

# Arguments that are not shown: the name of the mesh, and the token that separates cache entries.
HIDDEN = ("group", "version")


def short(graph: fx.Graph, sizes: bool = False) -> str:
    """One line a node: `%out = op(%in, 2)`. Names are those of the nodes; overloads, defaults and namespaces are left
    out."""
    return "\n".join(_line(node, sizes) for node in graph.nodes)


def _line(node: fx.Node, sizes: bool = False) -> str:
    schema = schema_or_none(node.target)
    names = [arg.name for arg in schema.arguments] if schema is not None else []
    shown = [arg for i, arg in enumerate(node.args) if i >= len(names) or names[i] not in HIDDEN]
    given = [arg_text(arg) for arg in shown] + [f"{key}={arg_text(value)}" for key, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {arg_text(node.args[0])}"
    if node.op == "placeholder":
        call = f"%{node.name} = input"
    elif node.op == "get_attr":
        call = f"%{node.name} = constant {node.target}"
    else:
        call = f"%{node.name} = {op_name(node)}({', '.join(given)})"
    return call + (f"  # {list(value_of(node).shape)}" if sizes and is_tensor(node) else "")


def arg_text(value: Any) -> str:
    """An argument: `%name` of a node, numbers and dtypes in short."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(arg_text, value))
        return f"[{inside}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def changes(before: str, after: str) -> str:
    """All lines of both texts, those that differ marked with - and +."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return "\n".join(entry for entry in lines if not entry.startswith("?"))
