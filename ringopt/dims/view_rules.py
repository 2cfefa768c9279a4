"""Rules of views, and of ops that select, cut, concatenate and repeat.

The law of all: a dim runs along as long as its entries keep their number and order. A dim that is indexed, cut, joined,
padded or repeated has no entry in the rule.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.dims.op_families import RESHAPES, SLICES, SPLITS, TRANSPOSES
from ringopt.dims.rule import Rule, RuleOf, ViewRule, aligned, same_dims
from ringopt.ir.nodes import argument, op_name, shape_of, tensor_args


# ---- views ---------------------------------------------------------------------------------------------------------
def view(node: fx.Node) -> Rule:
    """Dims are split and merged by their factors."""
    return ViewRule(old=shape_of(node.args[0]), new=shape_of(node))


def view_dtype(node: fx.Node) -> Rule:
    """Of a dtype of another size, the last dim is the one that does not run along."""
    rank = len(shape_of(node))
    return Rule((same_dims(rank, () if shape_of(node) == shape_of(node.args[0]) else (rank - 1,)),))


def transpose(node: fx.Node) -> Rule:
    """Two dims change places, the last two in `t` and `mT`."""
    rank = len(shape_of(node))
    first, second = (dim % rank for dim in node.args[1:3]) if len(node.args) == 3 else (rank - 2, rank - 1)
    dims = same_dims(rank)
    dims[first], dims[second] = second, first
    return Rule((dims,))


def permute(node: fx.Node) -> Rule:
    """Output dim i is operand dim `dims[i]`."""
    order = node.args[1]
    return Rule(({out: dim % len(order) for out, dim in enumerate(order)},))


def movedim(node: fx.Node) -> Rule:
    """Named dims take the places asked for; the others keep their order."""
    rank = len(shape_of(node))
    source, target = ([dims] if isinstance(dims, int) else list(dims) for dims in node.args[1:3])
    moved = {t % rank: s % rank for s, t in zip(source, target, strict=True)}
    rest = iter(dim for dim in range(rank) if dim not in moved.values())
    return Rule(({out: moved[out] if out in moved else next(rest) for out in range(rank)},))


def unsqueeze(node: fx.Node) -> Rule:
    """Dims after the new one are one place further."""
    rank, new = len(shape_of(node)), node.args[1]
    new %= rank
    return Rule(({out: out - (out > new) for out in range(rank) if out != new},))


def expand(node: fx.Node) -> Rule:
    """Dims that keep their size; expanded and new ones have no source."""
    return Rule((aligned(shape_of(node), shape_of(node.args[0])),))


def repeat(node: fx.Node) -> Rule:
    """Dims that are not repeated; new ones stand before the operand's."""
    shift = len(shape_of(node)) - len(shape_of(node.args[0]))
    return Rule(({out: out - shift for out, times in enumerate(node.args[1]) if times == 1 and out >= shift},))


def select(node: fx.Node) -> Rule:
    """The selected dim is gone; dims after it are one place nearer."""
    rank = len(shape_of(node.args[0]))
    gone = node.args[1] % rank
    return Rule(({out: out + (out >= gone) for out in range(rank - 1)},))


def slice_(node: fx.Node) -> Rule:
    """All dims but the sliced one, and that too where the slice takes all of it in order."""
    rank = len(shape_of(node))
    dim = argument(node, 1, "dim", 0) % rank
    whole = shape_of(node) == shape_of(node.args[0]) and (
        op_name(node) == "narrow" or argument(node, 4, "step", 1) == 1
    )
    return Rule((same_dims(rank, () if whole else (dim,)),))


def split(node: fx.Node) -> Rule:
    """All dims but the one that is cut into parts."""
    rank = len(shape_of(node))
    return Rule((same_dims(rank, (argument(node, 2, "dim", 0) % rank,)),))


def unbind(node: fx.Node) -> Rule:
    """As select, for each entry of the dim."""
    rank = len(shape_of(node.args[0]))
    gone = argument(node, 1, "dim", 0) % rank
    return Rule(({out: out + (out >= gone) for out in range(rank - 1)},))


def cat(node: fx.Node) -> Rule:
    """All dims but the one that is concatenated; the legacy empty operand of rank 1 has none."""
    rank = len(shape_of(node))
    dim = argument(node, 1, "dim", 0) % rank
    return Rule(
        tuple(same_dims(len(shape_of(arg)), (dim,)) if len(shape_of(arg)) == rank else {} for arg in tensor_args(node))
    )


def select_scatter(node: fx.Node) -> Rule:
    """All dims but the written one, which the written values lack."""
    rank = len(shape_of(node))
    gone = node.args[2] % rank
    return Rule((same_dims(rank, (gone,)), {out: out - (out > gone) for out in range(rank) if out != gone}))


def slice_scatter(node: fx.Node) -> Rule:
    """All dims but the written one, of both operands."""
    rank = len(shape_of(node))
    dims = same_dims(rank, (argument(node, 2, "dim", 0) % rank,))
    return Rule((dims, dims))


def stack(node: fx.Node) -> Rule:
    """All dims but the new one, of every operand."""
    rank = len(shape_of(node))
    new = argument(node, 1, "dim", 0) % rank
    dims = {out: out - (out > new) for out in range(rank) if out != new}
    return Rule(tuple(dims for _ in tensor_args(node)))


def tile(node: fx.Node) -> Rule:
    """As repeat, of the last dims."""
    shift = len(shape_of(node)) - len(shape_of(node.args[0]))
    first = len(shape_of(node)) - len(node.args[1])
    kept = [out for out in range(shift, len(shape_of(node))) if out < first or node.args[1][out - first] == 1]
    return Rule(({out: out - shift for out in kept},))


def diagonal(node: fx.Node) -> Rule:
    """All dims but the two that it is of; its own is the last dim."""
    rank = len(shape_of(node.args[0]))
    of = {argument(node, place, name, default) % rank for place, name, default in DIAGONAL[op_name(node)]}
    return Rule((dict(enumerate(dim for dim in range(rank) if dim not in of)),))


def diag_embed(node: fx.Node) -> Rule:
    """All dims but the last one, which becomes two."""
    rank = len(shape_of(node))
    of = {argument(node, place, name, default) % rank for place, name, default in DIAGONAL["diag_embed"]}
    return Rule(({out: dim for dim, out in enumerate(dim for dim in range(rank) if dim not in of)},))


# Where the two dims stand among the arguments, and what they are by default.
DIAGONAL = {
    "diagonal": ((2, "dim1", 0), (3, "dim2", 1)),
    "linalg_diagonal": ((2, "dim1", -2), (3, "dim2", -1)),
    "diag_embed": ((2, "dim1", -2), (3, "dim2", -1)),
}


def unfold(node: fx.Node) -> Rule:
    """All dims but the one that windows are cut from; the windows are the last dim."""
    rank = len(shape_of(node.args[0]))
    return Rule((same_dims(rank, (node.args[1] % rank,)),))


def without_last(node: fx.Node) -> Rule:
    """view_as_complex: pairs become numbers."""
    return Rule((same_dims(len(shape_of(node))),))


def with_last(node: fx.Node) -> Rule:
    """view_as_real: numbers become pairs."""
    return Rule((same_dims(len(shape_of(node)) - 1),))


VIEWS: dict[str, RuleOf] = {
    **dict.fromkeys(RESHAPES, view),
    "view_dtype": view_dtype,
    **dict.fromkeys(TRANSPOSES, transpose),
    "permute": permute,
    "movedim": movedim,
    "unsqueeze": unsqueeze,
    "expand": expand,
    "repeat": repeat,
    "tile": tile,
    "select": select,
    **dict.fromkeys(SLICES, slice_),
    **dict.fromkeys(("diagonal", "linalg_diagonal"), diagonal),
    "diag_embed": diag_embed,
    "unfold": unfold,
    "view_as_complex": without_last,
    "view_as_real": with_last,
    **dict.fromkeys(SPLITS, split),
    "unbind": unbind,
    "cat": cat,
    "select_scatter": select_scatter,
    "slice_scatter": slice_scatter,
    "stack": stack,
}
