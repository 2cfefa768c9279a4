"""The program in a .pt2 file as a diff needs it: its graph and its stored tensors, read off the archive's own JSON.

`torch.export.load` makes a program that can run: it types every entry of the JSON, parses every size and makes a fake
tensor of every value, which takes most of a minute for two graphs of 5,000 nodes. A diff looks at names, arguments,
shapes and where a node comes from, so a value here is no more than its dtype and shape, and stored tensors are read
when they are asked for. A file that holds anything but what is known here (script objects, operators of extensions)
raises Unknown, and is loaded by torch instead.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.fx as fx

from ringopt.frontend.pt2.archive import checked, members_of
from ringopt.torch_compat.export import DTYPES, LAYOUTS, MEMORY_FORMATS
from ringopt.torch_compat.symbolic_shapes import FUNCTIONS, ShapeEnv, SymNode

# What torch.export calls the kinds of inputs; those of outputs have one name in both places.
INPUT_KINDS = {"tensor_constant": "constant_tensor", "constant_input": "user_input"}
PLAIN = ("as_int", "as_bool", "as_string", "as_ints", "as_bools", "as_strings")
SYMBOLIC = ("as_sym_int", "as_sym_float", "as_sym_bool")
POSITIONAL, KEYWORD = 1, 2


class Unknown(Exception):
    """The file holds something that only torch reads."""


@dataclass(frozen=True)
class FileProgram:
    """`called` is what the signature calls inputs and outputs, `targets` the stored tensor behind an input."""

    graph_module: fx.GraphModule
    called: dict[str, str]
    targets: dict[str, str]
    stored: Mapping[str, torch.Tensor]


def read_program(path: Path, trusted: bool = False) -> FileProgram:
    """Raises Unknown, and ProgramError as `ringopt.load` does."""
    model = checked(path, trusted)
    try:
        return program_of(model["graph_module"], path)
    except Unknown:
        raise
    except Exception as error:  # torch, which reads it next, says what does not fit
        raise Unknown(f"{type(error).__name__}: {error}") from None


def program_of(inside: dict[str, Any], path: Path) -> FileProgram:
    """The graph of a .pt2 file, read from its JSON, with the kinds of its inputs and outputs and its stored tensors."""
    stored = Stored.of(zipfile.ZipFile(path))
    signature = inside["signature"]
    inputs = [entry_of(spec) for spec in signature["input_specs"]]
    outputs = [entry_of(spec) for spec in signature["output_specs"]]
    graph_module = GraphReader(inside["graph"], [name for name, _kind, _target in inputs], Values()).graph_module()
    called = {name: f"{INPUT_KINDS.get(kind, kind)} {target or name}" for name, kind, target in inputs}
    called["output"] = ", ".join(f"{kind} {target}".strip() for _name, kind, target in outputs)
    return FileProgram(graph_module, called, {name: target for name, _kind, target in inputs if target}, stored)


def entry_of(spec: dict[str, Any]) -> tuple[str, str, str]:
    """Name, kind and target of an input or output of the signature."""
    kind, stored = only(spec)
    argument = stored.get("arg", stored)
    while isinstance(argument, dict) and not {"name", "as_name"} & set(argument):
        argument = only(argument)[1]  # {"as_tensor": {"name": ...}}; of a constant its value
    name = str(argument.get("name", argument.get("as_name"))) if isinstance(argument, dict) else ""
    targets = [value for key, value in stored.items() if key.endswith("_name") and isinstance(value, str)]
    return name, kind, targets[0] if targets else ""


def only(stored: dict[str, Any]) -> tuple[str, Any]:
    """The one entry of a union."""
    if len(stored) != 1:
        raise Unknown(f"a union of {sorted(stored)}")
    return next(iter(stored.items()))


# ---- stored tensors --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stored(Mapping[str, torch.Tensor]):
    """Parameters, buffers and constants, each read when it is asked for, as long as this lives."""

    archive: zipfile.ZipFile
    entries: dict[str, tuple[str, dict[str, Any]]]

    @classmethod
    def of(cls, archive: zipfile.ZipFile) -> Stored:
        entries, members = {}, members_of(archive)
        for folder, kind in (("data/weights", "weights"), ("data/constants", "constants")):
            config = members.get(f"{folder}/model_{kind}_config.json")
            if config is None:
                raise Unknown(f"no {folder}/model_{kind}_config.json")
            for name, entry in json.loads(archive.read(config))["config"].items():
                if entry["use_pickle"] or entry["tensor_meta"] is None:
                    raise Unknown(f"{name} is pickled")
                entries[name] = members[f"{folder}/{entry['path_name']}"], entry["tensor_meta"]
        return cls(archive, entries)

    def __getitem__(self, name: str) -> torch.Tensor:
        member, stored = self.entries[name]
        content = bytearray(self.archive.read(member))
        dtype = DTYPES[stored["dtype"]]
        size, stride = ([part["as_int"] for part in stored[key]] for key in ("sizes", "strides"))
        if not content:
            return torch.zeros(size, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).as_strided(size, stride, stored["storage_offset"]["as_int"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# ---- values ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shaped:
    """A tensor of which no more is known. Open sizes are SymInts."""

    dtype: torch.dtype
    shape: tuple[int | torch.SymInt, ...]
    device: str = ""


TENSORS = (torch.Tensor, Shaped)


class Values:
    """Tensors and open numbers by what the JSON says of them; an expression is parsed once."""

    def __init__(self) -> None:
        self.env, self.number = ShapeEnv(), cache(self.parsed)

    def tensor(self, stored: dict[str, Any]) -> Shaped:
        shape = tuple(self.symbolic(size, int) for size in stored["sizes"])
        device, index = stored["device"]["type"], stored["device"]["index"]
        return Shaped(DTYPES[stored["dtype"]], shape, device if index is None else f"{device}:{index}")

    def symbolic(self, stored: dict[str, Any], kind: type) -> Any:
        name, value = only(stored)
        return self.number(value["expr_str"], kind) if name == "as_expr" else value

    def parsed(self, text: str, kind: type) -> Any:
        expr = sympy.sympify(text, locals=FUNCTIONS)
        if expr.is_Integer or expr.is_Float or expr in (sympy.true, sympy.false):
            return kind(expr)
        wrap = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[kind]
        hint = kind(1)  # nobody reads it, but without one torch computes one
        return wrap(SymNode(expr, self.env, kind, hint))  # type: ignore[no-untyped-call]


# ---- the graph -------------------------------------------------------------------------------------------------------
class GraphReader:
    """One graph, nested ones included."""

    def __init__(self, stored: dict[str, Any], inputs: list[str], values: Values):
        self.stored, self.inputs, self.values = stored, inputs, values
        self.graph, self.module = fx.Graph(), torch.nn.Module()
        self.nodes: dict[str, fx.Node] = {}

    def graph_module(self) -> fx.GraphModule:
        if self.stored["custom_obj_values"]:
            raise Unknown("a script object")
        for place, entry in enumerate(self.stored["inputs"]):
            self.placeholder(entry, place)
        for entry in self.stored["nodes"]:
            self.call(entry)
        outputs = [self.argument(entry) for entry in self.stored["outputs"]]
        self.graph.output(outputs[0] if self.stored["is_single_tensor_return"] else tuple(outputs))
        return fx.GraphModule(self.module, self.graph)

    def placeholder(self, entry: dict[str, Any], place: int) -> None:
        kind, stored = only(entry)
        if kind in ("as_tensor", "as_sym_int"):
            name = stored["name" if kind == "as_tensor" else "as_name"]
            self.keep(name, self.graph.placeholder(name))
        elif kind in (*PLAIN, "as_float", "as_none"):
            name = self.inputs[place] if place < len(self.inputs) else ""
            self.graph.placeholder(name or f"arg{place}").meta["val"] = self.argument(entry)
        else:
            raise Unknown(f"an input {kind}")

    def keep(self, name: str, node: fx.Node) -> None:
        """`node` is the value `name`, whatever FX would call it."""
        node.name = name
        node.meta["val"] = self.value(name)
        self.nodes[name] = node

    def value(self, name: str) -> Any:
        if name in self.stored["tensor_values"]:
            return self.values.tensor(self.stored["tensor_values"][name])
        for where, kind in (("sym_int_values", int), ("sym_bool_values", bool), ("sym_float_values", float)):
            if name in self.stored[where]:
                return self.values.symbolic(self.stored[where][name], kind)
        raise Unknown(f"no value {name}")

    # ---- nodes -----------------------------------------------------------------------------------------------------
    def call(self, entry: dict[str, Any]) -> None:
        target, meta = target_of(entry["target"]), meta_of(entry["metadata"])
        given = [(placed(part), self.argument(part["arg"])) for part in entry["inputs"]]
        args = tuple(value for name, value in given if not name)
        kwargs = {name: value for name, value in given if name}
        node = self.graph.create_node("call_function", target, args, kwargs, entry["name"] or None)
        node.meta.update(meta)
        for value in (*args, *kwargs.values()):
            if isinstance(value, fx.Node) and value.op == "get_attr":
                value.meta.update(meta)  # of a nested graph the file has none
        self.results(node, entry, meta)

    def results(self, node: fx.Node, entry: dict[str, Any], meta: dict[str, Any]) -> None:
        found = [only(output) for output in entry["outputs"]]
        if not found or (len(found) == 1 and found[0][0] == "as_none"):
            return
        kind, stored = found[0]
        alone = len(found) == 1 and kind in ("as_tensor", *SYMBOLIC)
        if alone and entry.get("is_hop_single_tensor_return") is not False:
            return self.keep(name_of(kind, stored), node)
        if len(found) == 1 and kind == "as_tensors":
            found = [("as_tensor", part) for part in stored]
        node.meta["val"] = tuple(self.part(node, place, *result, meta) for place, result in enumerate(found))

    def part(self, node: fx.Node, place: int, kind: str, stored: Any, meta: dict[str, Any]) -> Any:
        taken = self.graph.call_function(operator.getitem, (node, place))
        taken.meta.update(meta)
        if kind in ("as_tensor", *SYMBOLIC):
            self.keep(name_of(kind, stored), taken)
        elif kind == "as_tensors":
            parts = [self.part(taken, number, "as_tensor", inner, meta) for number, inner in enumerate(stored)]
            taken.meta["val"] = parts
        elif kind != "as_none":
            raise Unknown(f"a result {kind}")
        return taken.meta.get("val")

    # ---- arguments -------------------------------------------------------------------------------------------------
    def argument(self, entry: dict[str, Any]) -> Any:
        kind, stored = only(entry)
        if kind in PLAIN or stored == []:
            return stored
        if kind in ("as_tensor", *SYMBOLIC):
            return self.number_or_node(kind, stored)
        if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats"):
            return [self.number_or_node(kind.removesuffix("s"), part) for part in stored]
        readers: dict[str, Callable[[Any], Any]] = {
            "as_none": lambda _stored: None,
            "as_float": float,  # "-Infinity" is a string in JSON
            "as_floats": lambda numbers: list(map(float, numbers)),
            "as_tensors": lambda parts: [self.nodes[part["name"]] for part in parts],
            "as_optional_tensors": lambda parts: [self.argument(part) for part in parts],
            "as_nested_tensors": lambda lists: [[self.nodes[part["name"]] for part in parts] for parts in lists],
            "as_string_to_argument": lambda parts: {key: self.argument(part) for key, part in parts.items()},
            "as_graph": self.nested,
            "as_scalar_type": DTYPES.__getitem__,
            "as_memory_format": MEMORY_FORMATS.__getitem__,
            "as_layout": LAYOUTS.__getitem__,
            "as_device": lambda at: torch.device(*(at[key] for key in ("type", "index") if at[key] is not None)),
            "as_complex": lambda number: complex(float(number["real"]), float(number["imag"])),
            "as_operator": target_of,
        }
        read = readers.get(kind)
        if read is None:
            raise Unknown(f"an argument {kind}")
        return read(stored)

    def number_or_node(self, kind: str, stored: dict[str, Any]) -> Any:
        name = name_of(kind, stored)
        return self.nodes[name] if name else only(stored)[1]

    def nested(self, stored: dict[str, Any]) -> fx.Node:
        self.module.add_module(stored["name"], GraphReader(stored["graph"], [], self.values).graph_module())
        return self.graph.create_node("get_attr", stored["name"], name=stored["name"])


def placed(part: dict[str, Any]) -> str:
    """The keyword of an argument; "" for one that is given by position."""
    name, kind = str(part["name"]), part["kind"]
    if name and (kind not in (POSITIONAL, KEYWORD) or keyword.iskeyword(name)):
        raise Unknown(f"an argument {name} of kind {kind}")
    return name if kind == KEYWORD else ""


def name_of(kind: str, stored: dict[str, Any]) -> str:
    """Of the value that an argument or a result is; "" for a plain number."""
    return str(stored["name"]) if kind == "as_tensor" else str(stored.get("as_name", ""))


@cache
def target_of(name: str) -> Any:
    """`torch.ops.aten.linear.default`, `_operator.add`, `math.floor`."""
    place: Any = {"torch": torch, "_operator": operator, "math": math}.get(name.partition(".")[0])
    for part in name.split(".")[1:]:
        place = getattr(place, part, None)
    if not callable(place):
        raise Unknown(f"the operator {name}")
    return place


def meta_of(stored: dict[str, str]) -> dict[str, Any]:
    """Of what torch.export keeps, the part that a diff reads."""
    found: dict[str, Any] = {}
    if stored.get("stack_trace"):
        found["stack_trace"] = stored["stack_trace"]
    if stored.get("nn_module_stack"):
        found["nn_module_stack"] = modules_of(stored["nn_module_stack"])
    if stored.get("custom"):
        found["custom"] = json.loads(stored["custom"])
    return found


@cache
def modules_of(stored: str) -> dict[str, tuple[str, str]]:
    """`L__self___0,L['self']._modules['0'],torch.nn.Linear;...`"""
    entries = [re.split(r",(?![^\[(]*[\])])", entry) for entry in stored.split(";")]
    if any(len(entry) != 3 for entry in entries):
        raise Unknown(f"the modules {stored}")
    return {key: (path, kind) for key, path, kind in entries}
