"""What Dynamo cannot trace in torch's own Transformer, in a form that it can.

Where Dynamo breaks inside `torch.nn`, it runs the rest of that module as it is: no backend sees the attention of an
`nn.TransformerEncoder` that is given a mask, or of any `nn.MultiheadAttention` whose two masks are of unequal types.
These functions stand in for the originals while a program is traced, with the same results; eager code keeps them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ringopt.torch_compat.nn import CANONICAL_MASK, DETECT_IS_CAUSAL_MASK


def detect_is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller says so. The original also looks at the numbers, on which no trace can depend; the answer is a
    hint beside the mask, which is applied all the same."""
    return is_causal is True


def canonical_mask(
    mask: Tensor | None,
    mask_name: str,
    other_type: torch.dtype | None,
    other_name: str,
    target_type: torch.dtype,
    check_other: bool = True,
) -> Tensor | None:
    """A mask of bools as numbers to be added. Where the other mask is of another type, the original warns at each call,
    this when it is traced."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(f"only bool and floating types of {mask_name} are supported")
    if check_other and other_type is not None and mask.dtype != other_type:
        warn_of_types(mask_name, other_name)
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=target_type).masked_fill_(mask, float("-inf"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_of_types(mask_name: str, other_name: str) -> bool:
    """In torch's words. Dynamo runs it when it traces, for it answers the same at every call."""
    warnings.warn(
        f"Support for mismatched {mask_name} and {other_name} is deprecated. Use same type for both instead.",
        stacklevel=2,
    )
    return True


def teach() -> None:
    """Registers them with Dynamo, for all that is compiled in this process."""
    forms: dict[Callable[..., Any], Callable[..., Any]] = {
        DETECT_IS_CAUSAL_MASK: detect_is_causal_mask,
        CANONICAL_MASK: canonical_mask,
    }
    for original, form in forms.items():
        with suppress(ValueError):  # torch takes one form of a function: another library has given it
            torch.compiler.substitute_in_graph(original)(form)
