"""What the rules that lift an element of an op's output ask of whoever follows the graph (lift.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.fx as fx

from ringopt.expr.terms import Term
from ringopt.expr.value_ranges import Interval


class ElementReader(Protocol):
    """What the rules of lift_pointwise.py and lift_views.py use of a Cone (lift.py)."""

    def at(self, node: fx.Node, index: Sequence[Term]) -> Term:
        """The element of `node` at `index`."""
        ...

    def stored(self, node: fx.Node, index: Sequence[Term]) -> Term:
        """The element as it is kept in a tensor."""
        ...

    def bounds(self, term: Term) -> Interval:
        """The least and the most that `term` can be."""
        ...

    def fold(self, term: Term) -> Term:
        """`term`, or the constant that it is."""
        ...
