"""Autocast regions as explicit casts.

Which inputs autocast casts is not looked up in a list of op names (the lists differ by device and version) but
watched: the op is run on fake values inside autocast and outside, and the casts it makes only inside are written into
the graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringopt.graph.nodes import is_tensor, op_name, value_of
from ringopt.graph.refusal import Refusal

aten = torch.ops.aten


class Uncastable(Exception):
    """Autocast changes what an op does inside, which no cast of its inputs can say."""

    def __init__(self, node: fx.Node):
        self.refusal = Refusal(f"autocast casts values inside {node.target}, not only its inputs", node)
        super().__init__(self.refusal.sentence)


class SeenCasts(TorchDispatchMode):
    """Which memory is cast to which dtype, in order. A view counts as what it views: einsum casts its transposed
    operand."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is aten._to_copy.default and dtype is not None and dtype != args[0].dtype:
            self.casts.append((args[0].untyped_storage()._cdata, dtype))
        return func(*args, **(kwargs or {}))


def explicit_casts(gm: fx.GraphModule) -> None:
    """Removes _enter_autocast and _exit_autocast after making their casts explicit; values get the dtypes they have."""
    if any(op_name(node) == "_enter_autocast" for node in gm.graph.nodes):
        Casting(gm).run_all()


class Casting(fx.Interpreter):
    """Walks the graph on fake values. The captured ones are no help: they were recorded below autocast."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        self.regions: list[tuple[Any, ...]] = []
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def run_all(self) -> None:
        inputs = [value_of(node) for node in self.module.graph.find_nodes(op="placeholder")]
        mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
        with mode, torch.no_grad():
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
        with self.region(), SeenCasts() as inside:
            value = super().run_node(node)
        if self.regions and self.regions[-1][2]:
            self.cast_inputs(node, inside.casts)
        node.meta["val"] = value
        return value

    def region(self) -> AbstractContextManager[Any]:
        if not self.regions:
            return torch.autocast("cpu", enabled=False)
        device, dtype, enabled, _cache = self.regions[-1]
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)

    def cast_inputs(self, node: fx.Node, inside: list[tuple[int, torch.dtype]]) -> None:
        outside = self.casts_outside(node)
        if inside == outside:
            return
        inputs = {value_of(arg).untyped_storage()._cdata: arg for arg in node.all_input_nodes if is_tensor(arg)}
        if any(memory not in inputs for memory, _ in inside) or (outside and outside != inside[-len(outside) :]):
            raise Uncastable(node)
        for memory, dtype in inside[: len(inside) - len(outside or ())]:
            node.replace_input_with(inputs[memory], self.cast(inputs[memory], dtype, node))

    def casts_outside(self, node: fx.Node) -> list[tuple[int, torch.dtype]] | None:
        """The casts `node` makes by itself; None where it does not run so."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        try:
            with torch.autocast(self.regions[-1][0], enabled=False), SeenCasts() as seen:
                node.target(*args, **kwargs)
        except RuntimeError:
            return None  # such as "expected m1 and m2 to have the same dtype": autocast is what makes it run
        casts: list[tuple[int, torch.dtype]] = seen.casts
        return casts

    def cast(self, arg: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        if (arg, dtype) not in self.casts:
            with self.module.graph.inserting_before(user):
                new = self.module.graph.call_function(aten.to.dtype, (arg, dtype))
            new.meta = {**arg.meta, "val": value_of(arg).to(dtype)}
            self.casts[arg, dtype] = new
            self.env[new] = new.meta["val"]
        return self.casts[arg, dtype]
