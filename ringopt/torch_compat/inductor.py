"""Inductor as a compiler. It is imported when one of these functions is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

__all__ = [
    "compile_fx", "draws_as_eager", "fresh_cache", "hash_settings", "list_mode_options", "patched",
    "select_decomp_table",
]  # fmt: skip


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config_patches: Mapping[str, Any] | None = None,
    inner_compile: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """What Inductor makes of a graph above autograd, forward and backward, under these settings; with `inner_compile`
    in the place of its code generation: called with a graph and its inputs, it gives a function of one list of them."""
    from torch._inductor.compile_fx import compile_fx

    inner: dict[str, Any] = {"inner_compile": inner_compile} if inner_compile is not None else {}
    patches = dict(config_patches) if config_patches is not None else None
    run: Any = compile_fx(gm, list(example_inputs), config_patches=patches, **inner)
    return run  # type: ignore[no-any-return]


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
