"""From a node of a flat ATen graph to the term of one element of it.

`Cone.at(node, index)` climbs the graph: views change the index, pointwise ops become terms, indexing by a tensor puts
one term into the index of another (one rule an op in ringopt/recognize/lift_views.py, lift_pointwise.py). What mixes
elements (cumsum, linear) ends the climb with a Load: allowed as long as no tensor over both queries and keys must be
computed.

Nothing is expanded on the way: [1, 1, q, 1] stays a vector over q, whatever it is broadcast against.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.expr.evaluate import evaluate
from ringopt.expr.simplify import apply, compare, logic, where
from ringopt.expr.terms import INTEGERS, Affine, Load, Term, affine, axes_of, axis, constant, load, loads, number
from ringopt.expr.value_ranges import Interval, bounds
from ringopt.ir.constants import LARGEST, Constants
from ringopt.ir.nodes import is_aten, op_name, shape_of, value_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import is_open, longest
from ringopt.recognize.lift_pointwise import POINTWISE, RULES, pointwise
from ringopt.recognize.lift_views import VIEWS, Index
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

# Nested ops that are followed; a mask that is deeper is no mask but the model.
DEEPEST = 100

# What counts as much larger than a vector over rows: hidden states and tables of pairs do, not two vectors, nor the
# (2w - 1)^2 differences of w^2 rows.
LARGER = 4


class Unreadable(Exception):
    """No term can stand for the node."""

    def __init__(self, sentence: str, node: fx.Node):
        self.refusal = Refusal(sentence, node)
        super().__init__(sentence)


class Cone:
    """Reads one graph; `sizes` gives the length of each axis: what is said of an open one holds for all lengths up to
    `longest`. `rows` and `keys` are the axes that queries and keys are
    counted by; `stops` end the climb with a Load, whatever they are."""

    def __init__(
        self,
        constants: Constants,
        sizes: Mapping[str, int],
        rows: frozenset[str] = frozenset("q"),
        keys: frozenset[str] = frozenset("k"),
        stops: Collection[fx.Node] = frozenset(),
    ):
        self.constants = constants
        self.sizes = sizes
        self.rows, self.keys = rows, keys
        self.stops = stops
        self.measure()
        self.known: dict[fx.Node, Tensor] = {}  # loaded values that no input reaches
        self.found: dict[tuple[fx.Node, Index], Term] = {}
        self.depth = 0

    def measure(self) -> None:
        """How long the axes are at most."""
        self.open = [size for size in self.sizes.values() if is_open(size)]
        self.longest = {name: longest(size) for name, size in self.sizes.items()}
        self.spans = {name: range(size) for name, size in self.longest.items()}
        if "q" in self.sizes:
            self.spans["r"] = self.spans["q"]  # the query's row, of those that a rank holds

    def element(self, node: fx.Node, names: str = "bhqk") -> Term:
        """The element of `node`, whose dims are broadcast from the right to the axes `names`. Raises Unreadable."""
        return self.at(node, self.index(shape_of(node), names))

    def index(self, shape: Sequence[int], names: str) -> Index:
        """The place of an element in a tensor of `shape`; a dim of size 1 is broadcast."""
        own = names[len(names) - len(shape) :]
        return tuple(affine({}, 0) if size == 1 else axis(name) for name, size in zip(own, shape, strict=True))

    def at(self, node: fx.Node, index: Sequence[Term]) -> Term:
        """The element of `node` at coordinates `index`, one term a dim. Raises Unreadable."""
        if 0 in self.longest.values():
            raise Unreadable("there are no elements: a sequence of 0 tokens", node)
        place = tuple(index)
        key = (node, place)
        if key not in self.found:
            self.depth += 1
            try:
                self.found[key] = self.fold(self.pull(node, place))
            finally:
                self.depth -= 1
        return self.found[key]

    def pull(self, node: fx.Node, index: Index) -> Term:
        if node in self.stops:
            return load(node, index, value_of(node).dtype)
        if node.op in ("placeholder", "get_attr") or not is_aten(node) or self.depth > DEEPEST:
            return self.stored(node, index)
        moved = self.view(node, index)
        if moved is not None:
            return self.at(*moved)
        name = op_name(node)
        rule = RULES.get(name)
        if rule is None and (torch.Tag.pointwise in node.target.tags or name in POINTWISE):
            rule = pointwise
        term = rule(self, node, index) if rule is not None else None
        return self.stored(node, index) if term is None or self.reads_more(term, node, index) else term

    def view(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """Where the element of a view, or of a selection, stands in its source; None for every other op."""
        rule = VIEWS.get(op_name(node)) if is_aten(node) else None
        return rule(self, node, index) if rule is not None else None

    # ---- loads -------------------------------------------------------------------------------------------------------
    def stored(self, node: fx.Node, index: Sequence[Term]) -> Term:
        """End of the climb: the element is read from the value of `node` at run time. An input, a parameter or a buffer
        over queries and keys exists anyhow; what the program would have to compute is refused."""
        computed = node.op not in ("placeholder", "get_attr") and node not in self.constants
        if computed and self.is_table(node, index):
            raise Unreadable(
                f"{op_name(node) or node.name} makes a tensor {list(shape_of(node))} over queries and keys from data, "
                "and its elements cannot be followed further",
                node,
            )
        value = self.constants.get(node)
        if value is not None:
            self.known[node] = value
        term = load(node, index, value_of(node).dtype)
        return self.band_from_values(term) or term if value is not None else term

    def band_from_values(self, term: Load) -> Term | None:
        """A known table over queries and keys that has one number in a band around the diagonal and another outside:
        the triangle of ones that many models keep."""
        if (
            len(self.rows) != 1
            or len(self.keys) != 1
            or term.axes != self.rows | self.keys
            or not self.pairs(term.index)
        ):
            return None
        (row,), (key,) = self.rows, self.keys
        if (row, key) != ("q", "k") or self.longest["q"] * self.longest["k"] > LARGEST:
            return None
        with unset_fake_temporarily(), torch.no_grad():
            place = coordinates(["q", "k"], self.longest)
            values, away = evaluate(term, place, self.known), place["k"] - place["q"]
            inside = values == values.flatten()[0]
            if bool(inside.all()):
                return number(values.flatten()[0].item(), term.dtype)
            others, low, high = values[~inside], int(away[inside].min()), int(away[inside].max())
            if not bool((others == others[0]).all()) or not torch.equal(inside, (away >= low) & (away <= high)):
                return None
            offset = apply("sub", [axis("k"), axis("q")], torch.int64)
            band = logic("logical_and", self.fold(compare("ge", offset, low)), self.fold(compare("le", offset, high)))
            return where(band, values.flatten()[0].item(), others[0].item(), term.dtype)

    def is_table(self, node: fx.Node, index: Sequence[Term]) -> bool:
        """Whether `node` holds a number for each pair of a query and a key; tables of relative places hold one for each
        difference."""
        over = [size for size, each in zip(shape_of(node), index, strict=True) if each.axes & (self.rows | self.keys)]
        rows, keys = (math.prod(self.sizes.get(name, 1) for name in names) for names in (self.rows, self.keys))
        return self.pairs(index) and math.prod(over) > LARGER * (rows + keys)

    def pairs(self, index: Sequence[Term]) -> bool:
        return pairs(index, self.rows, self.keys)

    def reads_more(self, term: Term, node: fx.Node, index: Index) -> bool:
        """Whether the sources of `term` are so much larger than `node` that `node` is the better thing to read."""
        sources = {each.source for each in loads(term) if each.source not in self.known}
        if self.pairs(index) or not sources:
            return False
        return sum(math.prod(shape_of(source)) for source in sources) > LARGER * math.prod(shape_of(node))

    # ---- what is known while compiling -------------------------------------------------------------------------------
    def bounds(self, term: Term) -> Interval:
        if not all(map(is_open, self.open)):
            self.measure()  # reading has needed the number of a size, and that has fixed it
        return bounds(term, self.spans, self.known)

    def is_known(self, term: Term) -> bool:
        """Whether no input reaches the term."""
        return all(each.source in self.known for each in loads(term))

    def fold(self, term: Term) -> Term:
        """A condition that always or never holds becomes a constant; a known term not over pairs is computed at every
        place and becomes affine, if it is. So transformers' search for packed documents, cumsum(diff(arange) != 1),
        becomes 0 and vanishes: that proves "causal"."""
        if constant(term) is not None or isinstance(term, Affine):
            return term
        if term.dtype == torch.bool:
            low, high = self.bounds(term)
            if low == high:
                return number(low, torch.bool)
        places = math.prod(len(self.spans[name]) for name in term.axes)
        if (term.axes & self.rows and term.axes & self.keys) or places > LARGEST or not self.is_known(term):
            return term
        return self.affine_from_values(term) or term

    def affine_from_values(self, term: Term) -> Term | None:
        names = sorted(term.axes)
        with unset_fake_temporarily(), torch.no_grad():
            places = coordinates(names, self.longest)
            values = evaluate(term, places, self.known)
            first = values.flatten()[0]
            if bool((values == first).all()):
                return number(first.item(), term.dtype)
            if term.dtype not in INTEGERS:
                return None
            start = int(first)
            steps = {
                name: int(values.select(dim, 1).flatten()[0]) - start if values.shape[dim] > 1 else 0
                for dim, name in enumerate(names)
            }
            line = sum((places[name] * step for name, step in steps.items()), torch.tensor(start))
            return affine(steps, start, term.dtype) if bool((values == line).all()) else None


def pairs(index: Sequence[Term], rows: frozenset[str] = frozenset("q"), keys: frozenset[str] = frozenset("k")) -> bool:
    """Whether queries and keys stand in different dims; table[k - q] is a vector over one."""
    dims = [each for each in index if each.axes & (rows | keys)]
    return len(dims) > 1 and bool(axes_of(dims) & rows) and bool(axes_of(dims) & keys)


def coordinates(names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """All places of each axis, one dim an axis."""
    return {
        name: torch.arange(sizes[name]).view([-1 if other == dim else 1 for other in range(len(names))])
        for dim, name in enumerate(names)
    }
