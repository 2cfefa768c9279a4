"""The nodes of a program as views that a diff can compare: names of files and modules, text, shapes, meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch.export import ExportedProgram

from ringopt.compare.align import HANDS_ON, LISTED
from ringopt.compare.graph_diff import NodeView
from ringopt.compare.node_facts import Meaning, Reader, qualified
from ringopt.compare.program_files import TENSORS, FileProgram
from ringopt.ir.nodes import module_path, op_name, value_of
from ringopt.ir.printer import arg_text
from ringopt.torch_compat.schema import OpOverload, overload_name, schema_of, schema_or_none

Program: TypeAlias = ExportedProgram | FileProgram | fx.GraphModule
# Arguments that do not change what a node means: the token that tells caches apart.
HIDDEN = ("version", "site")
FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*(?:\n\s*([^\n]+))?')
SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def views_of(program: Program, ranks: int | None = None) -> list[NodeView]:
    """All nodes in order, those of nested graphs before the node that calls them. `ranks` for what the graph leaves
    open."""
    gm = program if isinstance(program, fx.GraphModule) else program.graph_module
    viewer = Viewer(called_inputs(program), Reader(gm.graph, ranks))
    return list(viewer.views(gm, ""))


def called_inputs(program: Program) -> dict[str, str]:
    """What the program calls its placeholders and its outputs, where it has a signature."""
    if isinstance(program, FileProgram):
        return program.called
    if not isinstance(program, ExportedProgram):
        return {}
    signature = program.graph_signature
    specs = [(spec.arg.name, spec) for spec in signature.input_specs]
    inputs = {name: f"{spec.kind.name.lower()} {spec.target or name}" for name, spec in specs}
    outputs = [f"{spec.kind.name.lower()} {spec.target or ''}".strip() for spec in signature.output_specs]
    return {**inputs, "output": ", ".join(outputs)}


class Viewer:
    """One program: `called` are the names of its signature. Symbols of open sizes are numbered as they come, because
    torch's own numbers differ from trace to trace."""

    def __init__(self, called: dict[str, str], reader: Reader):
        self.called, self.reader = called, reader
        self.symbols: dict[str, str] = {}

    def views(self, gm: fx.GraphModule, prefix: str) -> Iterator[NodeView]:
        for node in gm.graph.nodes:
            nested = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(nested, fx.GraphModule):
                yield from self.views(nested, f"{prefix}{node.target}/")
            if not (op_name(node) == "getitem" and not node.users):  # torch.export names results that nobody reads
                yield self.view(node, prefix, nested)

    def view(self, node: fx.Node, prefix: str, nested: Any) -> NodeView:
        inputs: list[str] = []

        def read(value: Any) -> str:
            return self.argument(value, prefix, inputs)

        arguments = ", ".join(self.arguments(node, prefix, read))
        op, name = self.op(node), f"{prefix}{node.name}"
        if op == "input":
            arguments = f"{prefix}{node.target}" if prefix else self.called.get(node.name, str(node.target))
        shown = _with_input_names(arguments, inputs) if inputs else arguments
        line = {"input": f"%{name} = input {shown}", "output": f"return {shown}"}.get(op, f"%{name} = {op}({shown})")
        shape = self.shape(results_of(node)) if op != "output" else ""
        means = self.reader.of(node) if not prefix and nested is None else Meaning()
        return NodeView(
            name, op, line, arguments.replace("\0", "%"), tuple(inputs), module_of(node), source_of(node),
            shape, means.placement, means.bytes_sent, means.flops, means.site, means.result_bytes,
            device_of_value(results_of(node)) if op != "output" else "", path_of(node),
        )  # fmt: skip

    def op(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "output"):
            return {"placeholder": "input", "output": "output"}[node.op]
        if node.op == "get_attr":
            return "constant"
        if isinstance(node.target, OpOverload):
            name: str = schema_of(node.target).name
            return f"{name}.{overload_name(node.target)}".removesuffix(".default").removeprefix("aten::")
        return str(getattr(node.target, "__name__", node.target))

    def arguments(self, node: fx.Node, prefix: str, read: Any) -> Iterator[str]:
        if node.op == "output":
            called = self.called.get("output", "") if not prefix else ""
            yield read(node.args[0]) + (f" as {called}" if called else "")
            return
        if node.op in ("get_attr", "call_method", "call_module"):
            yield str(node.target)
        schema = schema_or_none(node.target)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        for position, value in enumerate(node.args):
            if position >= len(names) or names[position] not in HIDDEN:
                yield read(value)
        for name, value in node.kwargs.items():
            if name not in HIDDEN:
                yield f"{name}={read(value)}"

    def argument(self, value: Any, prefix: str, inputs: list[str]) -> str:
        if isinstance(value, fx.Node):
            inputs.append(f"{prefix}{value.name}")
            return "\0"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.argument(part, prefix, inputs) for part in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {self.argument(part, prefix, inputs)}' for key, part in value.items())}}}"
        if isinstance(value, torch.SymInt):
            return self.size(value)
        return arg_text(value)

    def shape(self, value: Any) -> str:
        if isinstance(value, TENSORS):
            word, bits = re.fullmatch(r"torch\.([a-z]+)(\w*)", str(value.dtype)).groups()  # type: ignore[union-attr]
            return f"{SHORT.get(word, word)}{bits}[{', '.join(map(self.size, value.shape))}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(self.shape, value))})"
        return type(value).__name__ if value is not None else ""

    def size(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return str(size)
        return re.sub(r"\b[su]\d+\b", lambda found: self.symbol(found[0]), str(size.node.expr))

    def symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"{name[0]}{sum(known[0] == name[0] for known in self.symbols)}")


def module_of(node: fx.Node) -> str:
    """The module of a node; a conversion of an input belongs to its first reader."""
    listed = op_name(node) == "getitem" and qualified(node.args[0]) == LISTED
    converts = listed or qualified(node) in HANDS_ON
    return module_path(node) or next((module_path(user) for user in node.users if converts), "")


def results_of(node: fx.Node) -> Any:
    """The value of a node; of one with several results that a file does not keep together, those of its getitems."""
    value = value_of(node)
    if value is None and node.users and all(op_name(user) == "getitem" for user in node.users):
        parts = {user.args[1]: value_of(user) for user in node.users}
        return tuple(parts[key] for key in sorted(parts))
    return value


def _with_input_names(template: str, inputs: Sequence[str]) -> str:
    names = iter(inputs)
    return re.sub("\0", lambda _found: f"%{next(names)}", template)


def source_of(node: fx.Node) -> str:
    """`model.py:12  x = self.norm(x)`: the innermost line of the trace that is not torch's."""
    file, line, code = _frame(node)
    return f"{PurePath(file).name}:{line}  {code.strip()}".strip() if file else ""


def path_of(node: fx.Node) -> str:
    """`/home/me/model.py:12`: the same line, with the whole path."""
    file, line, _code = _frame(node)
    return f"{file}:{line}" if file else ""


def _frame(node: fx.Node) -> tuple[str, str, str]:
    """File, line and code; "" where there is no trace."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return own[-1] if own else ("", "", "")


def device_of_value(value: Any) -> str:
    """Of a tensor, or of the first of several."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return str(getattr(first, "device", "") or "")
