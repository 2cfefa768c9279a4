"""How the dims of an op's output come from the dims of its operands: one table for all directions.

An op works *token by token* along a dim when row i of the output needs row i of an operand and nothing else of it.
`rule_of(node)` says along which dims. From that one fact follow where a sharded operand takes the output (`push`),
which operands must be sharded for a sharded output (`pull`), and which dims are summed away (`summed`), so that
partial sums over the ranks give the whole. Ops without a rule mix rows in a way this table does not know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from ringopt.graph.mask import Mask
from ringopt.graph.nodes import argument, is_tensor, op_name, shape_of, tensor_args, value_of
from ringopt.graph.placement import Sharded, through_view

Dims = dict[int, int]


@dataclass(frozen=True)
class Rule:
    """`operands[i]` maps a dim of the output to the dim of the i-th tensor argument that it runs along with.
    `summed[i]` is the dim of the i-th argument that is contracted with the others' `summed`, or None."""

    operands: tuple[Dims, ...]
    summed: tuple[tuple[int, ...], ...] = ()

    def push(self, index: int, placement: Sharded) -> Sharded | None:
        """Placement of the output when the `index`-th argument has `placement`."""
        for out, dim in self.operands[index].items():
            if dim == placement.dim:
                return placement.at(out)
        return None

    def pull(self, placement: Sharded) -> list[Sharded | None] | None:
        """Placements of the arguments that give an output of `placement`; None where no argument runs along."""
        wanted = [placement.at(dims[placement.dim]) if placement.dim in dims else None for dims in self.operands]
        return wanted if any(wanted) else None

    def sums(self, index: int, placement: Sharded) -> list[Sharded | None] | None:
        """Placements of all arguments when the `index`-th is sharded along a dim that is summed away."""
        if not self.summed or placement.dim not in self.summed[index]:
            return None
        place = self.summed[index].index(placement.dim)
        return [placement.at(dims[place]) if dims else None for dims in self.summed]


@dataclass(frozen=True)
class ViewRule(Rule):
    """A reshape: dims are split and merged, the sequence stays one factor of one dim."""

    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    operands: tuple[Dims, ...] = field(default=({},))

    def push(self, index: int, placement: Sharded) -> Sharded | None:
        return through_view(placement, self.old, self.new)

    def pull(self, placement: Sharded) -> list[Sharded | None] | None:
        found = through_view(placement, self.new, self.old)
        return [found] if found else None


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call_function node, or None."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return Rule((same(len(shape_of(node))),)) if is_tensor(node) else None
    target, name = node.target, op_name(node)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None  # the random numbers of a shard are not a shard of the random numbers
    if name in RULES:
        return RULES[name](node)
    if torch.Tag.pointwise in target.tags or name in POINTWISE:
        return pointwise(node)
    return None


def same(rank: int, but: Sequence[int] = ()) -> Dims:
    return {dim: dim for dim in range(rank) if dim not in but}


def aligned(out: Sequence[int], operand: Sequence[int]) -> Dims:
    """Broadcasting: dims are matched from the last; a dim of size 1 is used whole."""
    shift = len(out) - len(operand)
    return {d + shift: d for d, size in enumerate(operand) if size == out[d + shift] and size != 1}


# Token-wise ops that carry no pointwise tag.
POINTWISE = frozenset(
    {"to", "contiguous", "clone", "detach", "alias", "_to_copy", "lift_fresh_copy", "type_as", "float", "bfloat16"}
    | {"half", "double", "full_like", "zeros_like", "ones_like", "empty_like", "where", "masked_fill", "expand_as"}
    | {"__and__", "__or__", "__xor__", "softplus", "rsub", "nan_to_num", "square"}
)


def pointwise(node: fx.Node) -> Rule | None:
    if not is_tensor(node):
        return None
    out = shape_of(node)
    return Rule(tuple(aligned(out, shape_of(arg)) for arg in tensor_args(node)))


# ---- views ---------------------------------------------------------------------------------------------------------
def view(node: fx.Node) -> Rule:
    return ViewRule(old=shape_of(node.args[0]), new=shape_of(node))


def transpose(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    first, second = (dim % rank for dim in node.args[1:3]) if len(node.args) == 3 else (rank - 2, rank - 1)
    dims = same(rank)
    dims[first], dims[second] = second, first
    return Rule((dims,))


def permute(node: fx.Node) -> Rule:
    order = node.args[1]
    return Rule(({out: dim % len(order) for out, dim in enumerate(order)},))


def movedim(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    source, target = ([dims] if isinstance(dims, int) else list(dims) for dims in node.args[1:3])
    moved = {t % rank: s % rank for s, t in zip(source, target, strict=True)}
    rest = iter(dim for dim in range(rank) if dim not in moved.values())
    return Rule(({out: moved[out] if out in moved else next(rest) for out in range(rank)},))


def unsqueeze(node: fx.Node) -> Rule:
    rank, new = len(shape_of(node)), node.args[1]
    new %= rank
    return Rule(({out: out - (out > new) for out in range(rank) if out != new},))


def expand(node: fx.Node) -> Rule:
    return Rule((aligned(shape_of(node), shape_of(node.args[0])),))


def select(node: fx.Node) -> Rule:
    rank = len(shape_of(node.args[0]))
    gone = node.args[1] % rank
    return Rule(({out: out + (out >= gone) for out in range(rank - 1)},))


def slice_(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    dim = argument(node, 1, "dim", 0) % rank
    whole = shape_of(node) == shape_of(node.args[0]) and argument(node, 4, "step", 1) == 1
    return Rule((same(rank, () if whole else (dim,)),))


def split(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    return Rule((same(rank, (argument(node, 2, "dim", 0) % rank,)),))


def unbind(node: fx.Node) -> Rule:
    rank = len(shape_of(node.args[0]))
    gone = argument(node, 1, "dim", 0) % rank
    return Rule(({out: out + (out >= gone) for out in range(rank - 1)},))


def cat(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    dim = argument(node, 1, "dim", 0) % rank
    return Rule(
        tuple(same(len(shape_of(arg)), (dim,)) if len(shape_of(arg)) == rank else {} for arg in tensor_args(node))
    )


def stack(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    new = argument(node, 1, "dim", 0) % rank
    dims = {out: out - (out > new) for out in range(rank) if out != new}
    return Rule(tuple(dims for _ in tensor_args(node)))


# ---- along all dims but some ---------------------------------------------------------------------------------------
def but_dim(position: int, default: int | None = None) -> Callable[[fx.Node], Rule | None]:
    """Ops that mix along one dim given as argument: softmax, cumsum, flip, sort, ..."""

    def rule(node: fx.Node) -> Rule | None:
        rank = len(shape_of(node))
        dims = argument(node, position, "dims" if op_name(node) in ("flip", "roll") else "dim", default)
        if dims is None or rank == 0 or len(list(tensor_args(node))) != 1:
            return None
        dims = [dims] if isinstance(dims, int) else list(dims)
        return Rule((same(rank, [dim % rank for dim in dims]),)) if dims else None

    return rule


def last_dims(position: int) -> Callable[[fx.Node], Rule]:
    """layer_norm, rms_norm: the normalised dims are the last ones; weight and bias are used whole."""

    def rule(node: fx.Node) -> Rule:
        rank, normalised = len(shape_of(node)), len(node.args[position])
        operands = list(tensor_args(node))
        return Rule((same(rank, range(rank - normalised, rank)), *({} for _ in operands[1:])))

    return rule


def triangle(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    return Rule((same(rank, (rank - 2, rank - 1)),))


def glu(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    return Rule((same(rank, (argument(node, 1, "dim", -1) % rank,)),))


def pad(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    touched = [rank - 1 - i // 2 for i, amount in enumerate(node.args[1]) if amount]
    return Rule((same(rank, touched),))


def reduction(position: int = 1, sums: bool = False) -> Callable[[fx.Node], Rule | None]:
    """mean, amax, logsumexp, ...: dims that are left run along; with `sums` the reduced ones add up over the ranks."""

    def rule(node: fx.Node) -> Rule | None:
        source = node.args[0]
        rank = len(shape_of(source))
        dims = argument(node, position, "dim")
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


def gather(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    source, dim, index = node.args[:3]
    dim %= rank
    sizes, where = shape_of(source), shape_of(index)
    along = {d: d for d in range(rank) if d != dim and sizes[d] == where[d]}
    return Rule((along, {**along, dim: dim}))


# ---- products ------------------------------------------------------------------------------------------------------
def linear(node: fx.Node) -> Rule:
    rank, operands = len(shape_of(node)), list(tensor_args(node))
    with_bias = len(operands) == 3
    weight = {rank - 1: 0} if len(shape_of(operands[1])) == 2 else {}
    bias = ({rank - 1: 0} if weight else {},) if with_bias else ()
    summed = () if with_bias else ((len(shape_of(operands[0])) - 1,), (len(shape_of(operands[1])) - 1,))
    return Rule((same(rank, (rank - 1,) if weight else ()), weight, *bias), summed)


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
    out, bias = shape_of(node), shape_of(node.args[0])
    return Rule((aligned(out, bias), {0: 0}, {1: 1}))


def baddbmm(node: fx.Node) -> Rule:
    out, bias = shape_of(node), shape_of(node.args[0])
    return Rule((aligned(out, bias), {0: 0, 1: 1}, {0: 0, 2: 2}))


def einsum(node: fx.Node) -> Rule | None:
    """Letters of the output run along with the same letters of the operands; a letter that every operand has and the
    output has not is summed. No rule for ellipses, diagonals ("ii") and letters that only some operands sum."""
    inputs, _, out = node.args[0].replace(" ", "").partition("->")
    operands = inputs.split(",")
    if (
        "->" not in node.args[0]
        or "." in inputs
        or any(len(set(letters)) < len(letters) for letters in (*operands, out))
    ):
        return None
    maps = tuple({out.index(c): d for d, c in enumerate(letters) if c in out} for letters in operands)
    summed = [c for c in operands[0] if c not in out and all(c in letters for letters in operands)]
    return Rule(maps, tuple(tuple(letters.index(c) for c in summed) for letters in operands) if summed else ())


# ---- look-ups ------------------------------------------------------------------------------------------------------
def embedding(node: fx.Node) -> Rule | None:
    if argument(node, 3, "scale_grad_by_freq", False):
        return None  # the gradient is divided by how often an index occurs in the whole batch
    return Rule(({}, same(len(shape_of(node.args[1])))))


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
    rank = len(shape_of(node))
    dim = node.args[1] % rank
    return Rule((same(rank, (dim,)), {dim: 0}))


def one_hot(node: fx.Node) -> Rule:
    return Rule((same(len(shape_of(node.args[0]))),))


def attention(node: fx.Node) -> Rule | None:
    """Batch and heads are independent, but for the random numbers; the sequence is the exchange's business, not this
    table's."""
    q, k, _v, given, _sources, sinks, seed, _pattern, mask = node.args[:9]
    if given is not None or seed is not None or any(Mask.parse(mask).terms):
        return None
    dims = {0: 0, 1: 1} if shape_of(q)[1] == shape_of(k)[1] else {0: 0}
    if sinks is None:
        return Rule((dims, dims, dims))
    of_sinks = {out: dim for out, dim in aligned(shape_of(q)[:2], shape_of(sinks)).items() if out in dims}
    return Rule((dims, dims, dims, of_sinks))


RULES: dict[str, Callable[[fx.Node], Rule | None]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze"), view),
    **dict.fromkeys(("transpose", "t", "swapaxes", "mT"), transpose),
    "permute": permute,
    "movedim": movedim,
    "unsqueeze": unsqueeze,
    **dict.fromkeys(("expand", "broadcast_to"), expand),
    "select": select,
    "slice": slice_,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), split),
    "unbind": unbind,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "stack": stack,
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"), but_dim(1)
    ),
    "flip": but_dim(1),
    **dict.fromkeys(("triu", "tril"), triangle),
    "roll": but_dim(2),
    **dict.fromkeys(("sort", "argsort"), but_dim(1, -1)),
    "topk": but_dim(2, -1),
    "diff": but_dim(2, -1),
    "layer_norm": last_dims(1),
    "rms_norm": last_dims(1),
    "glu": glu,
    "pad": pad,
    "constant_pad_nd": pad,
    **dict.fromkeys(("sum", "mean"), reduction(sums=True)),
    **dict.fromkeys(("amax", "amin", "logsumexp", "var", "std", "all", "any", "argmax", "argmin"), reduction()),
    "linalg_vector_norm": reduction(2),
    "gather": gather,
    "linear": linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul),
    "einsum": einsum,
    "addmm": addmm,
    "baddbmm": baddbmm,
    "embedding": embedding,
    "index": index,
    "index_select": index_select,
    "one_hot": one_hot,
    "attention": attention,
}
