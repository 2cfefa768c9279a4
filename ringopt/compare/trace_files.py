"""Graphs of others out of a folder that TORCH_TRACE names: what Dynamo captured, what AOTAutograd made of it, as text.

    TORCH_TRACE=folder python train.py        folder/dedicated_log_torch_trace_*.log

A log has an entry a line, its payload in the lines behind it, each after a tab. A graph is the Python that
GraphModule.print_readable writes; it is parsed and never run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from ringopt.compare.graph_diff import NodeView
from ringopt.compare.torch_counters import meta_tensor, named_flops
from ringopt.errors import ProgramError


@dataclass(frozen=True)
class TraceProgram:
    """The nodes of a program of which a trace is all that there is."""

    views: Sequence[NodeView]


# Kinds of graphs that a trace holds, the one that is taken first.
GRAPHS = ("aot_forward_graph", "aot_inference_graph", "aot_joint_graph", "dynamo_output_graph", "aot_backward_graph")
ENTRY = re.compile(r"^V\d{4} .*?\] (\{.*\})$")
FILE = re.compile(r"^\s*#\s*File: (.*?):(\d+) in \w+(?:, code: (.*))?$")
SHAPE = re.compile(r"^(\w+\[[^\]]*\])")
VALUE = "__value__"  # stands for a value in the text of arguments


def is_trace(path: Path) -> bool:
    """Whether `path` is a folder of TORCH_TRACE, or a log of one."""
    return bool(_logs(path))


def _logs(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("dedicated_log_torch_trace*.log"))
    return [path] if path.suffix == ".log" and path.is_file() else []


def views_of_trace(path: Path, kind: str | None = None) -> list[NodeView]:
    """The nodes of all graphs of one `kind`, by default the first of GRAPHS that is there. Raises ProgramError."""
    found = graphs_of_trace(path)
    kind = kind or next((each for each in GRAPHS if any(graph.kind == each for graph in found)), None)
    chosen = [graph for graph in found if graph.kind == kind]
    if not chosen:
        known = ", ".join(dict.fromkeys(graph.kind for graph in found)) or "none"
        raise ProgramError(f"{path} holds no graph {kind or ''}; graphs of it: {known}")
    alone = len(chosen) == 1
    return [view for number, graph in enumerate(chosen) for view in graph.views("" if alone else f"{number}/")]


def graphs_of_trace(path: Path) -> list[TraceGraph]:
    """All graphs, in the order in which they were compiled. Raises ProgramError for what is no trace."""
    logs = _logs(path)
    if not logs:
        raise ProgramError(f"{path} holds no dedicated_log_torch_trace_*.log; run the program with TORCH_TRACE={path}")
    return [graph for log in logs for graph in _graphs_of_log(log)]


def _graphs_of_log(log: Path) -> Iterator[TraceGraph]:
    entry: dict[str, Any] = {}
    payload: list[str] = []
    for line in [*log.read_text(encoding="utf-8", errors="replace").splitlines(), "V0000 end] {}"]:
        if line.startswith("\t"):
            payload.append(line[1:])
        elif found := ENTRY.match(line):
            kind = next((each for each in GRAPHS if each in entry), None)
            if kind is not None and payload:
                yield TraceGraph(kind, payload, log)
            entry, payload = _json(found[1]), []


def _json(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


@dataclass
class TraceGraph:
    """The lines of one graph."""

    kind: str
    lines: Sequence[str]
    log: Path

    def views(self, prefix: str = "") -> list[NodeView]:
        """Raises ProgramError for lines that are no graph."""
        try:
            tree = ast.parse("\n".join(self.lines))
        except SyntaxError as error:
            raise ProgramError(f"{self.log}: a {self.kind} cannot be read: {error}") from None
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "forward"]
        if not functions:
            raise ProgramError(f"{self.log}: a {self.kind} has no forward")
        return GraphText(functions[0], self.lines, prefix).views


@dataclass
class GraphText:
    """Reads the statements of a `forward`; `alias` has the names that stand for another."""

    function: ast.FunctionDef
    lines: Sequence[str]
    prefix: str
    views: list[NodeView] = field(default_factory=list)
    alias: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument in self.function.args.args[1:]:
            self.add(argument.arg, "input", argument.arg, annotation=argument.annotation)
        for statement in self.function.body:
            self.read(statement)

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return) and statement.value is not None:
            arguments, inputs = self.template(statement.value)
            self.add("output", "output", arguments, inputs)
            return
        target: ast.expr | None = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        value = getattr(statement, "value", None)
        if not isinstance(target, ast.Name) or value is None or _is_none(value):
            return  # `x = None` frees a value
        if isinstance(value, ast.Name) and value.id in self.known:
            self.alias[target.id] = self.alias.get(value.id, value.id)
            return
        annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
        op, operands = self.call(value)
        parts = [(name, *self.template(operand)) for name, operand in operands]
        arguments = ", ".join(f"{name}={text}" if name else text for name, text, _ in parts)
        inputs = tuple(name for _, _, names in parts for name in names)
        flops = self.flops(op, [operand for _, operand in operands], _shape(annotation)[0])
        self.add(target.id, op, arguments, inputs, annotation, statement.lineno, flops)

    @property
    def known(self) -> set[str]:
        return {*self.shapes, *self.alias}

    def call(self, value: ast.expr) -> tuple[str, list[tuple[str, ast.expr]]]:
        """The operator, and its operands in order, each with the name that it is given by, or ""."""
        if isinstance(value, ast.Call):
            given = [("", each) for each in value.args] + [(each.arg or "", each.value) for each in value.keywords]
            if isinstance(value.func, ast.Attribute) and _root(value.func) in self.known:
                return value.func.attr, [("", value.func.value), *given]
            return operator_name(ast.unparse(value.func)), given
        if isinstance(value, ast.Subscript):
            return "getitem", [("", value.value), ("", value.slice)]
        if isinstance(value, ast.BinOp):
            return type(value.op).__name__.lower(), [("", value.left), ("", value.right)]
        if isinstance(value, ast.Compare):
            return type(value.ops[0]).__name__.lower(), [("", value.left), ("", value.comparators[0])]
        return ("constant" if isinstance(value, ast.Attribute) else type(value).__name__.lower()), [("", value)]

    def template(self, value: ast.expr) -> tuple[str, tuple[str, ...]]:
        """The text with % for every value, and the names of these."""
        inputs: list[str] = []
        known, alias = self.known, self.alias

        class Named(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.Name:
                if node.id in known:
                    inputs.append(alias.get(node.id, node.id))
                    return ast.Name(VALUE, ast.Load())
                return node

        text = ast.unparse(Named().visit(ast.parse(ast.unparse(value), mode="eval").body))
        return text, tuple(inputs)

    def add(
        self, name: str, op: str, arguments: str, inputs: tuple[str, ...] = (), annotation: ast.expr | None = None,
        line: int = 0, flops: int | None = 0,
    ) -> None:  # fmt: skip
        names = [f"{self.prefix}{each}" for each in inputs]
        left = iter(names)
        shown = re.sub(VALUE, lambda _found: f"%{next(left)}", arguments)
        own, (shape, device), (source, path) = f"{self.prefix}{name}", _shape(annotation), self.source(line)
        text = {"input": f"%{own} = input {shown}", "output": f"return {shown}"}.get(op, f"%{own} = {op}({shown})")
        self.shapes[name] = shape
        tensor = meta_tensor(shape)
        size = tensor.numel() * tensor.element_size() if tensor is not None else 0 if op == "output" else None
        view = NodeView(own, op, text, arguments.replace(VALUE, "%"), tuple(names), "", source, shape, flops=flops)
        self.views.append(replace(view, result_bytes=size, device=device, path=path))

    def flops(self, op: str, operands: Sequence[ast.expr], shape: str) -> int | None:
        """By torch's own counter, of what it knows."""

        def read(part: ast.expr) -> Any:
            if isinstance(part, ast.Name) and part.id in self.known:
                return meta_tensor(self.shapes[self.alias.get(part.id, part.id)])
            if isinstance(part, (ast.List, ast.Tuple)):
                return [read(one) for one in part.elts]
            try:
                return ast.literal_eval(part)
            except ValueError:
                return None

        return named_flops(op, [read(part) for part in operands], meta_tensor(shape))

    def source(self, line: int) -> tuple[str, str]:
        """`model.py:12  x = self.norm(x)` and the whole path: the comment above a statement, or above those before."""
        for number in range(line - 2, -1, -1):
            text = self.lines[number]
            if found := FILE.match(text):
                place = f"{PurePath(found[1]).name}:{found[2]}"
                return f"{place}  {(found[3] or '').strip()}".strip(), f"{found[1]}:{found[2]}"
            if "No stacktrace found" in text:
                break
        return "", ""


def operator_name(dotted: str) -> str:
    """`torch.ops.aten.add.Tensor` is `add.Tensor`, `torch.ops.mylib.f.default` is `mylib::f`, `torch._C._nn.linear` is
    `linear`: as the views of a graph at hand name them."""
    if dotted.startswith("torch.ops."):
        namespace, _, name = dotted.removeprefix("torch.ops.").partition(".")
        name = name.removesuffix(".default")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return dotted.rpartition(".")[2]


def _root(value: ast.expr) -> str:
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


def _shape(annotation: ast.expr | None) -> tuple[str, str]:
    """Shape and device: `f32[1, 64, 48]` and `cpu` of "f32[1, 64, 48][3072, 48, 1]cpu"."""
    text = annotation.value if isinstance(annotation, ast.Constant) else ""
    found = SHAPE.match(text) if isinstance(text, str) else None
    return (found[1], text.rpartition("]")[2]) if found and isinstance(text, str) else ("", "")


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
