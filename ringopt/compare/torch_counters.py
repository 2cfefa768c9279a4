"""FLOPs of ordinary operators by torch's own counter (torch.utils.flop_counter), from shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

TENSOR = re.compile(r"(bf|f|i|u|b|c)(\d*)\[([\d, ]*)\]")
DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
    "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
# Products that Python calls by names that the counter does not know: the operand of which an element of the result
# reads all dims from the second number on.
PRODUCTS = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "matmult", "mv", "dot"), (0, -1)),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), (1, 1)),
}  # fmt: skip
NOT_COUNTED = {"einsum", "tensordot", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}


def meta_tensor(shape: str) -> torch.Tensor | None:
    """Of a shape such as f32[2, 3], without memory; None where sizes are open, or the dtype is unknown."""
    found = TENSOR.fullmatch(shape)
    if found is None or found[1] + found[2] not in DTYPES:
        return None
    sizes = [int(size) for size in found[3].split(",") if size.strip()]
    return torch.empty(sizes, dtype=DTYPES[found[1] + found[2]], device="meta")


def named_flops(name: str, given: Sequence[Any], result: Any) -> int | None:
    """Of a call by its name in Python, without namespace; 0 for one that torch does not count, None where shapes are
    open."""
    if name in PRODUCTS:
        operand, dim = PRODUCTS[name]
        summed = given[operand] if operand < len(given) else None
        if not isinstance(summed, torch.Tensor) or not isinstance(result, torch.Tensor):
            return None
        return 2 * result.numel() * prod(summed.shape[dim:])
    if name in NOT_COUNTED:
        return None
    return counted_flops(packet_of(name), given, {}, result)


def is_product_name(name: str) -> bool:
    """Whether a name in Python is that of a product."""
    return name in PRODUCTS or name in NOT_COUNTED or packet_of(name) in flop_registry


def packet_of(name: str) -> Any:
    """The operator of ATen that the counter knows a call by; None where there is none."""
    if name == "scaled_dot_product_attention":
        name = "_scaled_dot_product_flash_attention"
    return getattr(torch.ops.aten, name.partition(".")[0], None) if "::" not in name else None


def counted_flops(packet: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> int | None:
    """Of an operator (an OpOverloadPacket) that is given tensors; 0 for one that torch does not count, None where
    shapes are open."""
    if packet not in flop_registry:
        return 0
    try:
        return int(flop_registry[packet](*given, **named, out_val=result))
    except (AttributeError, TypeError, ValueError, AssertionError, IndexError):  # an operand is None: not known
        return None
