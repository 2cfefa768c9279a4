"""Where the transforms of torch.func begin and end in Dynamo's graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    is_functorch_wrapped_tensor,
    pop_dynamic_layer_stack_and_undo_to_depth,
)
from torch._functorch.predispatch import lazy_load_decompositions as load_tables

from ringopt.torch_compat.schema import is_functorch

__all__ = ["OF_VMAP", "depth_after", "is_forward_mode", "is_unwrapped", "load_tables", "undone_after_an_error"]

# load_tables(): fills the tables by which vmap writes some operators as others.

# Functions without a result.
BEGIN = ("_vmap_increment_nesting", "_grad_increment_nesting", "_saved_tensors_hooks_disable")
OF_VMAP = ("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim")
END = ("_vmap_decrement_nesting", "_grad_decrement_nesting", "_saved_tensors_hooks_enable")


def depth_after(target: Any, depth: int) -> int:
    """How many transforms are open behind a call of `target`, of `depth` before it."""
    name = getattr(target, "__name__", "")
    return depth + (name in BEGIN) - (name in END)


def is_forward_mode(target: Any) -> bool:
    """Whether it is a function of jvp, whose gradients have levels of their own."""
    name = getattr(target, "__name__", "")
    return is_functorch(target) and ("jvp" in name or "dual" in name)


def is_unwrapped(value: Any) -> bool:
    """Whether it is a tensor, or a number, that no transform has wrapped."""
    return not isinstance(value, (tuple, list)) and not (
        isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)
    )


@contextmanager
def undone_after_an_error() -> Iterator[None]:
    """What an error within leaves open is closed: torch would take all that follows for a part of it."""
    depth = get_dynamic_layer_stack_depth()
    refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        close_all_above(depth)
        if refused is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        raise


def close_all_above(depth: int) -> None:
    """Leaves `depth` transforms open."""
    try:
        pop_dynamic_layer_stack_and_undo_to_depth(depth)
    except RuntimeError:  # torch 2.11 looks at the outermost once more when it has closed it
        if get_dynamic_layer_stack_depth() != depth:
            raise
