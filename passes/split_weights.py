"""Attention whose weights are a sum or a difference of softmaxes becomes as many attentions.

As those of Ye et al., Differential Transformer, 2024, section 2.1, are.

    (softmax(a) - c * softmax(b)) @ v                    ->  softmax(a) @ v - c * (softmax(b) @ v)
    w = softmax(a).view(B, H, 2, S, S)
    (w[:, :, 0] - c * w[:, :, 1]) @ v                    ->  (y := w @ v[:, :, None])[:, :, 0] - c * y[:, :, 1]

A product is linear in its weights, whichever operand they are and however it is spelled: same numbers but for
rounding. After: no product reads a sum of two softmaxes, but where the weights are used elsewhere too or multiplied by
themselves, or where a part has another dtype or other sizes than the sum. It refuses nothing, so it does not match,
check and rewrite: a sum that stays is a look-alike to find_unfused, which says so.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.dims.contraction import product_of
from ringopt.dims.op_families import MATRIX_PRODUCTS, PERMUTATIONS
from ringopt.ir.nodes import emit, op_name, shape_of
from ringopt.pipeline import Context, Pass
from ringopt.recognize.softmax import SUMS, both, is_multiple, is_sum, unturned, without_number

aten = torch.ops.aten

PRODUCTS = (*MATRIX_PRODUCTS, "einsum")


@dataclass(frozen=True)
class SplitWeights(Pass):
    """Distributes a product over a sum of softmaxes: (softmax(a) - softmax(b)) @ v is a difference of two products."""

    name = "split_weights"
    optional = True
    lost = "attention whose weights are a sum or a difference of softmaxes is not found"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node in list(gm.graph.nodes):
            product = product_of(node) if op_name(node) in PRODUCTS else None
            if product is None:
                continue
            for weights, values in (product.operands, product.operands[::-1]):
                # A factor of each query stands beside rows of the product, which a vector of values has none of. What
                # is multiplied by itself is not linear in it.
                if weights is not values and is_sum(unturned(weights)) and len(shape_of(values)) > 1:
                    with gm.graph.inserting_before(node):
                        node.replace_all_uses_with(Splitter(gm.graph, node, weights, values).times(weights))
                    break


class Splitter:
    """Of one product of `weights`, the operand that is to be parted, and `values`."""

    def __init__(self, graph: fx.Graph, product: fx.Node, weights: fx.Node, values: fx.Node):
        self.graph, self.product, self.weights, self.values = graph, product, weights, values
        self.leads = op_name(product) in MATRIX_PRODUCTS and product.args[0] is weights
        self.wholes: dict[tuple[fx.Node, int], fx.Node] = {}  # products of what is read in parts

    def times(self, weights: fx.Node, turns: tuple[fx.Node, ...] = ()) -> fx.Node:
        """The product with `weights`, once they have gone through `turns`, in place of its own."""
        if op_name(weights) in PERMUTATIONS and is_sum(unturned(weights)):
            return self.times(weights.args[0], (weights, *turns))
        if op_name(weights) in SUMS:
            parts = [self.times(part, turns) for part in weights.args[:2]]
            return emit(self.graph, weights.target, (*parts, *weights.args[2:]), self.product, weights.kwargs)
        if (rest := without_number(weights)) is not None:
            return emit(self.graph, weights.target, (self.times(rest, turns), weights.args[1]), self.product)
        if op_name(weights) == "mul" and not turns:
            factor, rest = next(pair for pair in both(weights) if is_multiple(*pair, weights))
            if (other := self.of_rows(factor)) is not None:
                return emit(self.graph, weights.target, (other, self.times(rest)), self.product)
        if op_name(weights) == "select" and not turns and (whole := self.of_whole(weights)) is not None:
            return whole
        for turn in turns:
            weights = emit(self.graph, turn.target, (weights, *turn.args[1:]), turn, turn.kwargs)
        return self.of(weights)

    def of_rows(self, factor: fx.Node) -> fx.Node | None:
        """A factor of the weights as it stands beside the output; None where it counts what the product sums away, as
        that of each query does where weights are read along their columns."""
        if self.leads or not shape_of(factor):  # a number without dims does not change the dtype; with dims it might
            return factor
        product = product_of(self.product)
        assert product is not None
        sizes = shape_of(factor)
        letters = product.letters[product.operands.index(self.weights)]
        below = dict(zip(letters[len(letters) - len(sizes) :], sizes, strict=True))
        kept = [letter for letter, size in below.items() if size != 1]
        if not set(kept) <= set(product.out):
            return None
        flat = emit(self.graph, aten.reshape.default, (factor, [below[letter] for letter in kept]), self.product)
        order = sorted(range(len(kept)), key=lambda i: product.out.index(kept[i]))
        turned = emit(self.graph, aten.permute.default, (flat, order), self.product)
        wide = [below[letter] if letter in kept else 1 for letter in product.out]
        return emit(self.graph, aten.reshape.default, (turned, wide), self.product)

    def of(self, weights: fx.Node) -> fx.Node:
        args = fx.map_arg(self.product.args, lambda arg: weights if arg is self.weights else arg)
        return emit(self.graph, self.product.target, args, self.product, self.product.kwargs)

    def of_whole(self, part: fx.Node) -> fx.Node | None:
        """The product of all that `part` is one of, along a dim of the batch, once for all parts; of it, the part."""
        source, dim = part.args[0], part.args[1] % len(shape_of(part.args[0]))
        if op_name(self.product) == "einsum":
            if "..." in self.product.args[0]:
                return None  # which stands for dims that have no letters
            made = self.once(source, dim, self.einsum_of)
            return emit(self.graph, part.target, (made, 0, part.args[2]), self.product)
        if not self.leads or dim >= len(shape_of(source)) - 2 or len(shape_of(self.values)) != len(shape_of(part)):
            return None
        return emit(self.graph, part.target, (self.once(source, dim, self.matmul_of), *part.args[1:]), self.product)

    def once(self, source: fx.Node, dim: int, make: Callable[[fx.Node, int], fx.Node]) -> fx.Node:
        if (source, dim) not in self.wholes:
            self.wholes[source, dim] = make(source, dim)
        return self.wholes[source, dim]

    def matmul_of(self, source: fx.Node, dim: int) -> fx.Node:
        other = emit(self.graph, aten.unsqueeze.default, (self.values, dim), self.product)
        return emit(self.graph, aten.matmul.default, (source, other), self.product)

    def einsum_of(self, source: fx.Node, dim: int) -> fx.Node:
        """With a letter more, the first of the output."""
        equation, operands = self.product.args[0].replace(" ", ""), list(self.product.args[1])
        inputs, out = equation.split("->")
        letter = next(each for each in string.ascii_letters if each not in equation)
        side = operands.index(self.weights)
        spelled = inputs.split(",")
        spelled[side] = spelled[side][:dim] + letter + spelled[side][dim:]
        operands[side] = source
        return emit(self.graph, self.product.target, (f"{','.join(spelled)}->{letter}{out}", operands), self.product)
