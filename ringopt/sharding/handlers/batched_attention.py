"""Attention that is spread over rows of the batch, or over heads: windows of a sequence that are folded into them.

    y = attention(q, k, v, mask(b, q, k))   ->   numbers = scatter(arange(windows))    # those of this rank's windows
                                                 y_rows  = attention(q_rows, k_rows, v_rows, mask(numbers[b], q, k))

Each attends by itself, so none needs another's rows. A mask that asks which one it is (shifted windows: Liu et al.,
Swin Transformer, section 3.2) is read at the number that it has in the whole. A tensor that has a dim of them, and is
read there at this number and nowhere else, is spread with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.expr.mask import Mask
from ringopt.expr.simplify import substitute
from ringopt.expr.terms import Term, axis, load, loads
from ringopt.ir.nodes import shape_of, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import same
from ringopt.ops import operators
from ringopt.sharding.emit import Steps
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def attended(sharder: Sharder, node: fx.Node) -> bool:
    """Where a mask, or the place of a weight that may be dropped, asks for the row of the batch, or for the head. (What
    asks for neither has a rule: dims/rules.py.)"""
    if node.target is not operators.attention.default:
        return False
    call = AttentionCall.of(node)
    sources, sinks, seed = call.sources, call.sinks, call.seed
    found = (sharder.placements[x] for x in call.operands)
    place = next((at for at in found if at is not None and at.dim < 2), None)
    if place is None or batch_rows_differ(node) or not same(shape_of(call.q)[place.dim], shape_of(call.k)[place.dim]):
        return False
    if is_dilated(call.pattern) and seed is not None:  # it numbers what it drops from the first row of the batch on
        return False
    step, mask, name = Steps(sharder, node), call.mask_term, "bh"[place.dim]
    along = spread(mask, name, [shape_of(source) for source in sources], place.size)
    q, k, v = (sharder.sharded(x, place) for x in call.operands)
    read = [sharder.operand(x, place.at(along[i]) if i in along else None) for i, x in enumerate(sources)]
    numbered = renumbered(mask, name, along, len(sources))
    if len(sources) in numbered.sources:
        read.append(step.numbers(place, value_of(call.q).device))
    logits = None if sinks is None else of_heads(sharder, sinks, place)
    drawn = None if seed is None else with_numbers(step, seed, place)
    own = call.replace(q=q, k=k, v=v, sources=read, sinks=logits, seed=drawn, mask=numbered.text)
    sharder.set(node, sharder.call(node.target, own.to(node.target).args, node, place), place)
    return True


def batch_rows_differ(node: fx.Node) -> bool:
    """Whether a mask that is read whole may differ from row to row of the batch."""
    return AttentionCall.of(node).attn_mask is not None


def with_numbers(step: Steps, seed: fx.Node, place: Sharded) -> fx.Node:
    """The seed, and behind it the numbers in the whole of the batch rows and heads that this rank has."""
    sizes, device = shape_of(AttentionCall.of(step.node).q)[:2], value_of(step.node).device
    distinct = [
        step.numbers(place, device) if dim == place.dim else step(aten.arange.default, size, device=device)
        for dim, size in enumerate(sizes)
    ]
    first = step(aten.to.device, step.sharder.replicated(seed), device, torch.int64)
    return step(aten.cat.default, [step(aten.reshape.default, first, [1]), *distinct])


def spread(mask: Mask, name: str, shapes: Sequence[Sequence[int]], size: int) -> dict[int, int]:
    """Source -> the dim, of `size`, in which every load reads it at the axis `name`, and in no other dim."""
    found: dict[int, set[int | None]] = {}
    for each in loads(*mask.terms):
        dims = [dim for dim, index in enumerate(each.index) if name in index.axes]
        own = len(dims) == 1 and each.index[dims[0]] is axis(name) and same(shapes[each.source][dims[0]], size)
        found.setdefault(each.source, set()).add(dims[0] if own else None)
    return {source: dim for source, (dim, *others) in found.items() if dim is not None and not others}


def renumbered(mask: Mask, name: str, along: dict[int, int], numbers: int) -> Mask:
    """The mask at `numbers[axis]` in the place of the axis, but for sources that are spread with it."""
    places = {name: load(numbers, [axis(name)], torch.int64)}
    kept: dict[Term, Term] = {each: each for each in loads(*mask.terms) if each.source in along}
    visible, bias, score = (term and substitute(term, places, leaves=kept) for term in mask.terms)
    return Mask(visible, bias, score, mask.nan, mask.stops)


def of_heads(sharder: Sharder, sinks: fx.Node, place: Sharded) -> fx.Node:
    """[1|B, Hq], a logit of each head."""
    return sharder.operand(sinks, place if same(shape_of(sinks)[place.dim], place.size) else None)
