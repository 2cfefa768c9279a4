"""A stretch that torch.func runs: its call, and what a vmap alone is written out as.

    y = torch_func(graph, q, k)[0]     # vmap(lambda q, k: q @ k.mT)
        ->
    y = bmm(q, transpose(k, 1, 2))

The rules by which vmap runs an operator over a batch are written in operators on whole tensors, so what is within is
found and sharded as if the program had no vmap. Gradients (grad, vjp, jacrev) have tensors of their own, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringopt.ir.nodes import is_random, is_write
from ringopt.scans.trace import in_own_thread
from ringopt.torch_compat.autograd import without_hooks
from ringopt.torch_compat.fake_tensors import FakeTensor
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.schema import HigherOrderOperator, is_functorch
from ringopt.torch_compat.transforms import OF_VMAP, load_tables, undone_after_an_error


class RunsTransforms(HigherOrderOperator):
    """`(graph, *operands) -> results`. An error inside ends the transforms that are open."""

    def __init__(self) -> None:
        super().__init__("torch_func")  # type: ignore[no-untyped-call]

    def __call__(self, graph: Callable[..., Any], *operands: Any) -> Any:
        load_tables()
        with without_hooks(), undone_after_an_error():
            return graph(*operands)


TORCH_FUNC = RunsTransforms()

# What begins and ends a region in which nothing has a gradient, or operators cast; and `x.data`.
MODES = (
    *("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode", "_get_data_attr"),
    *("_enter_autocast", "_exit_autocast"),
)


def vmapped(target: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a call of TORCH_FUNC on fake tensors gives, computed without it; None where it is to be kept whole: other
    transforms, random numbers, writes, and autocast, whose casts are by operators as the program has them."""
    if target is not TORCH_FUNC or not is_vmap_alone(args[0]):
        return None
    graph, *operands = args
    mode = next((x.fake_mode for x in operands if isinstance(x, FakeTensor)), None)
    if mode is None:
        return None

    def traced() -> fx.GraphModule:
        with mode:
            given = [x.detach() if isinstance(x, Tensor) else x for x in operands]
            run = partial(TORCH_FUNC, AsTraced(graph).run)
            with sdpa_kernel(SDPBackend.MATH):  # for other backends have no rule of vmap on CPUs (torch 2.14)
                return make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*given)

    try:
        plain = in_own_thread(traced)
    except OtherDtype:
        return None
    made = [node for node in plain.graph.nodes if node.op == "call_function"]
    if any(is_random(node) or is_write(node) for node in made):
        return None
    return tuple(fx.Interpreter(plain).run(*operands))


class OtherDtype(Exception):
    """Autocast is around it: a value is of another dtype than Dynamo has traced, or an operator refuses two dtypes."""


class AsTraced(fx.Interpreter):
    """Raises OtherDtype."""

    def run_node(self, n: fx.Node) -> Any:
        expected = n.meta.get("example_value", n.meta.get("val"))
        try:
            value = super().run_node(n)
        except RuntimeError as error:
            given = {x.dtype for x in map(self.env.get, n.all_input_nodes) if isinstance(x, Tensor)}
            if len(given) > 1:
                raise OtherDtype from error
            raise
        if isinstance(value, Tensor) and isinstance(expected, Tensor) and value.dtype != expected.dtype:
            raise OtherDtype
        return value


def is_vmap_alone(graph: fx.GraphModule) -> bool:
    """Whether nothing else of torch.func is called, no other graph, and nothing that says what has a gradient or is
    cast."""
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    return not any(isinstance(target, HigherOrderOperator) or is_other(target) for target in called)


def is_other(target: Any) -> bool:
    """Whether it is a function of another transform, or one of MODES."""
    name = getattr(target, "__name__", "")
    return name in MODES or (is_functorch(target) and name not in OF_VMAP)
