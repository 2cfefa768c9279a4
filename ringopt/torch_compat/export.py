"""The format of .pt2 files."""

from __future__ import annotations

from typing import Any

import torch
from torch._export.serde import schema
from torch._export.serde.schema import SCHEMA_VERSION
from torch._export.serde.serialize import (
    _SERIALIZE_TO_TORCH_DTYPE,
    _SERIALIZE_TO_TORCH_LAYOUT,
    _SERIALIZE_TO_TORCH_MEMORY_FORMAT,
)
from torch._export.serde.union import _Union

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "MEMORY_FORMATS",
    "PRIVATE_FUNCTIONS",
    "SCHEMA_VERSION",
    "FileReader",
    "Union",
    "schema",
]

# schema: dataclasses whose fields and annotations say what the JSON in a file may hold. SCHEMA_VERSION: major, minor; a
#     file of another major is not read.

# The base of those of them that hold one of their fields.
Union: type = _Union

# What the numbers in a file say of a tensor, in its terms.
DTYPES: dict[Any, torch.dtype] = _SERIALIZE_TO_TORCH_DTYPE
LAYOUTS: dict[Any, torch.layout] = _SERIALIZE_TO_TORCH_LAYOUT
MEMORY_FORMATS: dict[Any, torch.memory_format] = _SERIALIZE_TO_TORCH_MEMORY_FORMAT

# (path): get_all_records() and get_record(name) of the archive as torch's own reader in C++ sees it.
FileReader: Any = torch._C.PyTorchFileReader

# Names of Python functions that a file may hold, beside operators: by which export spells numbers and torch.func's
# transforms.
PRIVATE_FUNCTIONS = (
    *(f"torch._sym_{name}" for name in ("sqrt", "log2", "sin", "cos")),
    *(f"torch._functorch.predispatch.{name}" for name in (
        "_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "_vmap_decrement_nesting",
        "_make_dual", "_unpack_dual", "_jvp_increment_nesting", "_jvp_decrement_nesting", "_unwrap_for_grad",
        "_enter_dual_level", "_exit_dual_level", "lazy_load_decompositions",
    )),
)  # fmt: skip
