"""What is whole between two graphs, and was in rows.

    y = graph_1(x)           # computed in rows, gathered: whatever Python does with it is right
    if y.max() > 3: ...      # a graph break
    z = graph_2(y)           # has no attention of its own, and yet computes in rows

A graph returns whole tensors. Most of what crosses a graph break goes into the next graph as it is, which may have no
attention that says where a sequence is. So a tensor that was gathered is remembered, as long as it lives, with the dim
that its rows were of; a graph that it enters may cut it there. It is whole, and equal on all ranks: to cut it sends
nothing, and is exact, whatever the program did with it in between, and whatever the graph is called with later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ringopt.distributed.mesh import Mesh
from ringopt.ir.nodes import is_tensor, shape_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import formula, is_open

# Of each, (dim, outer, inner) of its rows: the length follows from its size.
_rows = WeakTensorKeyDictionary()


def remembering(run: Callable[..., Any], where: Mapping[int, Sharded]) -> Callable[..., Any]:
    """`run`, whose outputs `where`, by place, are gathered from such rows."""

    def remembered(*inputs: Any) -> Any:
        outputs = run(*inputs)
        remember(outputs, where)
        return outputs

    return remembered if where else run


def remember(outputs: Sequence[Any], where: Mapping[int, Sharded]) -> None:
    """Of outputs of a graph, by place, the rows that they were gathered from. A part of a size that the graph leaves
    open is not remembered."""
    for place, at in where.items():
        out = outputs[place]
        if isinstance(out, Tensor) and not (is_open(at.outer) or is_open(at.inner)):
            _rows[out] = at.dim, int(at.outer), int(at.inner)


def rows_before(x: Any, size: Sequence[Any]) -> Sharded | None:
    """The rows that an earlier graph had of the tensor `x`, whose `size` a graph may leave open."""
    known = _rows.get(x) if isinstance(x, Tensor) else None
    if known is None or len(size) != x.dim():
        return None
    dim, outer, inner = known
    if outer * inner == 1:
        return Sharded(dim, 1, size[dim], 1)
    now = formula(size[dim])
    return Sharded(dim, outer, now // (outer * inner), inner) if isinstance(now, int) else None


def rows_of_earlier(nodes: Sequence[fx.Node], inputs: Sequence[Any], mesh: Mesh) -> dict[fx.Node, Sharded]:
    """The inputs of a graph, its first `nodes`, of which an earlier one over ranks had rows."""
    if mesh.size == 1:
        return {}
    found = ((node, rows_before(x, shape_of(node))) for node, x in zip(nodes, inputs, strict=False) if is_tensor(node))
    return {node: at for node, at in found if at is not None}


def note_of_cuts(cuts: Mapping[fx.Node, Sharded]) -> list[str]:
    """For the report."""
    names = ", ".join(sorted(node.name for node in cuts))
    return [f"{names}: whole, as an earlier graph gathered it from its rows, and cut here again"] if cuts else []
