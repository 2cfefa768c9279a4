"""Where a graph without attention and recurrences begins: at operators that mix the tokens of a whole sequence.

    h = linear(x);  y = cumsum(h, 1)   ->   x_rows = scatter(x);  h = linear(x_rows);  y = prefix_sum(h)
    k, v = linear(x), ...;  k.mT @ v   ->   x_rows = scatter(x);  all_reduce(k_rows.mT @ v_rows)
    y = conv2d(x, w, padding=1)        ->   x_rows = scatter(x);  y = conv2d(rows of x_rows and a row around them, w)

Prefix sums (linear attention as a cumsum, minGRU in logarithms) and Fourier transforms (long convolutions, state spaces
as kernels, FNet) say which dim is the sequence. How they are computed on shards their handlers say (halo.py,
by_columns.py). So do batched products that sum over rows of an input (linear attention without a mask, attention among
channels), and those that make pairs of its rows: the input is cut. Where there are none of these, convolutions, windows
and weights over tokens (MLP-Mixer, gMLP) say it: an input is cut along the longest dim in which they move, the rows of
a picture. Where nothing mixes tokens, layers do, and an input is cut along a dim that they keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.dims.contraction import product_of
from ringopt.dims.contraction_rules import PRODUCTS, is_batched_product
from ringopt.dims.op_families import (
    CONVOLUTIONS,
    POOLS,
    RESHAPES,
    RUNNING,
    TRANSFORMS,
    TRANSPOSED_CONVOLUTIONS,
    moving_dims,
)
from ringopt.dims.origin import is_row, origins
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import named, op_name, shape_of, source_line, tensor_args, value_of
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.symbolic_sizes import at_hand, elements
from ringopt.recognize.row_pairs import row_origins
from ringopt.sharding.behind_breaks import above_products, kept_rows, worth_cutting
from ringopt.sharding.handlers.demands import Demand, worked_on

ALONG = frozenset((*RUNNING, *TRANSFORMS, "cumsum"))

Along: TypeAlias = tuple[fx.Node, int]  # a tensor, and one of its dims


def mixed_rows(graph: fx.Graph, layouts: Layouts, ranks: int, refused: bool, paired: bool) -> dict[fx.Node, Sharded]:
    """What such operators read, and how it may be spread: what products have made, or are made of. `refused`: an
    attention was found, which all ranks compute, so that layers alone say nothing. `paired`: there are pairs of tokens,
    each rank with the rows of its own."""
    found: dict[fx.Node, Sharded] = {}
    near = worked_on(graph) | above_products(graph)

    def enough(place: Sharded) -> bool:
        return place.length >= chunks_per_rank(layouts.of(place.length)) * ranks

    for node in graph.nodes:
        if op_name(node) not in ALONG or node not in near:
            continue
        x = node.args[0]
        dim = named(node, "dim") % len(shape_of(x))
        place = Sharded(dim, 1, shape_of(x)[dim], 1)
        floating = value_of(x).is_floating_point() or value_of(x).is_complex()
        if not floating or not any(map(is_row, origins(x, dim))):
            continue
        if enough(place):
            found[x] = place
    products = list(filter(is_batched_product, graph.nodes))
    summed = dict(demand for node in products for demand in paired_rows(node, paired) or summed_rows(node))
    if not found and not summed:
        summed = moved_rows(graph) or ({} if refused else kept_rows(graph, ranks))
    cuts = worth_cutting(graph, summed, layouts, ranks)
    return found | {x: place for x, place in cuts.items() if enough(place)}


def paired_rows(node: fx.Node, paired: bool) -> list[Demand]:
    """The inputs of a graph of whose rows a product makes pairs, one operand's with the other's (the outer product mean
    of AlphaFold: Jumper et al. 2021), where the pairs take no less than what they are made of: a sum over something
    else, sequences that were aligned, would leave each rank with all of them."""
    product = product_of(node)
    if product is None or (not paired and elements(shape_of(node)) < elements(shape_of(product.operands[0]))):
        return []
    left, right = (row_origins(product, side, product.own(side)) for side in (0, 1))
    return [(row.node, row.place) for row in left & right if row.place is not None]


def summed_rows(node: fx.Node) -> Iterator[Demand]:
    """The inputs of a graph whose rows a product of two activations made of them sums over."""
    rule, operands = rule_of(node), list(tensor_args(node))
    if rule is None or len(operands) != 2 or len(rule.summed) != 2:
        return
    for dims in zip(*rule.summed, strict=True):
        left, right = (origins(x, dim) for x, dim in zip(operands, dims, strict=True))
        if any(origin.kind == "features" for origin in left | right):
            continue  # of a picture with positions: channels, though the positions are an input
        yield from ((x.node, x.place) for x in left & right if is_row(x) and x.place is not None)


def moved_rows(graph: fx.Graph) -> dict[fx.Node, Sharded]:
    """Each input of a graph that convolutions, windows or weights move over, in the longest of the dims in which they
    do; of equals, in the outer one."""
    found = defaultdict[fx.Node, set[Sharded]](set)
    for node in graph.nodes:
        moved = {origin for x, dim in moved_along(node) for origin in origins(x, dim) if origin.kind == "input"}
        weighed = {origin for x, dim in weighed_along(node) for origin in origins(x, dim) if is_row(origin)}
        for origin in moved | weighed:
            if origin.place is not None:
                found[origin.node].add(origin.place)
    return {x: max(places, key=lambda at: (at_hand(at.length), -at.dim)) for x, places in found.items()}


def moved_along(node: fx.Node) -> Iterator[Along]:
    """What a kernel or a window moves over, and along which dims of it."""
    name = op_name(node)
    if name in (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS):
        yield from kernel_moves(node)
    elif name in POOLS:
        rank = len(shape_of(node))
        yield from ((node.args[0], dim) for dim in range(rank - moving_dims(name), rank))
    elif name == "unfold":
        yield node.args[0], named(node, "dimension")
    elif name == "as_strided" and op_name(node.args[0]) in RESHAPES:  # of all elements, as they lie in memory
        x = node.args[0].args[0]
        yield from ((x, dim) for dim in range(len(shape_of(x)) - 1))


def kernel_moves(node: fx.Node) -> list[Along]:
    """Of a convolution."""
    rank = len(shape_of(node))
    return [(named(node, "input"), dim) for dim in range(rank - len(shape_of(named(node, "weight"))) + 2, rank)]


def weighed_along(node: fx.Node) -> Iterator[Along]:
    """What weights sum, and over which dim of it: the features, or tokens (gMLP, AFT, synthesizers). A convolution's
    channels are no tokens where its kernel moves over an input."""
    name = op_name(node)
    if name == "linear":
        yield node.args[0], -1
    elif name in CONVOLUTIONS:
        moves = kernel_moves(node)
        if not any(origin.kind == "input" for x, dim in moves for origin in origins(x, dim)):
            yield moves[0][0], moves[0][1] - 1
    elif name in PRODUCTS:
        rule, operands = rule_of(node), list(tensor_args(node))
        for dims in zip(*rule.summed, strict=True) if rule is not None and len(operands) == 2 else ():
            sides = list(zip(operands, dims, strict=True))
            of_tokens = [(x, dim) for x, dim in sides if any(map(is_row, origins(x, dim)))]
            yield from of_tokens if len(of_tokens) == 1 else ()


def note_of_mixing(rows: Mapping[fx.Node, Sharded]) -> list[str]:
    """For the report."""
    users = [user for x in rows for user in x.users if op_name(user) in ALONG]
    what = [f"{op_name(user)} ({line})" if (line := source_line(user)) else op_name(user) for user in users]
    inputs = (x.name for x in rows if x.op == "placeholder")
    what += [f"{name}, over whose rows products sum, windows move or layers run" for name in inputs]
    where = ", ".join(dict.fromkeys(what))
    return [f"no attention and no recurrence was found: tokens are sharded along the dim of {where}"] if rows else []
