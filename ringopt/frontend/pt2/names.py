"""What a .pt2 file names in this process: operators, and types and enums of the trees that a program takes and gives.

torch looks them up by their path, one attribute after the other, and imports modules for it. Here a name is looked up
so that nothing is imported and nothing is called, and has to be of the kind that is expected.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
from enum import Enum
from functools import cache
from typing import Any

import torch

from ringopt.frontend.pt2.expressions import KEY
from ringopt.ops import operators
from ringopt.torch_compat.export import PRIVATE_FUNCTIONS
from ringopt.torch_compat.schema import HigherOrderOperator, OpNamespace, OpOverload, OpOverloadPacket
from ringopt.version import __version__

# Python functions by which export spells numbers, torch.func's transforms and torch.autocast.
FUNCTIONS = {
    **{f"_operator.{name}": None for name in (
        "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "not_",
        "or_", "pos", "pow", "rshift", "sub", "truediv", "xor", "abs",
    )},
    **{f"math.{name}": None for name in ("ceil", "floor", "trunc", "sqrt", "pow")},
    **{f"torch.{name}": None for name in (
        "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sum",
    )},
    **dict.fromkeys(PRIVATE_FUNCTIONS),
}.keys()  # fmt: skip
# Of torch's own operators, those that read or write files, load libraries, call other processes or run the interpreter
# of TorchScript; and those of ringopt's kernels, one of which compiles text. What other packages put into libraries of
# theirs, whoever imported them wanted.
REFUSED_LIBRARIES = {
    "prim", "profiler", "static_runtime", "_test", "debugprims", "c10d", "symm_mem", "onnx", "rpc", "ringopt_kernels",
}  # fmt: skip
REFUSED_OPERATORS = {("aten", "save"), ("aten", "from_file"), ("aten", "warn"), ("aten", "eval")}
# Of torch's own higher-order operators, those that run graphs that stand in the file, or an operator.
HIGHER_ORDER = {
    "_export_tracepoint", "associative_scan", "auto_functionalized", "auto_functionalized_v2",
    "autograd_function_apply", "cond", "flex_attention", "flex_attention_backward", "foreach_map", "hints_wrapper",
    "invoke_quant", "invoke_quant_packed", "invoke_subgraph", "map_impl", "out_dtype", "run_const_graph", "scan",
    "strict_mode", "tag_activation_checkpoint", "while_loop", "while_loop_stack_output", "with_effects", "wrap",
    "wrap_activation_checkpoint", "wrap_with_autocast", "wrap_with_set_grad_enabled",
}  # fmt: skip

PART = re.compile(r"[^\W\d]\w*")
TREE_LEVELS = 100
# What a defaultdict makes its values with.
FACTORIES = {
    "builtins": {"list", "dict", "set", "tuple", "int", "float", "str", "bool"},
    "collections": {"OrderedDict"},
}


# ---- operators -------------------------------------------------------------------------------------------------------
@cache
def check_operator(name: str) -> None:
    """Raises ValueError. One that is not defined here passes: torch, which cannot find it either, says what to do."""
    if name in FUNCTIONS:
        return
    parts = name.split(".")
    if parts[:2] != ["torch", "ops"] or len(parts) not in (4, 5) or not all(map(PART.fullmatch, parts)):
        raise ValueError(f"{name[:60]!a} is not an operator")
    library, operator = parts[2], parts[3]
    if library in REFUSED_LIBRARIES or (library, operator) in REFUSED_OPERATORS:
        raise ValueError(f"the operator {name} does more than compute, so a file may not name it")
    if library == operators.name and not hasattr(operators, operator):
        raise ValueError(
            f"ringopt {__version__} has no operator {operator[:60]}; load it with the one that wrote it, or convert "
            "the program again"
        )
    if not defined(parts[2:]):
        raise ValueError(f"{name[:60]!a} is not an operator")


def defined(parts: list[str]) -> bool:
    """Whether these are the library, the operator and the overload of an operator, or of none that is known."""
    if parts[0] == "higher_order":
        return len(parts) == 2 and _is_allowed_higher_order(parts[1])
    library = getattr(torch.ops, parts[0], None)
    if not isinstance(library, OpNamespace):
        return False
    kinds = (OpOverloadPacket, OpOverload)
    place: Any = library
    for name, kind in zip(parts[1:], kinds, strict=False):
        place = getattr(place, name, None)
        if not isinstance(place, kind):
            return place is None
    return True


def _is_allowed_higher_order(name: str) -> bool:
    found = getattr(torch.ops.higher_order, name, None)
    if found is None or not isinstance(found, HigherOrderOperator):
        return found is None
    return name in HIGHER_ORDER or type(found).__module__.partition(".")[0] != "torch"


# ---- trees -----------------------------------------------------------------------------------------------------------
@cache
def check_tree(text: str) -> None:
    """`[1, {"type": "builtins.tuple", "context": "null", "children_spec": []}]`. Raises ValueError."""
    try:
        _version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise ValueError("a specification of inputs or outputs that is none") from None
    _check_tree_node(tree, TREE_LEVELS)
    children = tree["children_spec"]
    if len(children) == 2 and children[1]["type"] == "builtins.dict":
        for key in context_of(children[1]["context"]) or ():
            if not isinstance(key, str) or not PART.fullmatch(key) or keyword.iskeyword(key):
                raise ValueError(f"{ascii(key)[:60]} is not the name of an argument")


def _check_tree_node(tree: Any, levels: int) -> None:
    fine = isinstance(tree, dict) and tree.keys() >= {"type", "context", "children_spec"} and levels > 0
    if not fine or not isinstance(tree["type"], (str, type(None))) or not isinstance(tree["children_spec"], list):
        raise ValueError("a specification of inputs or outputs that is none")
    _check_context(context_of(tree["context"]), levels)
    for child in tree["children_spec"]:
        _check_tree_node(child, levels - 1)


def context_of(value: Any) -> Any:
    """What stands in a context: JSON within JSON, or a name."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    except RecursionError:
        raise ValueError("a specification of inputs or outputs that is none") from None


def _check_context(value: Any, levels: int) -> None:
    if levels <= 0:
        raise ValueError("a specification of inputs or outputs that is none")
    if isinstance(value, str) and not KEY.fullmatch(value):
        raise ValueError(f"the key {value[:60]!a} has quotes")
    if isinstance(value, dict):
        if "__enum__" in value:
            check_enum(value)
        if "default_factory_module" in value or "default_factory_name" in value:
            _check_factory(value)
    parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_context(part, levels - 1)


def check_enum(value: dict[str, Any]) -> None:
    """`{"__enum__": true, "fqn": "module:Class", "name": "MEMBER"}`: torch imports the module."""
    module, _, path = str(value.get("fqn")).partition(":")
    place: Any = sys.modules.get(module)
    for part in path.split("."):
        place = vars(place).get(part) if isinstance(place, (type, type(sys))) else None
    if not (isinstance(place, type) and issubclass(place, Enum)):
        raise ValueError(f"{ascii(value.get('fqn'))[:60]} is no enum that was imported; import what defines it")


def _check_factory(value: dict[str, Any]) -> None:
    module, name = value.get("default_factory_module"), value.get("default_factory_name")
    if not isinstance(module, str) or name not in FACTORIES.get(module, ()):
        raise ValueError(f"a defaultdict of {ascii(module)[:40]}, {ascii(name)[:40]}, which may be any function")
