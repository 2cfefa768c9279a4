"""Facts about FX nodes of a flat pre-dispatch ATen graph."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.autograd_function import HigherOrder
from ringopt.ir.notes import CHECKPOINTED, PARAMETER
from ringopt.ir.symbolic_sizes import plain
from ringopt.torch_compat import inductor
from ringopt.torch_compat.fake_tensors import enable_python_dispatcher
from ringopt.torch_compat.schema import OpOverload, schema_of
from ringopt.torch_compat.tracing import TracingContext

ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom", "recompute", "ac_graph_id", CHECKPOINTED)
FRONTEND = os.path.join(os.path.dirname(os.path.dirname(__file__)), "frontend", "")  # what Dynamo traces for others


# Of these an operator is known by its name alone: what ringopt's is called no operator of torch is.
OWN_NAMES = ("aten", "prims", "ringopt")


def op_name(node: fx.Node) -> str:
    """`aten.add.Tensor` is "add": the schema's name without namespace and overload; "" for other nodes. One of a
    user's library keeps its namespace, for `mylib::relu` is not ATen's. `view(dtype)`, which reads the same bits as
    another type, is no view of dims: it is "view_dtype"."""
    target = node.target
    if isinstance(target, OpOverload):
        return name_of_overload(target)
    return getattr(target, "__name__", "") if node.op == "call_function" else ""


@cache
def name_of_overload(target: OpOverload) -> str:
    """As `op_name` says."""
    if target is torch.ops.aten.view.dtype:
        return "view_dtype"
    name = schema_of(target).name
    return name.split("::")[1] if target.namespace in OWN_NAMES else name


def is_aten(node: fx.Node) -> bool:
    """Whether a node calls an ATen operator."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def readable_name(name: str) -> str:
    """Dynamo's `l_self_modules_linear_parameters_weight_` as `linear_weight`."""
    return re.sub(r"(^|_)(l_self|l|modules|parameters|buffers)(?=_)", "", name).strip("_") or name


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a default generator."""
    if isinstance(node.target, HigherOrder):
        return node.target.random
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, as it is called: not where it has no `dropout_p`, or does not train."""
    if not is_random(node):
        return False
    given = arguments_of(node)
    trains = given.get("train", given.get("training", True)) is not False  # None: yes
    return trains and given.get("dropout_p") != 0.0 and not ("train" in given and given["p"] == 0)


# Which return their operand itself where they drop nothing, and no copy: who writes to the result writes to that.
DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def drops_nothing(p: Any, train: Any) -> bool:
    """Whether one of DROPOUTS returns its operand."""
    return not train or p == 0


def is_undropped(node: fx.Node) -> bool:
    """Whether `node` is its operand, though torch's tracer may have a copy for it."""
    return is_aten(node) and op_name(node) in DROPOUTS and drops_nothing(named(node, "p"), named(node, "train"))


def draws_by_stream(node: fx.Node) -> bool:
    """Whether it draws its numbers themselves from a default generator, and not seeds, as operators of ringopt do."""
    return draws(node) and getattr(node.target, "namespace", "") != "ringopt"


def value_of(node: Any) -> Any:
    """The fake value recorded when the graph was captured; None for an argument that is no node."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def outputs_of(graph: fx.Graph) -> list[Any]:
    """The returned values in order: nodes and constants."""
    found = graph.output_node().args[0]
    return list(found) if isinstance(found, (tuple, list)) else [found]


def is_tensor(node: Any) -> bool:
    """Whether the value is one tensor, not several and no number."""
    return isinstance(value_of(node), torch.Tensor)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Sizes of a tensor node, ints or symbolic (ringopt/ir/symbolic_sizes.py); of a node with several outputs, those of
    the first."""
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        value = value[0]
    return tuple(plain(size) for size in value.shape)


def tensor_args(node: fx.Node) -> Iterator[fx.Node]:
    """The tensor arguments (or tuples of tensors), in order; a node used twice comes twice."""
    found: list[fx.Node] = []

    def note(arg: fx.Node) -> fx.Node:
        found.append(arg)
        return arg

    fx.map_arg((node.args, node.kwargs), note)
    return iter([arg for arg in found if isinstance(value_of(arg), (torch.Tensor, tuple, list))])


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def named(node: fx.Node, name: str) -> Any:
    """An argument by its name in the schema of the op, or its default. Raises KeyError for a name that the schema
    lacks."""
    schema: dict[str, Any] = {arg.name: (place, arg) for place, arg in enumerate(schema_of(node.target).arguments)}
    place, arg = schema[name]
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, arg.default_value)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults included; {} for nodes that call no operator."""
    if not isinstance(node.target, OpOverload):
        return {}
    schema = schema_of(node.target).arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given = dict(zip([argument.name for argument in schema], node.args, strict=False))
    return {**defaults, **given, **node.kwargs}


def bound(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the Python function that a node calls, its defaults included."""
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    return dict(given.arguments)


def module_path(node: fx.Node) -> str:
    """`model.layers.0.self_attn`: the innermost module the node was traced in; "" outside any."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    # A method that was wrapped, and is traced from inside the wrapper, has its module as args[0].
    path = re.sub(r"^(L\['\w*args'\]\[0\]|L\['\w+'\]|L__\w+?__)", "", stack[-1][0])
    return re.sub(r"\[?'?(?:_modules)?'?\]?[\[\].']+", ".", path).strip(".")


def origin(node: fx.Node) -> dict[str, Any]:
    """Meta that a node which replaces `node` inherits: source locations, and whether it is recomputed in the backward
    (ir/checkpoint_regions.py)."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


def source_line(node: fx.Node) -> str:
    """`modeling_llama.py:210: weights = softmax(scores, -1)`: the innermost frame outside torch; "" without a stack
    trace."""
    path, number, code = program_line(node)
    return f"{os.path.basename(path)}:{number}" + (f": {code}" if code else "") if path else ""


def program_line(node: fx.Node) -> tuple[str, int, str]:
    """File, number and text of the innermost line outside torch and outside of what ringopt has Dynamo trace for a
    program; "" of all where there is no stack trace."""
    text = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n\s*([^\n]*))?', text)
    if not frames:
        return "", 0, ""
    inner = (frame for frame in frames[::-1] if "/torch/" not in frame[0] and not frame[0].startswith(FRONTEND))
    path, number, code = next(inner, frames[-1])
    return path, int(number), code.strip()


def requires_grad(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Which values require a gradient, propagated from the placeholders' `requires_grad`. True when in doubt."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        found[node] = carries_gradient(node, any(found.get(arg, True) for arg in node.all_input_nodes))
    return found


LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
NEW = ("new_empty", "new_zeros", "new_ones", "new_full")
WITHOUT_GRADIENT = frozenset({"detach", "view_dtype", *LIKE, *NEW})


def carries_gradient(node: fx.Node, given: bool) -> bool:
    """Whether `node` requires a gradient; `given`: whether any operand does."""
    value = value_of(node)
    if node.op in ("placeholder", "get_attr"):
        return isinstance(value, torch.Tensor) and value.requires_grad
    if node.op != "call_function" or op_name(node) in WITHOUT_GRADIENT:
        return False
    outputs = value if isinstance(value, (tuple, list)) else [value]
    return given and any(
        not isinstance(out, torch.Tensor) or out.is_floating_point() or out.is_complex() for out in outputs
    )


def eliminate_dead_code(graph: fx.Graph) -> None:
    """torch's own, which also lints the graph; but only nodes without users are asked whether they are impure, a check
    that costs as much as all the rest."""
    random = True
    if TracingContext.try_get():  # as torch decides whether a random number that nobody reads is drawn
        random = inductor.draws_as_eager()
    graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure(random))


def emit(graph: fx.Graph, target: Any, args: Any, like: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
    """A new call of `target` with its fake value and the source location of `like`. An operator that is made of others
    leaves open sizes open."""
    name = schema_of(target).name.split("::")[1]
    new = graph.create_node("call_function", target, tuple(args), kwargs or {}, name)
    new.meta = origin(like)
    given, named = fx.map_arg((new.args, new.kwargs), value_of)
    with enable_python_dispatcher():  # some of torch's C++ forms fix a size that is open
        new.meta["val"] = target(*given, **named)
    return new


def is_parameter(node: fx.Node) -> bool:
    """Whether a node is an input that the program holds as an nn.Parameter."""
    return node.op == "placeholder" and bool(node.meta.get(PARAMETER))


def is_write(node: fx.Node) -> bool:
    """Whether the schema mutates an argument: in-place ops and `out=` variants."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def written_args(node: fx.Node) -> list[fx.Node]:
    """The operands that an in-place op or an `out=` variant mutates."""
    found: list[fx.Node] = []
    for arg in schema_of(node.target).arguments:
        if arg.alias_info is not None and arg.alias_info.is_write:
            fx.map_arg(named(node, arg.name), found.append)
    return found


def called_name(node: fx.Node) -> str:
    """Of the function or method that a node of Dynamo's graph calls; "" for other nodes."""
    return node.target if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def is_in_place(name: str) -> bool:
    """Whether a function or method writes to its operand, as far as its name says."""
    return name in ("setitem", "iadd", "isub", "imul", "itruediv") or (name.endswith("_") and "__" not in name)


def written_by_name(node: fx.Node) -> list[fx.Node]:
    """The operand that a call in Dynamo's graph writes to in place, as far as its name says."""
    first = node.args[0] if node.args else None
    return [first] if is_in_place(called_name(node)) and isinstance(first, fx.Node) else []


def descendants(start: fx.Node, end: fx.Node) -> set[fx.Node]:
    """`start` and the nodes computed from it, up to `end`."""
    found, node = {start}, start
    while node is not end:
        node = node.next
        if any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found
