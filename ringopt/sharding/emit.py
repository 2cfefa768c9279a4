"""What the handlers of this package write with: the local form of one node, step by step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.context_parallel.geometry.layouts import chunks_per_rank, layouts_of, text_of
from ringopt.ir.nodes import named, shape_of, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.ops.fetch_rows import Wanted
from ringopt.sharding.sharder import Sharder
from ringopt.torch_compat.schema import schema_of

aten = torch.ops.aten

FEW = 4  # ranks

Handler = Callable[[Sharder, fx.Node], bool]


class Steps:
    """Emits the ops that stand in the place of `node`.

    A replicated value here is one with the same bits and the same complete gradient on every rank; it must pass through
    `beside` before it meets values that differ by rank.
    """

    def __init__(self, sharder: Sharder, node: fx.Node):
        self.sharder, self.node = sharder, node
        sharder.reader = node

    def __call__(self, op: Any, *args: Any, placement: Sharded | None = None, **kwargs: Any) -> fx.Node:
        return self.sharder.step(op, *args, like=self.node, placement=placement, **kwargs)

    def over_ranks(self, op: Any, placement: Sharded | None = None, **arguments: Any) -> fx.Node:
        """An operator of ringopt, by the names of its arguments but its group."""
        return self(op, *OpCall.to(op, **arguments, group=self.sharder.ranks.group).args, placement=placement)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self(aten.to.dtype, x, dtype, placement=x.meta[PLACEMENT])

    def item(self, both: fx.Node, index: int) -> fx.Node:
        """An element of a tuple."""
        new = self.sharder.call(operator.getitem, (both, index), self.node, None, name=f"{self.node.name}_{index}")
        new.meta[WHOLE] = None
        return new

    # ---- between the ranks -----------------------------------------------------------------------------------------
    def total(self, partial: fx.Node) -> fx.Node:
        """Partial sums to their sum, replicated."""
        return self.over_ranks(operators.reduce_from_group.default, x=partial)

    def parts(self, partial: fx.Node) -> fx.Node:
        """[ranks, ...]: what every rank has, replicated."""
        mine = self(aten.unsqueeze.default, partial, 0)
        rows = self.sharder.factors(Sharded(0, 1, self.sharder.ranks.size, 1))
        return self.over_ranks(operators.gather.default, x=mine, **rows, layout="contiguous")

    def copied(self, x: fx.Node) -> fx.Node:
        """A replicated value for use beside sharded ones: their gradients of it are summed over the ranks."""
        return self.over_ranks(operators.copy_to_group.default, x=x)

    def fetch(
        self, x: fx.Node, place: Sharded, wanted: Wanted, out: Sharded | None, of: fx.Node | None = None
    ) -> fx.Node:
        """Rows of `x`, sharded as `place`, that ringopt/ops/fetch_rows.py tells of: sharded as `out`, or replicated;
        `of` is the node whose value they are, where nothing is left to do."""
        sharder, target = self.sharder, operators.fetch_rows.default
        layouts = self.layouts(place, out)
        layout = layouts_of(layouts)[1]
        if wanted.form == "halo":
            local: Any = len(wanted.rows(layout, sharder.ranks.size)[sharder.ranks.rank])
        else:
            local = wanted.length if wanted.everywhere else sharder.rows(wanted.length, layout)
        given = {"x": x, **sharder.factors(place), "form": wanted.form, "numbers": wanted.numbers}
        given |= {"local": local, "layout": layouts}
        if of is not None:
            return sharder.over_ranks(target, of, out, **given)
        return self.over_ranks(target, placement=out, **given)

    def layouts(self, place: Sharded, out: Sharded | None) -> str:
        """Of a sequence that is sharded as `place`, and of what is made of its rows. Where they differ, the report
        says so: more rows change ranks."""
        ranks, length = self.sharder.ranks, place.length if out is None else out.length
        old, new = ranks.layout(place.length), ranks.layout(length)
        if old != new and not ranks.same_units(Sharded(0, 1, place.length, 1), Sharded(0, 1, length, 1)):
            self.sharder.relaid.append(f"{self.node.name}: {place.length} rows, {old}, are laid out anew, {new}")
        return text_of(old, new)

    def numbers(self, place: Sharded, device: torch.device) -> fx.Node:
        """Which places of a dim that is sharded as `place` this rank holds."""
        return self.cut(self(aten.arange.default, place.size, device=device), place.at(0))

    def cut(self, whole: fx.Node, place: Sharded, placement: Sharded | None = None) -> fx.Node:
        """This rank's rows of `whole`, noted as `placement`."""
        return self.over_ranks(operators.scatter.default, placement, x=whole, **self.sharder.cut(place))

    # ---- the result --------------------------------------------------------------------------------------------------
    def done(self, value: fx.Node, placement: Sharded | None = None, of: fx.Node | None = None) -> bool:
        """`value` is the node's (or that of an element of its tuple): cast to its dtype where it was computed wider."""
        node = of or self.node
        final = self.sharder.call(aten.to.dtype, (value, value_of(node).dtype), node, placement)
        self.sharder.set(node, final, placement)
        return True


def enough_rows(sharder: Sharder, length: int) -> bool:
    """Whether every chunk of the layout has a row; for any ranks, of FEW ranks: `rows_here` asks again when it runs."""
    if sharder.ranks.asks:
        return at_hand(length) >= chunks_per_rank(sharder.ranks.layout(length)) * FEW
    return length >= sharder.ranks.least(length)


def sequence_at(sharder: Sharder, x: fx.Node, dims: Sequence[int]) -> Sharded | None:
    """The placement of `x` where `dims` is the one dim that is its sequence, with nothing else folded into it."""
    place = sharder.placements[x]
    if place is None or place.outer * place.inner > 1 or [dim % len(shape_of(x)) for dim in dims] != [place.dim]:
        return None
    return place


def wide_dtype(value: torch.Tensor) -> torch.dtype:
    """What partial sums are added up in: of 16 bits, float32, which also counts tokens without rounding."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def has_argument(node: fx.Node, name: str) -> bool:
    """Whether the schema of an op has an argument of that name."""
    return any(arg.name == name for arg in schema_of(node.target).arguments)


def dims_of(node: fx.Node) -> list[int]:
    """What the op reduces over, from 0; all dims of the first argument where it takes no dim, or was given none."""
    rank, dims = len(shape_of(node.args[0])), named(node, "dim") if has_argument(node, "dim") else None
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))]


def keeps_dims(node: fx.Node) -> bool:
    """Whether reduced dims stay, of size 1."""
    return has_argument(node, "keepdim") and bool(named(node, "keepdim"))


def getitems(node: fx.Node) -> list[fx.Node] | None:
    """The elements of a tuple that are used; None where it is used whole."""
    users = list(node.users)
    return users if all(user.target is operator.getitem for user in users) else None
