"""Inductor as a compiler. It is imported when one of these functions is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from ringopt.torch_compat.symbolic_shapes import free_unbacked_symbols

__all__ = [
    "compile_fx", "draws_as_eager", "fresh_cache", "hash_settings", "list_mode_options", "patched",
    "select_decomp_table", "setting",
]  # fmt: skip


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config_patches: Mapping[str, Any] | None = None,
    inner_compile: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """What Inductor makes of a graph above autograd, forward and backward, under these settings; with `inner_compile`
    in the place of its code generation: called with a graph and its inputs, it gives a function of one list of them."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def generated(gm: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if not settings.get("is_backward"):
            keep_orders(gm)
        return compile_fx_inner(gm, inputs, **settings)

    patches = dict(config_patches) if config_patches is not None else None
    generate: Any = inner_compile or generated
    run: Any = compile_fx(gm, list(example_inputs), config_patches=patches, inner_compile=generate)
    return run  # type: ignore[no-any-return]


def keep_orders(gm: fx.GraphModule) -> None:
    """Has a forward graph give tensors in the order of dims that AOTAutograd has traced the backward with, where these
    are not contiguous and their sizes are known only when it runs. Of other tensors Inductor says which strides it has
    given them; of these it does not (torch 2.13), and the backward fails on what it is given."""
    teach_in_order()
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        for node in output.all_input_nodes:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not free_unbacked_symbols(value.stride()):
                continue
            strides = [*map(_at_a_length, value.stride())]
            if is_transposed([*map(_at_a_length, value.shape)], strides):
                order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
                made = gm.graph.call_function(torch.ops.ringopt_inductor.in_order.default, (node, order))
                made.meta.update(node.meta)
                output.replace_input_with(node, made)
    gm.recompile()


def is_transposed(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has no gaps in memory, and its dims are in another order there."""
    dims = sorted((dim for dim, size in enumerate(sizes) if size != 1), key=lambda dim: strides[dim])
    expected = [prod(sizes[inner] for inner in dims[:place]) for place in range(len(dims))]
    return [strides[dim] for dim in dims] == expected and dims != sorted(dims, reverse=True)


def _at_a_length(size: Any) -> int:
    """With a number for every symbol: the order of strides does not depend on it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.xreplace(dict.fromkeys(size.node.expr.free_symbols, sympy.Integer(4099))))


@torch.library.custom_op("ringopt_inductor::in_order", mutates_args=(), schema="(Tensor x, int[] order) -> Tensor")
def in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """`x` without gaps in memory, its dims in this order there, the outermost first."""
    back = [order.index(dim) for dim in range(len(order))]
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


@in_order.register_fake
def _(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.empty_like(x)  # which keeps the order of `x`


@cache
def teach_in_order() -> None:
    """Has Inductor lay the buffer out so, or copy it where it has another layout already."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.ringopt_inductor.in_order.default, type_promotion_kind=None)
    def lowered(x: Any, order: list[int]) -> Any:
        from_last = order[::-1]
        return ir.ExternKernel.require_stride_order(x, [from_last.index(dim) for dim in range(len(order))])


def list_mode_options(mode: str) -> dict[str, Any]:
    """The settings that `torch.compile(mode=...)` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def hash_settings() -> dict[str, Any]:
    """Settings for graphs with hashes, each step of which reads the one before twice: a value that is read again is
    computed again where it takes few operations, and generating code for that is exponential in the steps. "Few" is 30;
    torch 2.13 made it 50 on CPUs. None where the user has set it."""
    from torch._inductor import config

    return {} if config.realize_opcount_threshold is not None else {"realize_opcount_threshold": 30}


def draws_as_eager() -> bool:
    """Inductor's setting fallback_random: then a random number that nobody reads is drawn all the same."""
    from torch._inductor.config import fallback_random

    return bool(fallback_random)


def select_decomp_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor has AOTAutograd trace with."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def fresh_cache() -> AbstractContextManager[Any]:
    """Within it nothing compiled before is found, and what is compiled is thrown away."""
    from torch._inductor.utils import fresh_cache

    context: AbstractContextManager[Any] = fresh_cache()
    return context


def patched(**settings: Any) -> AbstractContextManager[Any]:
    """Other settings of torch._inductor.config within the context."""
    from torch._inductor import config

    context: AbstractContextManager[Any] = config.patch(settings)
    return context


def setting(name: str) -> Any:
    """A setting of torch._inductor.config, by name."""
    from torch._inductor import config

    return getattr(config, name)
