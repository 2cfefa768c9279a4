"""Random operators as draws by position: one form an operator (passes/draw_by_position.py).

A form `(draw) -> node` emits what stands in the place of `draw.node`, with the dtype semantics of torch's operator; or
None where it has none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.calls import OpCall
from ringopt.ir.nodes import arguments_of, emit, named, op_name, origin, shape_of, value_of
from ringopt.ir.symbolic_sizes import behind_inputs, formula, is_open, same
from ringopt.ops import operators

aten = torch.ops.aten

REGION = ("recompute", "ac_graph_id")  # of a checkpoint, in which what all draws read does not lie


class Seeds:
    """The seeds of a graph, one node a device; and the positions along its dims, one node each."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.last: fx.Node | None = None  # of those made here, which stand before all draws
        self.of: dict[torch.device, fx.Node] = {}
        self.counts: dict[fx.Node, int] = {}
        self.positions: dict[Any, fx.Node] = {}

    def before_all_draws(self) -> AbstractContextManager[Any]:
        """Where the next node is inserted that all draws may read."""
        last, graph = self.last, self.graph
        place: AbstractContextManager[Any]
        place = graph.inserting_before(behind_inputs(graph)) if last is None else graph.inserting_after(last)
        return place

    def adopt(self, node: fx.Node) -> None:
        """A node of seeds of its own, as attention draws one."""
        for user in list(node.users):
            user.args = (self.shared(node), 0, self.next(node))
        self.graph.erase_node(node)

    def draw(self, like: fx.Node) -> fx.Node:
        """int64, no dims: a stream of its own."""
        return emit(self.graph, aten.select.int, (self.shared(like), 0, self.next(like)), like)

    def next(self, like: fx.Node) -> int:
        """The number of the next draw on the device of `like`."""
        number = self.counts.setdefault(self.shared(like), 0)
        self.counts[self.shared(like)] += 1
        return number

    def shared(self, like: fx.Node) -> fx.Node:
        """The seeds of all draws on the device of `like`."""
        device = _device_of(like)
        if device not in self.of:
            with self.before_all_draws():
                node = self.last = OpCall.to(operators.seeds.default, count=0, device=device).insert(self.graph)
            node.meta = _outside(like)
            with _mode_of(like):  # more than are read, for there may be any number
                node.meta["val"] = torch.empty(2**20, dtype=torch.int64, device=device)
            self.of[device] = node
        return self.of[device]

    def finish(self) -> None:
        """As many seeds are drawn as there are draws."""
        for node, count in self.counts.items():
            OpCall.of(node).replace(count=count).write(node)
            node.meta["val"] = value_of(node)[:count].clone()

    def along(self, size: Any, behind: int, like: fx.Node) -> fx.Node:
        """[size, 1, ...]: the positions along a dim with `behind` dims behind it."""
        key = (formula(size), behind, _device_of(like))
        if key not in self.positions:
            device = {"device": _device_of(like)}
            with self.before_all_draws():
                node = self.last = emit(self.graph, aten.arange.default, (size,), like, device)
                node.meta = {**_outside(like), "val": value_of(node)}
            if behind:
                with self.graph.inserting_after(node):
                    node = self.last = emit(self.graph, aten.reshape.default, (node, [-1] + [1] * behind), node)
            self.positions[key] = node
        return self.positions[key]


class Draw:
    """One random operator. `without_gradient` are operands that autograd gives a gradient of zeros."""

    def __init__(self, graph: fx.Graph, node: fx.Node, seeds: Seeds, carries: dict[fx.Node, bool]):
        self.graph, self.node, self.seeds, self.carries = graph, node, seeds, carries
        self.value, self.mode = _first_value(node), _mode_of(node)
        self.without_gradient: list[fx.Node] = []

    def __getitem__(self, name: str) -> Any:
        """An argument, by its name in the schema."""
        return named(self.node, name)

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        return emit(self.graph, target, args, self.node)

    def numbers(self, kind: str, *numbers: float, dtype: torch.dtype, shape: Sequence[Any] | None = None) -> fx.Node:
        """Drawn for each element of `shape`, by default that of the operator's result, and laid out in memory as it."""
        sizes = shape_of(self.node) if shape is None else shape
        strides = self.value.stride()
        order = list(range(len(sizes)))
        if shape is None and not self.value.is_contiguous():
            order.sort(key=lambda dim: -strides[dim])
        logical, count = [1] * len(sizes), 1
        for dim in reversed(range(len(sizes))):
            logical[dim], count = count, count * sizes[dim]
        places = [self.places(dim, sizes[dim], len(order) - 1 - at) for at, dim in enumerate(order)]
        seed, by = self.seeds.draw(self.node), [logical[dim] for dim in order]
        stream: dict[str, Any] = {"seed": seed, "places": places, "strides": by, "count": count}
        drawn_as: dict[str, Any] = {"kind": kind, "numbers": list(map(float, numbers)), "dtype": dtype}
        drawn = OpCall.to(operators.draw.default, **stream, **drawn_as).emit(self.graph, self.node)
        if order == sorted(order):
            return drawn
        return self(aten.permute.default, drawn, [order.index(dim) for dim in range(len(order))])

    def places(self, dim: int, size: Any, behind: int) -> fx.Node:
        """The positions along a dim; of rows that were sorted, those that they had before."""
        order = order_of_rows(self.node) if dim == 0 else None
        if order is None or not same(shape_of(order)[0], size):
            return self.seeds.along(size, behind, self.node)
        before = self(aten.index.Tensor, self.seeds.along(size, 0, self.node), [order])
        return self(aten.reshape.default, before, [-1] + [1] * behind) if behind else before

    def cast(self, x: fx.Node) -> fx.Node:
        """To the dtype of the operator's result."""
        kind = self.value.dtype
        return x if value_of(x).dtype == kind else self(aten.to.dtype, x, kind)


def order_of_rows(node: fx.Node) -> fx.Node | None:
    """The order in which a sort has put the rows that `node` draws for, as of tokens for experts: ranks that sort their
    own rows draw for them what one process does. It is a permutation, so any order serves for numbers that are
    independent; the nearest one that rows of as many were picked by is taken."""
    sorts = list(node.graph.find_nodes(op="call_function", target=aten.sort.default))
    sorts += node.graph.find_nodes(op="call_function", target=aten.sort.stable)
    counts = {formula(shape_of(sort)[0]) for sort in sorts if len(shape_of(sort)) == 1}
    if not counts or not shape_of(node) or formula(shape_of(node)[0]) not in counts:
        return None
    todo, seen = list(node.all_input_nodes), set[fx.Node]()
    for each in todo:
        found = _picked_by(each)
        if found is not None:
            return found
        like = [x for x in each.all_input_nodes if x not in seen and _has_rows_of(x, node)]
        todo += like
        seen.update(like)
    return None


def _has_rows_of(x: fx.Node, node: fx.Node) -> bool:
    value = value_of(x)
    return isinstance(value, Tensor) and value.dim() > 0 and same(value.shape[0], shape_of(node)[0])


def _picked_by(node: fx.Node) -> fx.Node | None:
    """The second result of the sort by which `node` picks rows, divided or not."""
    if op_name(node) != "index" or len(named(node, "indices")) != 1:
        return None
    (at,) = named(node, "indices")
    while op_name(at) == "floor_divide":
        at = named(at, "self")
    is_order = at.target is operator.getitem and op_name(at.args[0]) == "sort" and at.args[1] == 1
    return at if is_order and value_of(at).dim() == 1 else None


def is_plain(node: fx.Node) -> bool:
    """Whether it draws by the default generator, and real numbers."""
    value = _first_value(node)
    real = value.layout is torch.strided and not value.is_complex()
    return real and arguments_of(node).get("generator") is None


def _first_value(node: fx.Node) -> Tensor:
    value = value_of(node)
    found: Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return found


def _device_of(node: fx.Node) -> torch.device:
    return _first_value(node).device


def _mode_of(node: fx.Node) -> Any:
    return _first_value(node).fake_mode  # type: ignore[attr-defined]


def _outside(like: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in origin(like).items() if key not in REGION}


# ---- dropout ---------------------------------------------------------------------------------------------------------
def dropped(draw: Draw, feature: bool = False, *factor: float, dtype: torch.dtype = torch.bool) -> fx.Node:
    """What is kept, or its `factor`, and 0; of whole features, dims behind the second are dropped alike."""
    shape = shape_of(draw.node)
    sizes = [size if dim < 2 else 1 for dim, size in enumerate(shape)] if feature else None
    return draw.numbers("kept", draw["p"], *factor, dtype=dtype, shape=sizes)


def dropout(draw: Draw, feature: bool = False) -> fx.Node | None:
    """x * kept * (1 / (1 - p)), to the bit as native_dropout has it; in one product where 16 bits do not round the
    factor. What is kept has the dtype of x: a product with bool is slower than to draw."""
    x, p, dtype = draw["input"], draw["p"], draw.value.dtype
    if p == 1:
        return draw(aten.mul.Scalar, x, 0)
    if dtype in (torch.float32, torch.float64):
        return draw(aten.mul.Tensor, x, dropped(draw, feature, 1 / (1 - p), dtype=dtype))
    return draw(aten.mul.Scalar, draw(aten.mul.Tensor, x, dropped(draw, feature, dtype=dtype)), 1 / (1 - p))


def native_dropout(draw: Draw) -> tuple[fx.Node, fx.Node] | None:
    """The result and what was kept."""
    if any(user.target is not operator.getitem for user in draw.node.users):
        return None
    x, p, kept = draw["input"], draw["p"], dropped(draw)
    made = draw(aten.mul.Scalar, draw(aten.mul.Tensor, x, kept), 1 / (1 - p) if p < 1 else 0)
    return made, kept


ALPHA = 1.7580993408473766  # of SELU: minus its value far to the left


def alpha_dropout(draw: Draw, feature: bool = False) -> fx.Node | None:
    """Dropped values are -ALPHA; then mean and variance are restored (Klambauer et al. 2017)."""
    x, p = draw["input"], draw["p"]
    if p == 1:
        return draw(aten.mul.Scalar, x, 0)
    a = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    kept = draw(aten.to.dtype, dropped(draw, feature), draw.value.dtype)
    shift = draw(aten.add.Scalar, draw(aten.mul.Scalar, draw(aten.sub.Scalar, kept, 1), ALPHA * a), ALPHA * a * p)
    return draw(aten.add.Tensor, draw(aten.mul.Tensor, x, draw(aten.mul.Scalar, kept, a)), shift)


# ---- numbers of a distribution ---------------------------------------------------------------------------------------
def distribution(kind: str, *names: str, given: Sequence[float] = ()) -> Callable[[Draw], fx.Node | None]:
    """Whose parameters are arguments of the operator."""

    def form(draw: Draw) -> fx.Node | None:
        numbers = [draw[name] for name in names] or given
        real = draw.value.is_floating_point() or kind == "geometric"
        if not real or not all(isinstance(number, (int, float)) for number in numbers):
            return None
        return draw.numbers(kind, *numbers, dtype=draw.value.dtype)

    return form


def bernoulli(draw: Draw) -> fx.Node | None:
    """With the probability that is given as a number, or by element as a tensor."""
    given = arguments_of(draw.node)
    p = given["p"] if "p" in given else given["self"]
    if not isinstance(p, fx.Node):
        return draw.cast(draw.numbers("kept", 1 - p, dtype=torch.bool))
    if not value_of(p).is_floating_point():
        return None
    draw.without_gradient += [p] if draw.carries[p] else []
    wide = torch.float64 if value_of(p).dtype == torch.float64 else torch.float32
    below = draw(aten.lt.Tensor, draw.numbers("uniform", 0, 1, dtype=wide), draw(aten.detach.default, p))
    return draw(aten.to.dtype, below, draw.value.dtype)


def integers(low: str, high: str) -> Callable[[Draw], fx.Node | None]:
    """From `low`, which may be no argument, to below `high`."""

    def form(draw: Draw) -> fx.Node | None:
        given = arguments_of(draw.node)
        first, last = given.get(low, 0), given.get(high)
        if not isinstance(first, int) or not isinstance(last, int) or is_open(last) or not 0 < last - first < 2**62:
            return None
        among = draw(aten.remainder.Scalar, draw.numbers("whole", dtype=torch.int64), last - first)
        return draw.cast(draw(aten.add.Scalar, among, first) if first else among)

    return form


def normal(draw: Draw) -> fx.Node | None:
    """With mean and deviation as tensors that learn nothing, or numbers."""
    mean, deviation = draw["mean"], draw["std"]
    if any(isinstance(x, fx.Node) and draw.carries[x] for x in (mean, deviation)):
        return None
    drawn = draw.numbers("normal", 0, 1, dtype=draw.value.dtype)
    times = aten.mul.Tensor if isinstance(deviation, fx.Node) else aten.mul.Scalar
    plus = aten.add.Tensor if isinstance(mean, fx.Node) else aten.add.Scalar
    return draw.cast(draw(plus, draw(times, drawn, deviation), mean))


def rrelu(draw: Draw) -> fx.Node | None:
    """Values that are not above 0 are multiplied with random numbers."""
    x = draw["self"]
    slope = draw.numbers("uniform", draw["lower"], draw["upper"], dtype=draw.value.dtype)
    return draw(aten.where.self, draw(aten.gt.Scalar, x, 0), x, draw(aten.mul.Tensor, x, slope))


Form = Callable[[Draw], fx.Node | tuple[fx.Node, ...] | None]

FORMS: dict[str, Form] = {
    "dropout": dropout,
    "feature_dropout": lambda draw: dropout(draw, feature=True),
    "alpha_dropout": alpha_dropout,
    "feature_alpha_dropout": lambda draw: alpha_dropout(draw, feature=True),
    "native_dropout": native_dropout,
    **dict.fromkeys(("rand", "rand_like"), distribution("uniform", given=(0, 1))),
    **dict.fromkeys(("randn", "randn_like"), distribution("normal", given=(0, 1))),
    **dict.fromkeys(("randint", "randint_like"), integers("low", "high")),
    "bernoulli": bernoulli,
    "uniform": distribution("uniform", "from", "to"),
    "normal_functional": distribution("normal", "mean", "std"),
    "log_normal": distribution("log_normal", "mean", "std"),
    "cauchy": distribution("cauchy", "median", "sigma"),
    "exponential": distribution("exponential", "lambd"),
    "geometric": distribution("geometric", "p"),
    "normal": normal,
    "rrelu": rrelu,
}
