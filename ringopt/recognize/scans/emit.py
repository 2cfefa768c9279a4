"""Puts `ringopt::scan` in the place of a recurrence that was found."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx

from ringopt.ir.nodes import emit, named, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import is_open, same, slice_of
from ringopt.recognize.scans.batch import OverSteps
from ringopt.recognize.scans.buffers import Buffer
from ringopt.recognize.scans.hoist import SplitStep
from ringopt.recognize.scans.recurrence import FoundRecurrence
from ringopt.recognize.scans.roll import Rolled
from ringopt.scans.call import ScanCall
from ringopt.scans.real_parts import is_complex

aten = torch.ops.aten
FILLS = ("zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like")
NEW = ("new_zeros", "new_ones", "new_empty", "new_full")


def emit_scan(
    graph: fx.Graph, found: FoundRecurrence, parts: SplitStep, text: str
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The last carries and, stacked, the ys of a recurrence, at the insertion point of the graph."""
    batch = OverSteps(graph, found.steps)
    _, xs, consts = found.inputs
    batch.made.update(zip(consts, found.consts, strict=True))
    read = {node for each in parts.before for node in each.all_input_nodes} | {*parts.xs, *found.outputs[1]}
    for node, source in zip(xs, found.xs, strict=True):
        if node in read:
            batch.made[node] = source.stacked(graph, found.steps, found.like)
            batch.stacked.add(node)
    for node in parts.before:
        batch.add(node)
    init, rows, shared = (
        [as_pairs(graph, x) for x in some]
        for some in (found.init, [batch.spread(x) for x in parts.xs], [batch.made[x] for x in parts.consts])
    )
    finals, stacked = ScanCall(init, rows, shared, text).emit(graph, found.like)
    finals = [as_whole(graph, new, old) for new, old in zip(finals, found.outputs[0], strict=True)]
    of_scan = {y: as_whole(graph, new, y) for y, new in zip(parts.ys, stacked, strict=True)}
    return finals, [of_scan[y] if y in of_scan else batch.spread(y) for y in found.outputs[1]]


def as_pairs(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Complex numbers as pairs, which scans take."""
    if not is_complex(x):
        return x
    if value_of(x).is_conj():
        x = emit(graph, aten.resolve_conj.default, (x,), x)
    return emit(graph, aten.view_as_real.default, (x,), x)


def as_whole(graph: fx.Graph, new: fx.Node, old: fx.Node) -> fx.Node:
    """The complex numbers that pairs are, where a step gives such as `old`."""
    return emit(graph, aten.view_as_complex.default, (new,), new) if is_complex(old) else new


def replace_loop(graph: fx.Graph, rolled: Rolled, parts: SplitStep, text: str) -> None:
    """Puts a scan in the place of a loop."""
    loop = rolled.loop
    inside = loop.nodes()
    last = max(inside, key={node: i for i, node in enumerate(graph.nodes)}.__getitem__)
    with graph.inserting_after(last):
        anchor = graph.call_function(operator.add, (0, 0))
    with graph.inserting_before(anchor):
        finals, ys = emit_scan(graph, rolled.recurrence, parts, text)
        stacked = dict(zip(rolled.ys, ys, strict=True))
        for place, final in zip(rolled.carries, finals, strict=True):
            if place not in stacked:
                _replace(loop.iterations[-1][place], final, inside, graph)
        tensors = set[fx.Node]()
        for place, buffer in rolled.buffers.of.items():
            whole = loop.iterations[-1][place]
            if whole is not None and any(user not in inside for user in whole.users):
                tensors.add(made := filled(graph, buffer, stacked[buffer.result], whole))
                _replace(whole, made, inside, graph)
        for place in range(len(loop.operands)):
            if place in stacked:
                _replace_column(graph, loop.column(place), stacked[place], inside)
            elif place not in rolled.carries and place not in rolled.buffers.of:
                for node in loop.column(place)[1:]:  # the same in all iterations
                    _replace(node, loop.first[place], inside, graph)
    graph.erase_node(anchor)
    read_where_written(graph, tensors)
    for iteration in reversed(loop.iterations):
        for node in reversed(iteration):
            if node is not None and not node.users:
                graph.erase_node(node)


def replace_operator(graph: fx.Graph, node: fx.Node, found: FoundRecurrence, parts: SplitStep, text: str) -> None:
    """Puts a scan in the place of a call of torch's, whose results are taken off by number."""
    with graph.inserting_before(node):
        finals, ys = emit_scan(graph, found, parts, text)
    results = [*finals, *ys]
    for item in list(node.users):
        with graph.inserting_before(item):
            item.replace_all_uses_with(laid_out(graph, results[item.args[1]], item))


def _replace(node: fx.Node | None, new: fx.Node, inside: set[fx.Node], graph: fx.Graph) -> None:
    """For who reads it outside of the loop."""
    if node is None or not any(user not in inside for user in node.users):
        return
    new = laid_out(graph, new, node)
    node.replace_all_uses_with(new, lambda user: user not in inside and user is not new)


def laid_out(graph: fx.Graph, new: fx.Node, old: fx.Node) -> fx.Node:
    """`new` in the memory order of `old`: views are made of that."""
    here, there = value_of(new), value_of(old)
    dims = [dim for dim, size in enumerate(there.shape) if not same(size, 1)]
    if all(same(here.stride(dim), there.stride(dim)) for dim in dims):
        return new
    order = sorted(range(there.dim()), key=lambda dim: (there.stride(dim), not same(there.shape[dim], 1)), reverse=True)
    back = [order.index(dim) for dim in range(len(order))]
    turned = order != sorted(order)
    if turned:
        new = emit(graph, aten.permute.default, (new, order), old)
    new = emit(graph, aten.clone.default, (new,), old, {"memory_format": torch.contiguous_format})
    if turned:
        new = emit(graph, aten.permute.default, (new, back), old)
    return new


def filled(graph: fx.Graph, buffer: Buffer, ys: fx.Node, like: fx.Node) -> fx.Node:
    """The tensor that a loop fills, all parts at once."""
    steps = shape_of(ys)[0]
    at = buffer.places.forward(steps)
    if buffer.places.step < 0:
        ys = emit(graph, aten.flip.default, (ys, [0]), like)
    joined = along(graph, ys, at.dim, at.width > 0, like)
    whole = (at.first, at.step, steps * at.step) == (0, at.extent, shape_of(like)[at.dim])
    if whole and op_name(buffer.init) in (*FILLS, *NEW):
        return joined
    end = at.first + at.step * (steps - 1) + at.extent
    step = at.step if at.width == 0 else 1
    return emit(graph, aten.slice_scatter.default, (buffer.init, joined, at.dim, at.first, end, step), like)


def read_where_written(graph: fx.Graph, tensors: set[fx.Node]) -> None:
    """Slices of one of `tensors`, which parts are written into there and behind, are slices of the parts."""
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        dim = named(node, "dim") % len(shape_of(node))
        source, first, end = original_part(node, dim)
        if source is node.args[0] or not tensors & set(written_into(node.args[0])):
            continue
        with graph.inserting_before(node):
            whole = (first, end) == (0, shape_of(source)[dim])
            new = source if whole else emit(graph, aten.slice.Tensor, (source, dim, first, end), node)
            node.replace_all_uses_with(new if value_of(new).is_contiguous() else laid_out(graph, new, node))
        graph.erase_node(node)


def written_into(tensor: fx.Node) -> Iterator[fx.Node]:
    """A tensor, before and behind each of the parts that were written into it."""
    while op_name(tensor) == "slice_scatter":
        yield tensor
        tensor = tensor.args[0]


def original_part(node: fx.Node, dim: int) -> tuple[fx.Node, int, int]:
    """What a slice along `dim` is a part of, which was written or was there before, and from where to where."""
    source = node.args[0]
    if is_open(shape_of(source)[dim]) or (part := part_along(node, dim)) is None:
        return source, 0, 0
    first, end = part
    while op_name(source) == "slice_scatter" and (written := part_along(source, dim)) is not None:
        alike = value_of(source.args[1]).dtype == value_of(source).dtype
        if alike and written[0] <= first and end <= written[1]:
            source, first, end = source.args[1], first - written[0], end - written[0]
        elif end <= written[0] or written[1] <= first:
            source = source.args[0]
        else:
            break
    return source, first, end


def part_along(node: fx.Node, dim: int) -> tuple[int, int] | None:
    """From where to where a slice reads or writes; None along another dim, or with gaps."""
    step, size = named(node, "step") or 1, shape_of(node.args[0])[dim]
    if named(node, "dim") % len(shape_of(node)) != dim or step != 1:
        return None
    first, _, count = slice_of(size, named(node, "start"), named(node, "end"))
    return first, first + count


def along(graph: fx.Graph, ys: fx.Node, dim: int, merged: bool, like: fx.Node) -> fx.Node:
    """The steps along `dim`: a dim of their own, or merged with the one that is there."""
    rank = len(shape_of(ys))
    if dim:
        ys = emit(graph, aten.permute.default, (ys, [*range(1, dim + 1), 0, *range(dim + 1, rank)]), like)
    if not merged:
        return ys
    sizes = shape_of(ys)
    return emit(graph, aten.reshape.default, (ys, [*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]]), like)


def _replace_column(graph: fx.Graph, column: Sequence[fx.Node | None], ys: fx.Node, inside: set[fx.Node]) -> None:
    """For who reads values of single steps: all of them joined are a view, and others are selected."""
    nodes = [node for node in column if node is not None]
    if len(nodes) == len(column):
        for user in dict.fromkeys(user for user in nodes[0].users if user not in inside):
            _join(graph, user, nodes, ys)
    for t, node in enumerate(column):
        if node is not None and any(user not in inside for user in node.users):
            _replace(node, emit(graph, aten.select.int, (ys, 0, t), node), inside, graph)


def _join(graph: fx.Graph, user: fx.Node, nodes: list[fx.Node], ys: fx.Node) -> None:
    """cat or stack of the values of all steps, in order or backwards, and of what else there is."""
    name = op_name(user)
    if name not in ("cat", "stack") or not isinstance(user.args[0], (list, tuple)):
        return
    parts, count = list(user.args[0]), len(nodes)
    starts = [i for i in range(len(parts) - count + 1) if parts[i : i + count] in (nodes, nodes[::-1])]
    if not starts or any(len(shape_of(part)) != len(shape_of(nodes[0])) for part in parts):
        return
    dim = (user.args[1] if len(user.args) > 1 else user.kwargs.get("dim", 0)) % len(shape_of(user))
    start = starts[0]
    if parts[start : start + count] != nodes:
        ys = emit(graph, aten.flip.default, (ys, [0]), user)
    joined = [along(graph, ys, dim, name != "stack", user)]
    rest = (parts[:start], joined, parts[start + count :])
    with graph.inserting_before(user):
        if name == "stack":
            sides = [[emit(graph, aten.unsqueeze.default, (x, dim), user) for x in side] for side in rest[::2]]
            rest = (sides[0], joined, sides[1])
        pieces = [piece for side in rest for piece in side]
        new = pieces[0] if len(pieces) == 1 else emit(graph, aten.cat.default, (pieces, dim), user)
        user.replace_all_uses_with(laid_out(graph, new, user))
