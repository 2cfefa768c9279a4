"""Rules of products and look-ups."""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.dims.op_families import MATRIX_PRODUCTS
from ringopt.dims.rule import Dims, Rule, RuleOf, aligned, same_dims
from ringopt.ir.nodes import argument, is_tensor, op_name, shape_of, tensor_args, value_of


# ---- products ------------------------------------------------------------------------------------------------------
def linear(node: fx.Node) -> Rule:
    """Features are contracted; leading dims run along, and the output's last dim is the weight's first. With a bias
    partial sums would add it once a rank, so nothing counts as summed."""
    rank, operands = len(shape_of(node)), list(tensor_args(node))
    with_bias = len(operands) == 3
    weight = {rank - 1: 0} if len(shape_of(operands[1])) == 2 else {}
    bias = ({rank - 1: 0} if weight else {},) if with_bias else ()
    summed = () if with_bias else ((len(shape_of(operands[0])) - 1,), (len(shape_of(operands[1])) - 1,))
    return Rule((same_dims(rank, (rank - 1,) if weight else ()), weight, *bias), summed)


def matmul(node: fx.Node) -> Rule:
    """Any ranks: a 1-D left operand has no row dim, a 1-D right one no column dim."""
    left, right = (shape_of(arg) for arg in node.args[:2])
    out = len(shape_of(node))
    rows, columns = len(left) > 1, len(right) > 1
    batch = out - rows - columns
    maps: list[Dims] = []
    for sizes, used in ((left, 1 + rows), (right, 1 + columns)):
        mine = len(sizes) - used
        shape = shape_of(node)
        maps.append({d + batch - mine: d for d in range(mine) if sizes[d] == shape[d + batch - mine] and sizes[d] != 1})
    if rows:
        maps[0][batch] = len(left) - 2
    if columns:
        maps[1][batch + rows] = len(right) - 1
    summed = ((len(left) - 1,), (len(right) - 2 if columns else 0,))
    return Rule((maps[0], maps[1]), summed)


def addmm(node: fx.Node) -> Rule:
    """Rows of the left matrix, columns of the right one; the bias is broadcast."""
    out, bias = shape_of(node), shape_of(node.args[0])
    return Rule((aligned(out, bias), {0: 0}, {1: 1}))


def baddbmm(node: fx.Node) -> Rule:
    """As addmm, with a batch dim in front."""
    out, bias = shape_of(node), shape_of(node.args[0])
    return Rule((aligned(out, bias), {0: 0, 1: 1}, {0: 0, 2: 2}))


def einsum(node: fx.Node) -> Rule | None:
    """Letters of the output run along with the same letters of the operands; a letter that every operand has and the
    output has not is summed. No rule for diagonals ("ii") and letters that only some operands sum."""
    operands, out = einsum_letters(node)
    if any(len(set(letters)) < len(letters) for letters in (*operands, out)):
        return None
    sizes = [shape_of(arg) for arg in tensor_args(node)]
    maps = tuple(
        {out.index(c): d for d, c in enumerate(letters) if c in out and own[d] == shape_of(node)[out.index(c)]}
        for letters, own in zip(operands, sizes, strict=True)
    )
    common = [c for c in operands[0] if c not in out and all(c in letters for letters in operands)]
    places = [tuple(letters.index(c) for letters in operands) for c in common]
    equal = [at for at in places if all(own[d] == sizes[0][at[0]] for own, d in zip(sizes, at, strict=True))]
    return Rule(maps, tuple(zip(*equal, strict=True)) if equal else ())


def einsum_letters(node: fx.Node) -> tuple[list[str], str]:
    """The letters of each operand and of the output, an ellipsis as numbers counted from its end. Without "->" the
    output has the letters that come once, in their order."""
    inputs, arrow, out = node.args[0].replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow:
        letters = inputs.replace(",", "").replace(".", "")
        out = "..." * ("..." in inputs) + "".join(c for c in sorted(letters) if letters.count(c) == 1)
    dims = [len(shape_of(arg)) - len(letters) + 3 for letters, arg in zip(operands, tensor_args(node), strict=True)]
    numbers = "0123456789"
    most = max((count for letters, count in zip(operands, dims, strict=True) if "..." in letters), default=0)
    named = [
        letters.replace("...", numbers[most - count : most]) for letters, count in zip(operands, dims, strict=True)
    ]
    return named, out.replace("...", numbers[:most])


def tensordot(node: fx.Node) -> Rule:
    """The dims that are not contracted, of the first operand and then of the second."""
    shapes = [shape_of(arg) for arg in node.args[:2]]
    gone = [[dim % len(shape) for dim in dims] for dims, shape in zip(node.args[2:4], shapes, strict=True)]
    left, right = ([d for d in range(len(shape)) if d not in dims] for shape, dims in zip(shapes, gone, strict=True))
    maps = (dict(enumerate(left)), dict(enumerate(right, len(left))))
    return Rule(maps, (tuple(gone[0]), tuple(gone[1])))


def inner(node: fx.Node) -> Rule | None:
    """The last dims of both are contracted; no rule for scalars."""
    left, right = (len(shape_of(arg)) for arg in node.args[:2])
    if not left or not right:
        return None
    return Rule(
        ({d: d for d in range(left - 1)}, {left - 1 + d: d for d in range(right - 1)}), ((left - 1,), (right - 1,))
    )


def bilinear(node: fx.Node) -> Rule:
    """All dims but the features run along in both inputs; weight and bias are replicated."""
    rows = same_dims(len(shape_of(node)) - 1)
    return Rule((rows, rows, *({} for _ in list(tensor_args(node))[2:])))


def cell(node: fx.Node) -> Rule:
    """One step of a recurrent layer, of a batch: rows of the input and of its states run along with all results."""
    operands, states = list(tensor_args(node)), 2 if op_name(node) == "lstm_cell" else 1
    return Rule(({0: 0},) * (1 + states) + ({},) * (len(operands) - 1 - states))


def cdist(node: fx.Node) -> Rule | None:
    """Rows of the first operand by rows of the second."""
    rank = len(shape_of(node))
    if any(shape_of(arg)[:-2] != shape_of(node)[:-2] for arg in node.args[:2]):
        return None
    batch = same_dims(rank - 2)
    return Rule(({**batch, rank - 2: rank - 2}, {**batch, rank - 1: rank - 2}))


def addmv(node: fx.Node) -> Rule:
    """Rows of the matrix; the vector is replicated, the bias is broadcast."""
    return Rule((aligned(shape_of(node), shape_of(node.args[0])), {0: 0}, {}))


# ---- look-ups ------------------------------------------------------------------------------------------------------
def embedding(node: fx.Node) -> Rule | None:
    """Dims of the indices run along; the table is replicated."""
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        return None  # a gradient is divided by how often an index is in the whole batch; sparse ones are not summed
    return Rule(({}, same_dims(len(shape_of(node.args[1])))))


def index(node: fx.Node) -> Rule | None:
    """Advanced indexing: the dims of the index tensors stand where the indexed dims were (first, when those are
    apart)."""
    source, indices = node.args[0], list(node.args[1])
    if any(is_tensor(i) and value_of(i).dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    used = [dim for dim, i in enumerate(indices) if i is not None]
    rank = max(len(shape_of(indices[dim])) for dim in used)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    block = shape_of(node)[first : first + rank]
    left = [dim for dim in range(len(shape_of(source))) if dim not in used]
    places = [out for out in range(len(shape_of(node))) if not first <= out < first + rank]
    whole = dict(zip(places, left, strict=True))
    maps = [{first + out: dim for out, dim in aligned(block, shape_of(indices[dim])).items()} for dim in used]
    return Rule((whole, *maps))


def index_select(node: fx.Node) -> Rule:
    """The indexed dim is that of the indices; the source is replicated along it."""
    rank = len(shape_of(node))
    dim = node.args[1] % rank
    return Rule((same_dims(rank, (dim,)), {dim: 0}))


def one_hot(node: fx.Node) -> Rule:
    """Dims of the indices run along; the last dim, the classes, is new."""
    return Rule((same_dims(len(shape_of(node.args[0]))),))


def gather(node: fx.Node) -> Rule | None:
    """gather, take_along_dim: the dim of the look-up is that of the indices; of the others those of equal size."""
    rank = len(shape_of(node))
    source, index, dim = node.args[0], node.args[1], argument(node, 2, "dim")
    if op_name(node) == "gather":
        index, dim = dim, index
    if dim is None or len(shape_of(source)) != len(shape_of(index)):
        return None
    dim %= rank
    sizes, where = shape_of(source), shape_of(index)
    along = {d: d for d in range(rank) if d != dim and sizes[d] == where[d]}
    return Rule((along, {**along, dim: dim}))


def scatter(node: fx.Node) -> Rule:
    """scatter, scatter_add, scatter_reduce: dims in which target, index and source have the same size."""
    sizes, dim = [shape_of(arg) for arg in tensor_args(node)], node.args[1] % len(shape_of(node))
    along = {d: d for d, size in enumerate(shape_of(node)) if d != dim and all(other[d] == size for other in sizes)}
    return Rule(tuple(along for _ in sizes))


def index_add(node: fx.Node) -> Rule | None:
    """index_add, index_copy: all dims but the indexed one."""
    rank, source = len(shape_of(node)), node.args[3]
    if len(shape_of(source)) != rank:
        return None
    dims = same_dims(rank, (node.args[1] % rank,))
    return Rule((dims, {}, dims))


def index_fill(node: fx.Node) -> Rule:
    """All dims but the indexed one; indices and value are replicated."""
    dims = same_dims(len(shape_of(node)), (node.args[1] % len(shape_of(node)),))
    return Rule((dims, *({} for _ in list(tensor_args(node))[1:])))


def index_put(node: fx.Node) -> Rule | None:
    """Dims that no index stands for, in the target and in the written values; no rule for boolean masks."""
    indices = list(node.args[1])
    if any(is_tensor(i) and value_of(i).dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    rank, used = len(shape_of(node)), [dim for dim, i in enumerate(indices) if i is not None]
    rows = torch.broadcast_shapes(*(shape_of(indices[dim]) for dim in used))
    left = [dim for dim in range(rank) if dim not in used]
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    of_left, of_rows = [shape_of(node)[dim] for dim in left], [None] * len(rows)
    places = [*left[:first], *of_rows, *left[first:]]
    found = aligned((*of_left[:first], *rows, *of_left[first:]), shape_of(node.args[2]))
    written = {dim: at for out, at in found.items() if (dim := places[out]) is not None}
    return Rule((same_dims(rank, used), *({} for _ in used), written))


def among(node: fx.Node) -> Rule | None:
    """bucketize, isin, searchsorted: elementwise, among boundaries that are replicated."""
    operands, along = list(tensor_args(node)), same_dims(len(shape_of(node)))
    if op_name(node) != "searchsorted":
        return Rule((along, {})) if len(operands) == 2 else None
    return Rule(({}, along)) if len(operands) == 2 and len(shape_of(operands[0])) == 1 else None


PRODUCTS: dict[str, RuleOf] = {
    "linear": linear,
    **dict.fromkeys((*MATRIX_PRODUCTS, "mv", "dot"), matmul),
    "einsum": einsum,
    "tensordot": tensordot,
    "inner": inner,
    "addmm": addmm,
    "addmv": addmv,
    "baddbmm": baddbmm,
    "bilinear": bilinear,
    "cdist": cdist,
    **dict.fromkeys(("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"), cell),
}


def is_batched_product(node: fx.Node) -> bool:
    """Whether it multiplies matrices, one of each operand for each element of a batch."""
    return op_name(node) in PRODUCTS and sum(len(shape_of(x)) > 2 for x in tensor_args(node)) > 1


LOOK_UPS: dict[str, RuleOf] = {
    "embedding": embedding,
    "index": index,
    "index_select": index_select,
    "one_hot": one_hot,
    **dict.fromkeys(("gather", "take_along_dim"), gather),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scatter),
    **dict.fromkeys(("index_add", "index_copy"), index_add),
    "index_fill": index_fill,
    "index_put": index_put,
    **dict.fromkeys(("bucketize", "isin", "searchsorted"), among),
}
