"""Rules of ops that mix along some dims only: along the others they are token-wise."""

from __future__ import annotations

from math import prod

import torch
import torch.fx as fx

from ringopt.dims.op_families import CONVOLUTIONS, PADS, SOFTMAXES, TRANSFORMS, TRANSPOSED_CONVOLUTIONS
from ringopt.dims.rule import Rule, RuleOf, aligned, pointwise, same_dims
from ringopt.ir.nodes import argument, is_tensor, op_name, shape_of, tensor_args
from ringopt.torch_compat.schema import overload_name


def but_dim(position: int, default: int | None = None) -> RuleOf:
    """Ops that mix along one dim given as argument: softmax, cumsum, flip, sort, ..."""

    def rule(node: fx.Node) -> Rule | None:
        rank = len(shape_of(node))
        dims = argument(node, position, "dims" if op_name(node) in ("flip", "roll") else "dim", default)
        if dims is None or rank == 0 or len(list(tensor_args(node))) != 1:
            return None
        dims = [dims] if isinstance(dims, int) else list(dims)
        return Rule((same_dims(rank, [dim % rank for dim in dims]),)) if dims else None

    return rule


def last_dims(position: int) -> RuleOf:
    """layer_norm, rms_norm: the normalised dims are the last ones; weight and bias are replicated."""

    def rule(node: fx.Node) -> Rule:
        rank, normalised = len(shape_of(node)), len(node.args[position])
        operands = list(tensor_args(node))
        return Rule((same_dims(rank, range(rank - normalised, rank)), *({} for _ in operands[1:])))

    return rule


def batch_norm(node: fx.Node) -> Rule | None:
    """In evaluation elementwise, with the statistics of the channel; no rule in training, which mixes the batch."""
    if node.args[5]:
        return None
    return Rule((same_dims(len(shape_of(node))), *({1: 0} for _ in list(tensor_args(node))[1:])))


def by_sample(node: fx.Node) -> Rule | None:
    """Only the batch runs along: convolutions, group_norm, instance_norm without running statistics of the batch."""
    operands = list(tensor_args(node))
    if op_name(node).startswith("conv") and len(shape_of(operands[0])) < len(shape_of(operands[1])):
        return None  # a sample without a batch
    if op_name(node) == "instance_norm" and (is_tensor(node.args[3]) or not node.args[5]):
        return None
    return Rule(({0: 0}, *({} for _ in operands[1:])))


def triangle(node: fx.Node) -> Rule:
    """triu, tril: all dims but the two of the matrix, whose places decide what is kept."""
    rank = len(shape_of(node))
    return Rule((same_dims(rank, (rank - 2, rank - 1)),))


def glu(node: fx.Node) -> Rule:
    """All dims but the one that is halved."""
    rank = len(shape_of(node))
    return Rule((same_dims(rank, (argument(node, 1, "dim", -1) % rank,)),))


def pad(node: fx.Node) -> Rule:
    """All dims that get no padding."""
    rank = len(shape_of(node))
    touched = [rank - 1 - i // 2 for i, amount in enumerate(node.args[1]) if amount]
    return Rule((same_dims(rank, touched),))


def reduction(position: int = 1, sums: bool = False, default: int | None = None) -> RuleOf:
    """mean, amax, logsumexp, ...: dims that are left run along; with `sums` the reduced ones add up over the ranks.
    `default` is the dim where none is given, None all of them."""

    def rule(node: fx.Node) -> Rule | None:
        source = node.args[0]
        rank = len(shape_of(source))
        dims = argument(node, position, "dim", default)
        if isinstance(dims, fx.Node):
            return None
        if isinstance(dims, bool):
            dims = None  # var.default(x, unbiased)
        dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
        gone = [dim % rank for dim in dims]
        left = [dim for dim in range(rank) if dim not in gone]
        keep = len(shape_of(node)) == rank
        operands = {(dim if keep else out): dim for out, dim in enumerate(left)}
        return Rule((operands,), (tuple(gone),) if sums else ())

    return rule


def max_(node: fx.Node) -> Rule | None:
    """max of two tensors, along a dim, or of all elements."""
    return pointwise(node) if overload_name(node.target) == "other" else reduction()(node)


def prelu(node: fx.Node) -> Rule:
    """One slope for all, or one a channel."""
    rank, one = len(shape_of(node)), prod(shape_of(node.args[1])) == 1
    return Rule((same_dims(rank), {} if one or rank < 2 else {1: 0}))


def pooling(dims: int) -> RuleOf:
    """Pooling and resampling over the last `dims` dims."""

    def rule(node: fx.Node) -> Rule:
        rank = len(shape_of(node))
        return Rule((same_dims(rank, range(rank - dims, rank)),))

    return rule


def distance(node: fx.Node) -> Rule | None:
    """cosine_similarity along a dim, pairwise_distance along the last: of rows that broadcast."""
    first, second = (shape_of(arg) for arg in node.args[:2])
    whole = torch.broadcast_shapes(first, second)
    dim = argument(node, 2, "dim", 1) if op_name(node) == "cosine_similarity" else -1
    if op_name(node) == "pairwise_distance" and argument(node, 4, "keepdim", False):
        return None
    gone = dim % len(whole)
    return Rule(
        tuple({d - (d > gone): i for d, i in aligned(whole, sizes).items() if d != gone} for sizes in (first, second))
    )


def solve(node: fx.Node) -> Rule | None:
    """linalg.solve, solve_triangular: leading dims run along, of matrices on both sides. No rule for vectors on the
    right, whose dims stand elsewhere than those of the matrices."""
    out, (matrix, given) = shape_of(node), [shape_of(arg) for arg in list(tensor_args(node))[:2]]
    if len(given) != len(out) or len(matrix) > len(out):
        return None
    batch = range(len(out) - 2)
    return Rule(tuple({d: at for d, at in aligned(out, own).items() if d in batch} for own in (matrix, given)))


def of_matrices(node: fx.Node) -> Rule:
    """Inverses and factors of matrices, and numbers made of each: leading dims run along."""
    return Rule((same_dims(len(shape_of(node.args[0])) - 2),))


MIXING: dict[str, RuleOf] = {
    **dict.fromkeys((*SOFTMAXES, "log_softmax", "_log_softmax"), but_dim(1)),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), but_dim(1)),
    "flip": but_dim(1),
    "roll": but_dim(2),
    "repeat_interleave": but_dim(2),
    **dict.fromkeys(("triu", "tril"), triangle),
    **dict.fromkeys(("sort", "argsort"), but_dim(1, -1)),
    **dict.fromkeys(("topk", "diff"), but_dim(2, -1)),
    **dict.fromkeys(TRANSFORMS, but_dim(2, -1)),
    "glu": glu,
    **dict.fromkeys(PADS, pad),
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), distance),
    **dict.fromkeys(("linalg_solve", "linalg_solve_triangular"), solve),
    **dict.fromkeys(("linalg_inv", "linalg_inv_ex", "inverse", "linalg_cholesky", "linalg_cholesky_ex"), of_matrices),
    **dict.fromkeys(("linalg_det", "det", "logdet", "linalg_slogdet", "slogdet", "linalg_qr"), of_matrices),
}

REDUCTIONS: dict[str, RuleOf] = {
    **dict.fromkeys(("sum", "mean", "nansum", "count_nonzero"), reduction(sums=True)),
    **dict.fromkeys(("amax", "amin", "logsumexp", "var", "std", "all", "any"), reduction()),
    **dict.fromkeys(("argmax", "argmin", "var_mean", "std_mean", "prod", "median", "nanmedian"), reduction()),
    **dict.fromkeys(("aminmax", "nanmean"), reduction()),
    "mode": reduction(default=-1),
    **dict.fromkeys(("max", "min"), max_),
    **dict.fromkeys(("linalg_vector_norm", "linalg_norm"), reduction(2)),
    "kthvalue": reduction(2, default=-1),
}

LAYERS: dict[str, RuleOf] = {
    **dict.fromkeys(("layer_norm", "rms_norm"), last_dims(1)),
    "batch_norm": batch_norm,
    **dict.fromkeys(("group_norm", "instance_norm", *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS), by_sample),
    "prelu": prelu,
    **dict.fromkeys(("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d"), pooling(1)),
    **dict.fromkeys(("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"), pooling(1)),
    **dict.fromkeys(("_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"), pooling(2)),
    **dict.fromkeys(("avg_pool2d", "max_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d"), pooling(2)),
    **dict.fromkeys(("avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "upsample_nearest3d"), pooling(3)),
}
