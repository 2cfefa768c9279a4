"""Liger's kernels (liger-kernel 0.5 and later): norms, rotations and gates as operators that work token by token.

    LigerRMSNormFunction.apply(x, weight, eps, ...)     ->      ringopt_kernels::liger_rms_norm(x, weight, eps, ...)

Each operator calls the Function of Liger's, so numbers are its own. Some of these kernels write to what they are given
or have saved; the operators give them copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ringopt.frontend.libraries.operators import Results, define, defined
from ringopt.rules.declare import Decide, Declaration, Gathered, Pointwise, Tokenwise
from ringopt.torch_compat.dynamo_calls import not_traced
from ringopt.torch_compat.tensors import is_traceable_wrapper_subclass

OPS = "liger_kernel.ops"


@dataclass(frozen=True)
class LigerKernel:
    """An autograd.Function of Liger's, by what of its arguments is known here; calls with others are left to it.

    file     of liger_kernel.ops
    name     of the Function
    op       of the operator
    schema   of its arguments, named as those of the Function; those of a value None are not passed on
    likes    for each result: the argument that has its shape and dtype
    says     the rule
    written  arguments that the forward's kernel writes to
    reused   arguments whose memory the backward's kernel writes to
    turned   arguments of dims B H S D, of which kernels read B S H D, as the operator has them, and its results
    idle     arguments that change no number
    """

    file: str
    name: str
    op: str
    schema: str
    likes: tuple[str, ...]
    says: Decide
    written: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the operator's arguments."""
        return tuple(argument.split()[1] for argument in self.schema.split(", "))

    def form(self, function: Any) -> Callable[..., Any]:
        """What Dynamo traces in the place of `function.apply`."""
        op, names, turned, idle = self.operator_for(function), self.names, self.turned, self.idle
        usual, untraced, known = parameters(function), not_traced(function.apply), (*names, *idle)

        def traced(*args: Any, **kwargs: Any) -> Any:
            given: dict[str, Any] = dict(zip(usual, args))  # noqa: B905  (fewer arguments than parameters)
            given.update(kwargs)
            if beyond(given, known, usual):
                return untraced(*args, **kwargs)
            passed = [given.get(name) for name in names]
            if not turned:
                return op(*passed)
            each = zip(names, passed, strict=True)
            laid_out = [x.transpose(1, 2) if x is not None and name in turned else x for name, x in each]
            return tuple(out.transpose(1, 2) for out in op(*laid_out))

        return traced

    def operator_for(self, function: Any) -> Any:
        """The operator that calls `function`; it is defined once."""
        if self.op not in FUNCTIONS:
            define(self.op, self.schema, len(self.likes), self.run, self.fake, self.says)
        FUNCTIONS[self.op] = function
        return defined(self.op)

    def run(self, *args: Any) -> Results:
        """What the operator computes."""
        given = dict(zip(self.names, args, strict=True))
        copied = (*self.written, *(self.reused if torch.is_grad_enabled() else ()))
        given |= {name: given[name].clone(memory_format=torch.contiguous_format) for name in copied}
        given |= {name: given[name].transpose(1, 2) for name in self.turned}
        outs = apply_by_name(FUNCTIONS[self.op], given)
        if isinstance(outs, Tensor):
            return outs.contiguous()
        return tuple((out.transpose(1, 2) if self.turned else out).contiguous() for out in outs)

    def fake(self, *args: Any) -> Results:
        """Shapes and dtypes of what it gives."""
        given = dict(zip(self.names, args, strict=True))
        outs = tuple(given[name].new_empty(given[name].shape) for name in self.likes)
        return outs[0] if len(outs) == 1 else outs


# What the operators call, by their names: a library may be loaded again.
FUNCTIONS: dict[str, Any] = {}


def parameters(function: Any) -> dict[str, Any]:
    """Of its forward, without the context, each with its default; None where it has none."""
    found = list(inspect.signature(function.forward).parameters.values())[1:]
    return {each.name: None if each.default is inspect.Parameter.empty else each.default for each in found}


def apply_by_name(function: Any, given: dict[str, Any]) -> Any:
    """The Function of arguments by their names. What is None has its default."""
    values = {name: given.get(name) for name in parameters(function)} | {"in_place": False}
    return function.apply(
        *[usual if values[name] is None else values[name] for name, usual in parameters(function).items()]
    )


def beyond(given: dict[str, Any], known: tuple[str, ...], usual: dict[str, Any]) -> bool:
    """Whether a call asks for what is not known, or is of tensors that are spread by others (DTensor)."""
    for name, x in given.items():
        if isinstance(x, Tensor):
            if name not in known or is_traceable_wrapper_subclass(x):
                return True
        elif name not in known and x is not None and x is not False and x != usual.get(name):
            return True
    return isinstance(given.get("casting_mode"), int)  # which may be a number of Liger's own


# ---- rules -----------------------------------------------------------------------------------------------------------
def all_but_the_last(*names: str) -> Decide:
    """Of arguments of one shape: no dim but the last is mixed."""

    def says(**given: Any) -> Declaration:
        return Tokenwise(dict.fromkeys(names, tuple(range(given[names[0]].dim() - 1))))

    return says


def gated(**given: Any) -> Declaration:
    """One function of two elements."""
    return Pointwise()


def rotated(**given: Any) -> Declaration:
    """q and k [B, S, H, D] by angles of their tokens: [S, D], or [B or 1, S, D]."""
    dims = given["cos"].dim()
    if dims == 2:
        return Tokenwise({"q": 1, "k": 1, "cos": 0, "sin": 0}, 1)
    if dims == 3:
        return Tokenwise(dict.fromkeys(("q", "k", "cos", "sin"), (0, 1)))
    return Gathered(f"its angles have {dims} dims")


def routed(**given: Any) -> Declaration:
    """Tokens [T, H] by the experts of each, [T, K]: no expert counts them."""
    return Tokenwise(dict.fromkeys(("x", "top_k_index", "top_k_weights"), 0))


NORM = "float eps, float? offset, str? casting_mode"
KERNELS: Sequence[LigerKernel] = (
    LigerKernel(
        "rms_norm", "LigerRMSNormFunction", "liger_rms_norm", f"Tensor X, Tensor? W, {NORM}, bool? row_mode", ("X",),
        all_but_the_last("X"), idle=("in_place",),
    ),
    LigerKernel(
        "fused_add_rms_norm", "LigerFusedAddRMSNormFunction", "liger_fused_add_rms_norm",
        f"Tensor X, Tensor R, Tensor W, {NORM}", ("X", "X"), all_but_the_last("X", "R"), idle=("in_place",),
    ),
    LigerKernel(
        "layer_norm", "LigerLayerNormFunction", "liger_layer_norm", "Tensor X, Tensor W, Tensor B, float eps", ("X",),
        all_but_the_last("X"),
    ),
    LigerKernel(
        "rope", "LigerRopeFunction", "liger_rope", "Tensor q, Tensor k, Tensor cos, Tensor sin, int? rotary_dim",
        ("q", "k"), rotated, written=("q", "k"), turned=("q", "k"), idle=("position_ids",),
    ),
    LigerKernel(
        "swiglu", "LigerSiLUMulFunction", "liger_silu_mul",
        "Tensor a, Tensor b, float? gate_multiplier, float? down_multiplier", ("a",), gated, reused=("a", "b"),
    ),
    LigerKernel(
        "geglu", "LigerGELUMulFunction", "liger_gelu_mul", "Tensor a, Tensor b", ("a",), gated, reused=("a", "b"),
    ),
    LigerKernel(
        "fused_moe", "LigerFusedMoEFunction", "liger_fused_moe",
        "Tensor x, Tensor gate_up_proj, Tensor down_proj, Tensor top_k_index, Tensor top_k_weights", ("x",), routed,
    ),
)  # fmt: skip
