"""Autocast regions as explicit casts.

Which inputs autocast casts is not looked up in a list of op names (the lists differ by device and version) but
watched: the op is run on fake values inside autocast and outside, and the casts it makes only inside are written into
the graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.autograd_function import CustomGradient, HigherOrder
from ringopt.ir.nodes import is_tensor, op_name, origin, value_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import note_value
from ringopt.torch_compat.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    enable_python_dispatcher,
    without_error_log,
)
from ringopt.torch_compat.operators import TO_COPY
from ringopt.torch_compat.pytree import tree_map
from ringopt.torch_compat.tensors import TorchDispatchMode, storage_key

aten = torch.ops.aten


class Uncastable(Exception):
    """Autocast changes what an op does inside, which no cast of its inputs can say."""

    def __init__(self, node: fx.Node):
        self.refusal = Refusal(f"autocast casts values inside {node.target}, not only its inputs", node)
        super().__init__(self.refusal.sentence)


Casts = list[tuple[int, torch.dtype]]


class SeenCasts(TorchDispatchMode):
    """Which memory is cast to which dtype, in order. A view counts as what it views: einsum casts its transposed
    operand."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: Casts = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is TO_COPY and dtype is not None and dtype != args[0].dtype:
            self.casts.append((storage_key(args[0]), dtype))
        return func(*args, **(kwargs or {}))


def explicit_casts(gm: fx.GraphModule) -> None:
    """Removes _enter_autocast and _exit_autocast after making their casts explicit; values get the dtypes they have.

    A region that was entered before the graph begins counts too: autocast does not know our operators, and would leave
    a query in float32 beside a value in bfloat16.
    """
    around = ambient(gm)
    if around or any(op_name(node) == "_enter_autocast" for node in gm.graph.nodes):
        Casting(gm, around).run_all()


def autocast_around(gm: fx.GraphModule) -> dict[fx.Node, tuple[Any, ...]]:
    """The region around each node that is in one."""
    around: dict[fx.Node, tuple[Any, ...]] = {}
    regions = ambient(gm)
    for node in gm.graph.nodes:
        if op_name(node) == "_enter_autocast":
            regions.append(tuple(node.args))
        elif op_name(node) == "_exit_autocast":
            regions.pop()
        elif regions:
            around[node] = regions[-1]
    return around


def ambient(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """The autocast region that is open now, on a device the graph has inputs on."""
    values = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)} - {"meta"}
    open_on = sorted(device for device in devices if torch.is_autocast_enabled(device))
    return [(device, torch.get_autocast_dtype(device), True, None) for device in open_on]


class Casting(fx.Interpreter):
    """Walks the graph on fake values. The captured ones are no help: they were recorded below autocast."""

    def __init__(self, gm: fx.GraphModule, regions: list[tuple[Any, ...]]):
        super().__init__(gm)
        self.regions = regions
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def run_all(self) -> None:
        inputs = [value_of(node) for node in self.module.graph.find_nodes(op="placeholder")]
        mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), detect_fake_mode())
        with mode or FakeTensorMode(), torch.no_grad(), enable_python_dispatcher():  # C++ forms fix sizes that are open
            self.run(*inputs, enable_io_processing=False)
        for node in reversed(self.module.graph.nodes):
            if op_name(node) in ("_enter_autocast", "_exit_autocast"):
                self.module.graph.erase_node(node)

    def run_node(self, node: fx.Node) -> Any:
        name = op_name(node)
        if name == "_enter_autocast":
            self.regions.append(tuple(node.args))
            return None
        if name == "_exit_autocast":
            self.regions.pop()
            return None
        if node.op != "call_function":
            return super().run_node(node)
        if isinstance(node.target, HigherOrder):
            node.meta["val"] = [torch.empty_like(x) for x in value_of(node)]
            return node.meta["val"]
        with self.region(), SeenCasts() as inside:
            value = super().run_node(node)
        if isinstance(node.target, CustomGradient):
            value = [torch.empty_like(y) for y in value]  # values of their own, for whoever writes to them
        if self.regions and self.regions[-1][2]:
            self.cast_inputs(node, inside.casts)
        note_value(node, value)
        return value

    def region(self) -> AbstractContextManager[Any]:
        if not self.regions:
            return torch.autocast("cpu", enabled=False)
        device, dtype, enabled, _cache = self.regions[-1]
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)

    def cast_inputs(self, node: fx.Node, inside: Casts) -> None:
        """`inside`: the casts that running `node` in its region made."""
        inputs: dict[int, list[fx.Node]] = {}  # by their memory, which k and v may share
        for arg in filter(is_tensor, node.all_input_nodes):
            inputs.setdefault(storage_key(value_of(arg)), []).append(arg)
        of_inputs = list(takewhile(lambda cast: cast[0] in inputs, inside))
        for count in range(len(of_inputs) + 1):
            first, rest = of_inputs[:count], self.casts_outside(node, of_inputs[:count])
            # The op's own casts follow. They are of other memory now, so that only their dtypes can be compared.
            if rest is not None and [dtype for _, dtype in rest] == [dtype for _, dtype in inside[count:]]:
                for memory, dtype in first:
                    for arg in inputs[memory]:
                        node.replace_input_with(arg, self.cast(arg, dtype, node))
                return
        raise Uncastable(node)

    def casts_outside(self, node: fx.Node, first: Casts) -> Casts | None:
        """The casts `node` makes by itself, after those of its inputs in `first`; None where it does not run so."""
        wanted = dict(first)

        def prepared(value: Any) -> Any:
            memory = storage_key(value) if isinstance(value, torch.Tensor) else None
            return value.to(wanted[memory]) if memory in wanted else value

        args, kwargs = tree_map(prepared, self.fetch_args_kwargs_from_env(node))
        try:
            with torch.autocast(self.regions[-1][0], enabled=False), without_error_log(), SeenCasts() as seen:
                node.target(*args, **kwargs)
        except RuntimeError:
            return None  # such as "expected m1 and m2 to have the same dtype": autocast is what makes it run
        casts: Casts = seen.casts
        return casts

    def cast(self, arg: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        """Autocast keeps the cast of a parameter for its next use, so that its gradient is summed in `dtype`."""
        kept = self.casts.get((arg, dtype))
        if kept is not None:
            return kept
        with self.module.graph.inserting_before(user):
            new = self.module.graph.call_function(aten.to.dtype, (arg, dtype))
        # Of a parameter it is used in several regions; else it is computed again where its reader is.
        like = arg if arg.op == "placeholder" else user
        new.meta = {**origin(like), "val": value_of(arg).to(dtype)}
        self.env[new] = new.meta["val"]
        if arg.op == "placeholder" and value_of(arg).requires_grad:
            self.casts[arg, dtype] = new
        return new
