"""A product that is summed over is a matrix product.

    (q[:, :, None] * k[:, None]).sum(-1)      ->   einsum("abd,acd->abc", q, k)
    (m[..., None] * x[:, None]).sum(2)        ->   einsum("abc,acd->abd", m, x)

Written so, a compiler multiplies and adds element by element; as one contraction it is a call of the library of matrix
products, forward and backward: 2 to 10 times as fast where many numbers are summed for each operand. (Mamba2 is written
so in transformers 4, for its segment sums.) What is read and written once, as a vector times a matrix, stays as it is.

After: the product of all pairs is nowhere, and the same numbers are added in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ringopt.dims.contraction import Letters, Product, product_of
from ringopt.hardware.precision import rounds_float32
from ringopt.ir.nodes import emit, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import is_open
from ringopt.pipeline import Context, Pass

aten = torch.ops.aten
REUSED = 4  # times that a number is used at least, in the mean of the operands and the result; 8 x 8 by 8 x 8 is not


@dataclass(frozen=True)
class Contract(Pass):
    """Writes sums of products as contractions, where each number is used often."""

    name = "contract"
    writes = ("improved", "notes")
    optional = True
    lost = "products that are summed over are multiplied and added element by element"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        found = 0
        for node in [node for node in gm.graph.nodes if op_name(node) == "sum"]:
            if (product := contraction_of(node)) is not None:
                contract(gm.graph, product)
                found += 1
        if found:
            context.improved = True
            context.notes.append(f"{found} products that are summed over are matrix products")


def contraction_of(node: fx.Node) -> Product | None:
    """The contraction that a sum of a product is, of what the operands are expanded from; None where it stays a sum."""
    product = product_of(node)
    if product is None or len(node.args[0].users) > 1 or not is_exact(product):
        return None
    product = unexpanded(product)
    left, right = (set(letters) - {None} for letters in product.letters)
    if set(product.contracted) != (left | right) - set(product.out):
        return None  # some numbers of one operand are summed alone
    return product if is_reused(product) else None


def unexpanded(product: Product) -> Product:
    """The same product, of what its operands are expanded from; as it is where both are expanded along one dim, whose
    size would be lost."""
    sides = [source_of(*side) for side in zip(product.operands, product.letters, strict=True)]
    (left, of_left), (right, of_right) = sides
    lost = set(product.sizes()) - {*of_left, *of_right}
    return product if lost else replace(product, operands=(left, right), letters=(of_left, of_right))


def source_of(node: fx.Node, letters: Letters) -> tuple[fx.Node, Letters]:
    """What is expanded along some of its dims, which then have no letter."""
    if op_name(node) != "expand" or len(shape_of(node.args[0])) != len(letters):
        return node, letters
    ones = [not is_open(size) and size == 1 for size in shape_of(node.args[0])]
    return node.args[0], tuple(None if one else letter for one, letter in zip(ones, letters, strict=True))


def is_reused(product: Product) -> bool:
    """Whether there are many multiplications for each number that is read or written: with rows M, columns N and K
    summed, M * N * K for M * K + K * N + M * N. An open size counts as many."""
    sizes, shares = product.sizes(), 0.0
    for letters in (product.own(0), product.own(1), product.contracted):
        known = [sizes[letter] for letter in letters]
        shares += 0 if any(map(is_open, known)) else 1 / math.prod(known)
    return REUSED * shares <= 1


def is_exact(product: Product) -> bool:
    """Whether a matrix product has the precision of the multiplication: of float32, GPUs may take TF32 for it."""
    dtypes = {value_of(node).dtype for node in (*product.operands, product.node.args[0], product.node)}
    rounds = torch.float32 in dtypes and rounds_float32(value_of(product.node).device.type)
    return len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes) and not rounds


def contract(graph: fx.Graph, product: Product) -> None:
    """Puts an einsum in the place of a sum."""
    node, texts, operands = product.node, list[str](), list[fx.Node]()
    with graph.inserting_before(node):
        for operand, letters in zip(product.operands, product.letters, strict=True):
            ones = [dim for dim, letter in enumerate(letters) if letter is None]
            operands.append(emit(graph, aten.squeeze.dims, (operand, ones), node) if ones else operand)
            texts.append("".join(filter(None, letters)))
        equation = f"{','.join(texts)}->{''.join(filter(None, product.out))}"
        result = emit(graph, aten.einsum.default, (equation, operands), node)
    node.replace_all_uses_with(result)
