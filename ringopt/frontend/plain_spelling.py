"""Of several spellings the one that reads least: a shape in place of the tensor that has it, a mask in place of the
indices where it is true, nothing in place of what does nothing."""

from __future__ import annotations

import sys
from functools import cache

import torch
import torch.fx as fx

from ringopt.dims.contraction_rules import einsum_letters
from ringopt.dims.op_families import SYNONYMS
from ringopt.frontend.functionalize import instead
from ringopt.frontend.shuffles import shuffle_by_views, spell_in_steps
from ringopt.ir.memory import order_of
from ringopt.ir.nodes import emit, is_aten, is_undropped, named, op_name, origin, requires_grad, shape_of, value_of
from ringopt.ir.notes import STANDS_FOR, VIEW_OF
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.torch_compat.schema import OpOverload, schema_of

aten = torch.ops.aten

DROPPED = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size")


def spell_plainly(graph: fx.Graph) -> None:
    """Rewrites a graph in place, in the order in which one rewrite makes way for the next."""
    _drop_assertions(graph)
    drop_identities(graph)
    name_shapes_and_types(graph)
    draw_by_shape(graph)
    fill_by_shape(graph)
    fill_where_masked(graph)
    join_what_has_entries(graph)
    sum_lone_letters(graph)
    count_in_memory(graph)
    transform_by_dims(graph)
    shuffle_by_views(graph)


def rename_synonyms(graph: fx.Graph) -> None:
    """One name of each operation, for all tables by operator that come after."""
    for node in graph.nodes:
        other = plain_name(node.target) if isinstance(node.target, OpOverload) else None
        if other is not None:
            names = zip(schema_of(node.target).arguments, schema_of(other).arguments, strict=False)
            renamed = {mine.name: theirs.name for mine, theirs in names}
            node.target, node.kwargs = other, {renamed[name]: value for name, value in node.kwargs.items()}


def each_by_itself(graph: fx.Graph) -> None:
    """`atleast_2d(x, y)`, which gives a list, as one call each: what is true of the one is true of the other."""
    for node in list(graph.nodes):
        if node.target not in OF_EACH:
            continue
        for user in list(node.users):
            user.target, user.args = OF_EACH[node.target], (node.args[0][user.args[1]],)
        graph.erase_node(node)


OF_EACH = {
    aten.atleast_1d.Sequence: aten.atleast_1d.default,
    aten.atleast_2d.Sequence: aten.atleast_2d.default,
    aten.atleast_3d.Sequence: aten.atleast_3d.default,
}


@cache
def plain_name(target: OpOverload) -> OpOverload | None:
    """The overload that takes what a synonym takes; None for an operator that is no synonym. In-place forms too."""
    name = schema_of(target).name.removeprefix("aten::")
    plain = SYNONYMS.get(name.removesuffix("_"))
    if plain is None:
        return None
    packet = getattr(aten, plain + "_" * name.endswith("_"))
    overloads: list[OpOverload] = [getattr(packet, overload) for overload in packet.overloads()]
    given = _kinds(target)
    fitting = [
        overload
        for overload in overloads
        if _kinds(overload)[: len(given)] == given
        and all(argument.has_default_value() for argument in schema_of(overload).arguments[len(given) :])
    ]
    return min(fitting, key=lambda overload: len(schema_of(overload).arguments))


def _kinds(target: OpOverload) -> list[tuple[str, bool]]:
    """Of each argument its type, and whether it is written to."""
    arguments = schema_of(target).arguments
    return [(str(each.type), each.alias_info is not None and each.alias_info.is_write) for each in arguments]


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if op_name(node) in DROPPED and not node.users:
            graph.erase_node(node)


def drop_identities(graph: fx.Graph) -> None:
    """Dropout that drops nothing; broadcast_tensors, which Python's losses put before an op that broadcasts anyway;
    casts and expansions to what there is, which writes have; slices of all rows, which `x[:, i:]` has where the first
    size is open."""
    for node in list(graph.nodes):
        if op_name(node) == "getitem" and op_name(node.args[0]) == "broadcast_tensors":
            before = node.args[0].args[0][node.args[1]]
            if shape_of(before) == shape_of(node):
                node.replace_all_uses_with(before)
        if is_undropped(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif (value := idle_value(node)) is not None:
            node.replace_all_uses_with(value, lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)


def idle_value(node: fx.Node) -> fx.Node | None:
    """What an alias, a cast or an expansion is of, or a slice of all rows, or what is written to these; None where it
    changes anything, if only the order in memory."""
    if node.target in (aten.slice.Tensor, aten.slice_scatter.default):
        value = node.args[0] if node.target is aten.slice.Tensor else node.args[1]
        first, end = named(node, "start") or 0, named(node, "end")
        size = shape_of(node)[named(node, "dim")]
        to_the_last = end is None or (isinstance(end, int) and end >= sys.maxsize) or same(end, size)
        whole = same(first, 0) and to_the_last and named(node, "step") == 1
    else:
        casts = node.target in (aten.to.dtype, aten.expand.default) and len(node.args) == 2 and not node.kwargs
        whole = casts or node.target is aten.alias.default
        value = node.args[0] if whole else None
    if not whole or not isinstance(value, fx.Node):
        return None
    before, after = value_of(value), value_of(node)
    if before.dtype != after.dtype or before.dim() != after.dim():
        return None
    pairs = [*zip(before.shape, after.shape, strict=True)]
    if node.target is aten.slice_scatter.default:  # all others are in the memory of their operand
        pairs += zip(before.stride(), after.stride(), strict=True)
    return value if all(same(*pair) for pair in pairs) else None


def name_shapes_and_types(graph: fx.Graph) -> None:
    """Of another value that tells a view its shape, or a cast its type, nothing else is read: it need not be at hand.
    `x.T`, `x.mH` and `x.ravel()` are named as the permutation, the transposition and the shape that they are."""
    for node in graph.nodes:
        name = op_name(node)
        if len(node.args) != 2 - (name in OF_ONE) or node.kwargs or not is_aten(node):
            continue
        first, found = node.args[0], value_of(node)
        if node.target in (aten.type_as.default, aten.to.other) and value_of(first).device == found.device:
            node.target, node.args = aten.to.dtype, (first, found.dtype)
        elif node.target in (aten.view_as.default, aten.reshape_as.default) or name in RESHAPED:
            node.target, node.args = aten.reshape.default, (first, list(shape_of(node)))
        elif name == "sum_to_size" and shape_of(first) == shape_of(node):
            node.target, node.args = aten.alias.default, (first,)
        elif node.target is aten.expand_as.default:
            node.target, node.args = aten.expand.default, (first, list(shape_of(node)))
        elif name == "numpy_T":
            node.target, node.args = aten.permute.default, (first, list(reversed(range(found.dim()))))
        elif name in ADJOINT and not found.is_complex() and found.dim() > 1:
            node.target, node.args = aten.transpose.int, (first, -2, -1)


RESHAPED, ADJOINT = ("ravel", "atleast_1d", "atleast_2d", "atleast_3d"), ("adjoint", "mH", "matrix_H")
OF_ONE = ("numpy_T", *RESHAPED, *ADJOINT)  # which take nothing but what they are views of


DRAWN = {aten.rand_like.default: aten.rand.default, aten.randn_like.default: aten.randn.default}
WRITTEN_OVER = frozenset({
    aten.bernoulli.p, aten.cauchy.default, aten.exponential.default, aten.geometric.default, aten.log_normal.default,
    aten.normal_functional.default, aten.uniform.default,
})  # fmt: skip


def draw_by_shape(graph: fx.Graph) -> None:
    """Of a value that random numbers are drawn like, or written over, nothing is read but its shape. Where memory has
    gaps or another order, that is kept."""
    carries = requires_grad(graph)
    for node in list(graph.nodes):
        if node.target not in (*DRAWN, *WRITTEN_OVER):
            continue
        found, size = value_of(node), list(shape_of(node))
        how = {"dtype": found.dtype, "device": found.device}
        if found.is_contiguous() and node.target in DRAWN:
            node.target, node.args, node.kwargs = DRAWN[node.target], (size,), how
        elif node.target in WRITTEN_OVER:
            before = node.args[0]
            with graph.inserting_before(node):
                if found.is_contiguous():
                    memory = graph.call_function(aten.empty.memory_format, (size,), how)
                else:
                    memory = graph.call_function(aten.empty_like.default, (before,))
            memory.meta = {**origin(node), "val": torch.empty_like(found)}
            node.args = (memory, *node.args[1:])
            if carries[before]:
                with graph.inserting_before(node.next):
                    linked = instead(graph, before, node, node)
                node.replace_all_uses_with(linked, lambda user, linked=linked: user is not linked)


FILLED = {aten.zeros_like.default: aten.zeros.default, aten.ones_like.default: aten.ones.default}


def fill_by_shape(graph: fx.Graph) -> None:
    """Rows that nothing is read of but their shape, as of `states[:, :1]` for a state in front, would be fetched."""
    for node in graph.nodes:
        cut = node.target in FILLED and node.args[0].target is aten.slice.Tensor and len(node.args[0].users) == 1
        if cut and value_of(node).is_contiguous() and not any(map(is_open, shape_of(node))):
            how = {"dtype": value_of(node).dtype, "device": value_of(node).device}
            node.target, node.args, node.kwargs = FILLED[node.target], (list(shape_of(node)),), how


def fill_where_masked(graph: fx.Graph) -> None:
    """One number written where a mask is true: no row need know which other rows are."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        base, (*before, mask), number = node.args[:3]
        if any(before) or value_of(mask).dtype != torch.bool or value_of(number).dim() or named(node, "accumulate"):
            continue
        with graph.inserting_before(node):
            for _ in range(len(shape_of(base)) - len(before) - len(shape_of(mask))):
                mask = emit(graph, aten.unsqueeze.default, (mask, -1), node)
            filled = emit(graph, aten.masked_fill.Tensor, (base, mask, number), node)
        if value_of(filled).stride() == value_of(node).stride():
            node.replace_all_uses_with(filled)
            graph.erase_node(node)


def join_what_has_entries(graph: fx.Graph) -> None:
    """`cat` skips a tensor of shape [0] beside others of any rank, all but its dtype: so the KV cache of transformers
    begins. One that a gradient is asked of stays, for its gradient is as empty, and not none. `cat` of one tensor, as
    einops packs it, is a copy."""
    carries = requires_grad(graph)
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, kind = node.args[0], value_of(node).dtype
        kept = [part for part in parts if carries.get(part, True) or not _is_empty_vector(part)]
        if not kept or len(kept) == len(parts) > 1:
            continue
        with graph.inserting_before(node):
            kept = [x if value_of(x).dtype == kind else emit(graph, aten.to.dtype, (x, kind), node) for x in kept]
            if len(kept) > 1:
                joined = emit(graph, aten.cat.default, (kept, *node.args[1:]), node, node.kwargs)
            else:
                joined = emit(graph, aten.clone.default, kept, node, {"memory_format": torch.contiguous_format})
        if value_of(joined).stride() == value_of(node).stride():
            node.replace_all_uses_with(joined)
            graph.erase_node(node)


def sum_lone_letters(graph: fx.Graph) -> None:
    """`einsum("nd,md->n", a, b)` adds up the rows of b before it multiplies, as torch does inside: a sum over shards is
    a sum of theirs, and what the product would read is whole on no rank."""
    for node in graph.find_nodes(op="call_function", target=aten.einsum.default):
        inputs, arrow, out = node.args[0].replace(" ", "").partition("->")
        texts, operands, named_dims = inputs.split(","), list(node.args[1]), einsum_letters(node)[0]
        if not arrow or len(operands) < 2 or not value_of(node).is_floating_point():
            continue
        for place, letters in enumerate(named_dims):
            others = set(out).union(*named_dims[:place], *named_dims[place + 1 :])
            lone = [c for c in letters if c.isalpha() and c not in others and letters.count(c) == 1]
            if lone:
                with graph.inserting_before(node):
                    dims = [letters.index(c) for c in lone]
                    operands[place] = emit(graph, aten.sum.dim_IntList, (operands[place], dims), node)
                texts[place] = "".join(c for c in texts[place] if c not in lone)
        node.args = (f"{','.join(texts)}->{out}", operands)


# Of a Fourier transform along several dims: that of all dims but the last, and that of the last.
OF_DIMS = {
    several: (others, last)
    for kind, others, last in (
        ("fft", aten.fft_fft.default, aten.fft_fft.default),
        ("ifft", aten.fft_ifft.default, aten.fft_ifft.default),
        ("rfft", aten.fft_fft.default, aten.fft_rfft.default),
        ("irfft", aten.fft_ifft.default, aten.fft_irfft.default),
    )
    for several in (getattr(aten, f"fft_{kind}2").default, getattr(aten, f"fft_{kind}n").default)
}


def transform_by_dims(graph: fx.Graph) -> None:
    """A Fourier transform along tokens and channels as one along each: the ranks share the channels of the first. Real
    numbers are made complex before an inverse, as torch does it for several dims; along one it marks its result as to
    be conjugated."""
    for node in [node for node in graph.nodes if node.target in OF_DIMS]:
        x, rank = node.args[0], len(shape_of(node))
        sizes, dims, norm = named(node, "s"), named(node, "dim"), named(node, "norm")
        dims = range(rank - len(sizes or shape_of(x)), rank) if dims is None else dims
        each = list(zip(dims, sizes or [None] * len(dims), strict=True))
        others, last = OF_DIMS[node.target]
        if last is aten.fft_ifft.default and not value_of(x).is_complex():
            with graph.inserting_before(node):
                node.args = (emit(graph, aten.to.dtype, (x, value_of(node).dtype), node), *node.args[1:])
        pairs = [*((others, *pair) for pair in each[:-1]), (last, *each[-1])]
        steps = [(target, None if size == -1 else size, dim, norm) for target, dim, size in pairs]
        spell_in_steps(node, reversed(steps) if last is aten.fft_rfft.default else steps)


def count_in_memory(graph: fx.Graph) -> None:
    """`as_strided`, its copy and its scatter count elements as their operand has them in memory, where passes may lay
    that out otherwise: they are given the vector of them. Raises GraphRefused where they could read more than the
    operand, and where torch's gradient of a scatter counts in the dims' order instead."""
    carries = requires_grad(graph)
    for node in [node for node in graph.nodes if node.target in AS_STRIDED]:
        x = node.args[0]
        captured = value_of(x.meta.get(STANDS_FOR, x))
        order = order_of(captured.stride())
        if captured.storage_offset() or not captured.permute(order).is_contiguous():
            why = f"{op_name(node)} reads memory around its operand, which is a part of something larger"
            raise GraphRefused(Refusal(why, node))
        if node.target is aten.as_strided_scatter.default and carries[node] and order != sorted(order):
            why = "as_strided_scatter has a gradient, and its operand lies in another order than its dims"
            raise GraphRefused(Refusal(why, node))
        shared = {VIEW_OF: 0} if VIEW_OF in node.meta else {}
        with graph.inserting_before(node):
            for target, args in ((aten.permute.default, order), (aten.reshape.default, [-1])):
                if target is aten.reshape.default or order != sorted(order):
                    x = emit(graph, target, (x, args), node)
                    x.meta.update(shared)
        node.args = (x, *node.args[1:])
        if node.target is aten.as_strided_scatter.default:
            in_dims(node, order)


AS_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


def in_dims(node: fx.Node, order: list[int]) -> None:
    """What is made of a vector, as it was: in the dims that lie in `order` in it."""
    graph, sizes = node.graph, shape_of(node)
    with graph.inserting_before(node):
        made = emit(graph, node.target, node.args, node, node.kwargs)
        made = emit(graph, aten.reshape.default, (made, [sizes[dim] for dim in order]), node)
        if order != sorted(order):
            made = emit(graph, aten.permute.default, (made, [order.index(dim) for dim in range(len(order))]), node)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_empty_vector(node: fx.Node) -> bool:
    shape = shape_of(node)
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0
