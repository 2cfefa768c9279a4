"""FLOPs of ordinary operators by torch's own counter (torch.utils.flop_counter), from shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

TENSOR = re.compile(r"(bf|f|i|u|b|c)(\d*)\[([\d, ]*)\]")
DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool,
    "c64": torch.complex64, "c128": torch.complex128,
}  # fmt: skip
# Products that Python calls by names that the counter does not know, with the operand that is summed over its last dim.
PRODUCTS = {"linear": 0, "matmul": 0, "__matmul__": 0, "matmult": 0}


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
        first = given[PRODUCTS[name]]
        known = isinstance(first, torch.Tensor) and isinstance(result, torch.Tensor)
        return 2 * result.numel() * int(first.shape[-1]) if known else None
    if name == "scaled_dot_product_attention":
        name = "_scaled_dot_product_flash_attention"  # as the counter knows it
    packet = getattr(torch.ops.aten, name.partition(".")[0], None) if "::" not in name else None
    return counted_flops(packet, given, {}, result)


def counted_flops(packet: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> int | None:
    """Of an operator (an OpOverloadPacket) that is given tensors; 0 for one that torch does not count, None where
    shapes are open."""
    if packet not in flop_registry:
        return 0
    try:
        return int(flop_registry[packet](*given, **named, out_val=result))
    except (AttributeError, TypeError, ValueError, AssertionError, IndexError):  # an operand is None: not known
        return None
