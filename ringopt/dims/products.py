"""Products of matrices, and what stands for one: which operators they are, and over which sizes they sum."""

from __future__ import annotations

import torch.fx as fx

from ringopt.dims.op_families import CONVOLUTIONS, MATRIX_PRODUCTS
from ringopt.ir.nodes import named, op_name

# Groups of rows of one matrix, each by a matrix of its own: torch's operator, and what transformers runs in its place.
GROUPED = frozenset(("_grouped_mm", "transformers::grouped_mm_fallback"))
# The operand whose last dim is summed over.
FACTORS = {
    **dict.fromkeys((*MATRIX_PRODUCTS, "mv", "_grouped_mm"), "self"), "linear": "input",
    "transformers::grouped_mm_fallback": "input",
    "addmm": "mat1", "addmv": "mat", "baddbmm": "batch1",
}  # fmt: skip
# Convolutions and fused attention have many names more (convert_element_type is no convolution).
PARTS = ("convolution", "conv_", "scaled_dot_product")


def is_counted(node: fx.Node) -> bool:
    """Whether `summed` gives all the FLOPs of the op."""
    name = op_name(node)
    return name in FACTORS or name in CONVOLUTIONS


def is_product(node: fx.Node) -> bool:
    """Whether the op runs at the rate of matrix products: one of FACTORS, a convolution or attention."""
    name = op_name(node)
    return is_counted(node) or name == "attention" or any(part in name for part in PARTS)


def summed(node: fx.Node) -> tuple[fx.Node, int]:
    """An operand, and the first of its dims that are summed over for each element of the output. For ops that
    `is_counted` denies this is a lower bound."""
    name = op_name(node)
    if "conv" in name and "backward" not in name:
        return node.args[1], 1  # X, W in the fused ones
    return (named(node, FACTORS[name]) if name in FACTORS else node.args[0]), -1
