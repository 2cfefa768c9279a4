"""The canonical attention node and what goes into it: operands as [B, H, S, D], made of whatever the program has.

einsum("bqhd,bkhd->bhqk", q, k) * c[h]   ->   q: mul(permute(q, [0, 2, 1, 3]), tabulate(c)), k: permute(k, ...)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, OpCall
from ringopt.dims.rules import rule_of
from ringopt.expr.simplify import substitute
from ringopt.expr.terms import Term, constant, dumps, loads
from ringopt.ir.nodes import emit, is_aten, op_name, shape_of, value_of
from ringopt.ops import operators
from ringopt.recognize.candidates import Candidate, Roles
from ringopt.recognize.prove import Found
from ringopt.recognize.reading import Reading

aten = torch.ops.aten


def with_positive_scale(graph: fx.Graph, q: fx.Node, scale: float) -> tuple[fx.Node, float]:
    """Kernels hide a pair by -inf before they scale it, of which another scale would make inf or NaN."""
    return (q, scale) if scale > 0 else (emit(graph, aten.mul.Scalar, (q, scale), q), 1.0)


def draw_seed(graph: fx.Graph, like: fx.Node) -> fx.Node:
    """One random number, the same on every rank, that all dropped weights follow from."""
    with value_of(like).fake_mode:
        seeds = OpCall.to(operators.seeds.default, count=1, device=value_of(like).device).emit(graph, like)
    return emit(graph, aten.select.int, (seeds, 0, 0), like)


def emit_found(graph: fx.Graph, found: Found, reading: Reading) -> fx.Node:
    """In place of attention that is spelled out, whose second product is left without users."""
    candidate, roles, scores = found.roles.candidate, found.roles, found.scores
    end = candidate.values.node
    with graph.inserting_before(end):
        q, k, v = operands_by_axes(graph, roles)
        q = multiplied(graph, q, scores.factors, roles.sizes, end)
        q, scale = with_positive_scale(graph, q, scores.scale)
        v = multiplied(graph, v, [factor for factor in found.factors if "k" in factor.axes], roles.sizes, end)
        sinks = sinks_of(graph, found, roles, end) if found.sinks is not None else None
        seed = draw_seed(graph, end) if found.dropout_p else None
        node = AttentionCall(
            q,
            k,
            v,
            sources=list(reading.sources),
            sinks=sinks,
            seed=seed,
            pattern=reading.pattern,
            mask=reading.mask.text,
            dropout_p=found.dropout_p,
            scale=scale,
        ).emit(graph, end)
        rows = [factor for factor in found.factors if "k" not in factor.axes]
        result = multiplied(graph, node, rows, roles.sizes, end)
        result = as_product(graph, result, roles, end)
    end.replace_all_uses_with(result)
    return node


# ---- operands of four dims -------------------------------------------------------------------------------------------
def four_sizes(shape: tuple[int, ...]) -> list[int]:
    """[..., H, S, D] as [B, H, S, D]; [B, S, D] has no head dim: its batch is as good as heads."""
    return [math.prod(shape[:-3]), *((1,) * (3 - len(shape)) + shape[-3:])]


def mask_of(graph: fx.Graph, mask: fx.Node, lead: tuple[int, ...]) -> fx.Node:
    """`mask`, which keeps its places from the right, with four dims. Of a batch of several dims it has all or none."""
    shape = shape_of(mask)
    if len(lead) <= 2:
        return viewed(graph, mask, [*((1,) * (4 - len(shape))), *shape])
    shape = (*((1,) * (len(lead) + 2 - len(shape))), *shape)
    if any(size != 1 for size in shape[:-3]):
        shape = (*lead[:-1], *shape[-3:])
    return viewed(graph, expanded(graph, mask, shape), four_sizes(shape))


def expanded(graph: fx.Graph, operand: fx.Node, sizes: Sequence[int]) -> fx.Node:
    """`operand` expanded to `sizes`."""
    same = list(shape_of(operand)) == list(sizes)
    return operand if same else emit(graph, aten.expand.default, (operand, list(sizes)), operand)


def four_dims(graph: fx.Graph, operand: fx.Node) -> fx.Node:
    """`operand` as [B, H, S, D]: leading dims become the batch, missing ones have size 1."""
    return viewed(graph, operand, four_sizes(shape_of(operand)))


def viewed(graph: fx.Graph, operand: fx.Node, sizes: list[int]) -> fx.Node:
    """`operand` in the shape `sizes`; itself where it already has it."""
    return operand if list(shape_of(operand)) == sizes else view(graph, operand, sizes)


def view(graph: fx.Graph, operand: fx.Node, sizes: list[int]) -> fx.Node:
    """A reshape of `operand` to `sizes`."""
    return emit(graph, aten.reshape.default, (operand, sizes), operand)


# ---- operands by their axes ------------------------------------------------------------------------------------------
def operands_by_axes(graph: fx.Graph, roles: Roles) -> tuple[fx.Node, fx.Node, fx.Node]:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], of one dtype."""
    candidate, canonical = roles.candidate, roles.canonical
    scores, values = candidate.scores, candidate.values
    key_side = candidate.key_side
    assert key_side is not None
    features = scores.contracted
    letters = {letter: (letter,) for letter in scores.sizes()}
    q = arranged(
        graph, scores.operands[1 - key_side], [letters[x] if x else () for x in scores.letters[1 - key_side]],
        [canonical["b"], canonical["h"], canonical["q"], features], roles,
    )  # fmt: skip
    k = arranged(
        graph, scores.operands[key_side], [letters[x] if x else () for x in scores.letters[key_side]],
        [canonical["b"], roles.kv_heads, canonical["k"], features], roles,
    )  # fmt: skip
    own = value_axes(candidate)
    v = arranged(
        graph, candidate.value, [own[x] if x else () for x in values.letters[1 - candidate.side]],
        [canonical["b"], roles.kv_heads, canonical["k"], _features_of_values(candidate)], roles,
    )  # fmt: skip
    kind = value_of(q).dtype
    for operand in (k, v):
        kind = torch.promote_types(kind, value_of(operand).dtype)
    q, k, v = (x if value_of(x).dtype == kind else emit(graph, aten.to.dtype, (x, kind), x) for x in (q, k, v))
    return q, k, v


def value_axes(candidate: Candidate) -> dict[str, tuple[str, ...]]:
    """The axes of each letter of the second product: those of the weights, and its own for features."""
    found: dict[str, tuple[str, ...]] = {}
    for letter, dim in zip(candidate.values.letters[candidate.side], candidate.dims[candidate.weights], strict=True):
        if letter:
            found[letter] = dim
    for letter in candidate.values.own(1 - candidate.side):
        found[letter] = (f"{letter}.v",)
        candidate.axes.sizes[f"{letter}.v"] = candidate.values.sizes()[letter]
    return found


def _features_of_values(candidate: Candidate) -> tuple[str, ...]:
    return tuple(f"{letter}.v" for letter in candidate.values.own(1 - candidate.side))


def arranged(
    graph: fx.Graph, operand: fx.Node, dims: Sequence[Sequence[str]], roles: Sequence[Sequence[str]], of: Roles
) -> fx.Node:
    """`operand`, whose dims run along the axes `dims`, with one dim for each of `roles`; axes it lacks are expanded."""
    axes = of.candidate.axes
    operand, dims = untransposed(operand, dims)
    have = [name for dim in dims for name in axes.whole(dim)]
    want = [axes.whole(role) for role in roles]
    flat = [name for role in want for name in role]
    node = viewed(graph, operand, [axes.sizes[name] for name in have])
    order = [have.index(name) for name in flat if name in have]
    if order != sorted(order):
        node = emit(graph, aten.permute.default, (node, order), operand)
    missing = [name for name in flat if name not in have]
    if missing:
        node = viewed(graph, node, [axes.sizes[name] if name in have else 1 for name in flat])
        node = emit(graph, aten.expand.default, (node, [axes.sizes[name] for name in flat]), operand)
    return viewed(graph, node, [axes.size(role) for role in want])


def untransposed(operand: fx.Node, dims: Sequence[Sequence[str]]) -> tuple[fx.Node, Sequence[Sequence[str]]]:
    """The tensor below transpositions, which are about to be done anew."""
    while op_name(operand) in ("transpose", "permute", "t", "mT", "swapaxes", "movedim") and is_aten(operand):
        rule = rule_of(operand)
        if rule is None:
            break
        below = {dim: dims[out] for out, dim in rule.operands[0].items()}
        operand, dims = operand.args[0], [below[dim] for dim in range(len(dims))]
    return operand, dims


def as_product(graph: fx.Graph, node: fx.Node, roles: Roles, like: fx.Node) -> fx.Node:
    """The output [B, Hq, Sq, Dv] as the second product had it."""
    candidate = roles.candidate
    axes, own = candidate.axes, value_axes(candidate)
    canonical = roles.canonical
    flat = [*canonical["b"], *canonical["h"], *canonical["q"], *axes.whole(_features_of_values(candidate))]
    want = [name for letter in candidate.values.out if letter for name in axes.whole(own[letter])]
    node = viewed(graph, node, [axes.sizes[name] for name in flat])
    order = [flat.index(name) for name in want]
    if order != sorted(order):
        node = emit(graph, aten.permute.default, (node, order), like)
    node = viewed(graph, node, list(shape_of(like)))
    kind = value_of(like).dtype
    return node if value_of(node).dtype == kind else emit(graph, aten.to.dtype, (node, kind), like)


# ---- factors and sinks -----------------------------------------------------------------------------------------------
def multiplied(
    graph: fx.Graph, node: fx.Node, factors: Sequence[Term], sizes: Mapping[str, int], like: fx.Node
) -> fx.Node:
    """[B, H, S, D] times terms over b, h and rows; `sizes` of the axes."""
    for factor in factors:
        value = constant(factor)
        other: Any = value if value is not None else tabulated(graph, factor, sizes, like)
        target = aten.mul.Scalar if value is not None else aten.mul.Tensor
        product = emit(graph, target, (node, other), like)
        kind = value_of(node).dtype
        node = product if value_of(product).dtype == kind else emit(graph, aten.to.dtype, (product, kind), like)
    return node


def sinks_of(graph: fx.Graph, found: Found, roles: Roles, like: fx.Node) -> fx.Node:
    """[1|B, Hq]."""
    assert found.sinks is not None
    table = tabulated(graph, found.sinks, roles.sizes, like)
    batch = shape_of(table)[0]
    table = emit(graph, aten.reshape.default, (table, [batch, shape_of(table)[1]]), like)
    sizes = [batch, roles.sizes["h"]]
    return table if list(shape_of(table)) == sizes else emit(graph, aten.expand.default, (table, sizes), like)


def tabulated(graph: fx.Graph, term: Term, axes: Mapping[str, int], like: fx.Node) -> fx.Node:
    """[1|B, 1|H, 1|rows, 1]: a term as a tensor."""
    sources = list(dict.fromkeys(load.source for load in loads(term)))
    numbers = {source: i for i, source in enumerate(sources)}
    rows = "k" if "k" in term.axes else "q"
    sizes = [axes[name] if name in term.axes else 1 for name in ("b", "h", rows)]
    text = json.dumps(dumps(substitute(term, sources=numbers)), separators=(",", ":"))
    return OpCall.to(operators.tabulate.default, sources=sources, term=text, rows=rows, sizes=sizes).emit(graph, like)
