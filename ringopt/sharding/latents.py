"""What K and V of a site are made of, token by token: the smallest cut through the graph behind them.

    c = norm(linear(x))                                 512 numbers a token   <- cut
    k_rope = rotated(...)                                64                   <- cut
    k, v = split(linear(c)), cat(k, expand(k_rope))   40,960 numbers a token

Walked back from K and V are operators that make a row of the rows of their operands (ringopt/dims/rules.py), and
nothing else. What they read whole, such as weights, are constants; of the values on the way those are cut that have the
fewest numbers a token together (a minimum cut, the one nearest to K and V). What is behind the cut is a body, as that
of a scan is (ringopt/scans/body.py), so that K and V can be made of what travels, on the rank that uses them.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, prod

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.cost.choose import Case, Estimate
from ringopt.cost.simulate import Heads
from ringopt.dims.rule import Rule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import is_aten, is_tensor, named, op_name, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.refusal import Refusal
from ringopt.ir.site import Latents, SiteInfo
from ringopt.ir.symbolic_sizes import at_hand, is_open
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.work import product
from ringopt.report import bytes_text
from ringopt.scans.body import NoBody, to_text, why_no_step
from ringopt.sharding.sharder import on_rows

aten = torch.ops.aten

REACH = 64  # nodes that are walked back over
FILLS = {"empty": 0, "zeros": 0, "ones": 1, "full": None}  # operators that make a tensor of one number
WORTH = 2  # so many times fewer numbers have to travel


@dataclass(frozen=True)
class Made:
    """How rows of a value, sharded as `place`, are made: by `rule`, from rows of its operands that are sharded as
    `wanted`, None for those that are read whole; or of the number `fill`. Without either it is not walked over."""

    place: Sharded
    rule: Rule | None = None
    wanted: Sequence[Sharded | None] = ()
    fill: float | None = None

    def operands(self, node: fx.Node) -> Iterator[tuple[fx.Node, Sharded | None]]:
        return zip(tensor_args(node), self.wanted, strict=True) if self.rule is not None else iter(())


def latents_of(node: fx.Node) -> Latents | Refusal | None:
    """Of a site; None where what K and V are made of is not far less than they are."""
    call = AttentionCall.of(node)
    rows = call.rows[1]
    place = Sharded(2, 1, rows, 1)
    walked = walk([call.k, call.v], place)
    if walked is None or not all(isfinite(numbers_of(x, place)) for x in (call.k, call.v)):
        return None  # sizes are open, so the smallest cut is not known
    cut = smallest_cut(walked, [call.k, call.v], value_of(call.k).dtype)
    numbers = sum(int(numbers_of(x, walked[x].place)) for x in cut)
    whole = sum(at_hand(prod(shape_of(x)) // rows) for x in (call.k, call.v))
    if WORTH * numbers >= whole:
        return None
    less = f"K and V are made of {numbers:,} numbers a token, and are {whole:,}"
    if call.mask_term.nan and any(term is not None for term in call.mask_term.terms):
        return Refusal(f"{less}; they travel all the same, for rows that see no key are NaN", node)
    try:
        consts, body = body_of(walked, cut, call)
    except NoBody as error:
        return Refusal(f"{less}; they travel all the same: {error}", error.refusal.node)
    flops = sum(product(x, SizedCall.of(x, 1, 0, number=at_hand)) for x in between(walked, cut, call))
    return Latents(
        tuple((x, walked[x].place, int(numbers_of(x, walked[x].place))) for x in cut),
        tuple(consts), body, numbers, whole, flops // at_hand(rows),
    )  # fmt: skip


def with_latents(node: fx.Node, info: SiteInfo, case: Case) -> tuple[Case, Latents | None]:
    """The case of a site with what K and V are made of, where that may travel; where not, the site says why."""
    found = latents_of(node) if not info.whole else None
    if isinstance(found, Refusal):
        info.notes.append(found.sentence)
    if not isinstance(found, Latents):
        return case, None
    return replace(case, heads=replace(case.heads, latent=found.numbers, latent_flops=found.flops)), found


# ---- what is made token by token -------------------------------------------------------------------------------------
def walk(made: Sequence[fx.Node], place: Sharded) -> dict[fx.Node, Made] | None:
    """What `made` come from; None where rows of one value are wanted along two dims."""
    found: dict[fx.Node, Made] = {}
    waiting = deque((x, place) for x in made)
    while waiting:
        node, at = waiting.popleft()
        if node in found:
            if found[node].place != at:
                return None
            continue
        found[node] = how_made(node, at) if len(found) < REACH else Made(at)
        waiting.extend((x, of) for x, of in found[node].operands(node) if of is not None)
    return found


def how_made(node: fx.Node, place: Sharded) -> Made:
    """Token by token, or by what is not walked over."""
    if (fill := filled_with(node)) is not None and isfinite(numbers_of(node, place)):
        return Made(place, fill=fill)
    ours = node.target is operator.getitem or (is_aten(node) and not why_no_step(node.target))
    rule = rule_of(node) if ours else None
    operands = list(tensor_args(node))
    wanted = rule.pull(place) if rule is not None and len(rule.operands) == len(operands) else None
    if rule is None or wanted is None:
        return Made(place)
    if any(of is not None and rule.push(i, of) != place for i, of in enumerate(wanted)):
        return Made(place)
    return Made(place, rule, wanted)


def filled_with(node: fx.Node) -> float | None:
    """The number that a new tensor has everywhere; of an empty one, any."""
    name = op_name(node).removeprefix("new_")
    if not is_aten(node) or name not in FILLS:
        return None
    fill = named(node, "fill_value") if name == "full" else FILLS[name]
    return fill if isinstance(fill, (bool, int, float)) else None


def numbers_of(node: fx.Node, place: Sharded) -> float:
    """Of one token; infinite where a value cannot be packed by tokens."""
    sizes = shape_of(node)
    if not is_tensor(node) or place.outer != 1 or place.inner != 1:
        return inf
    others = [size for dim, size in enumerate(sizes) if dim != place.dim]
    return inf if any(map(is_open, others)) else prod(others)


# ---- the cut ---------------------------------------------------------------------------------------------------------
def smallest_cut(walked: Mapping[fx.Node, Made], made: Sequence[fx.Node], dtype: torch.dtype) -> list[fx.Node]:
    """Values of `dtype` with the fewest numbers a token together through which all that `made` come from passes; of
    several such sets the one nearest to them. In the order in which they were walked to."""
    # A value is an edge from (value, 0) to (value, 1); flow (Edmonds and Karp) goes from what is not walked over.
    room: dict[object, dict[object, float]] = {"from": {}, "to": {}}

    def edge(one: object, other: object, size: float) -> None:
        room.setdefault(one, {})[other] = room.get(one, {}).get(other, 0) + size
        room.setdefault(other, {}).setdefault(one, 0)

    for node, how in walked.items():
        fits = is_tensor(node) and value_of(node).dtype == dtype
        edge((node, 0), (node, 1), numbers_of(node, how.place) if fits else inf)
        sources = [x for x, of in how.operands(node) if of is not None]
        for x in sources:
            edge((x, 1), (node, 0), inf)
        if not sources and how.fill is None:
            edge("from", (node, 0), inf)
    for node in made:
        edge((node, 1), "to", inf)
    while path := augmenting(room):
        least = min(room[one][other] for one, other in path)
        for one, other in path:
            room[one][other] -= least
            room[other][one] += least
    behind, waiting = {"to"}, deque[object](["to"])
    while waiting:
        here = waiting.popleft()
        for other in room[here]:
            if room[other][here] > 0 and other not in behind:
                behind.add(other)  # type: ignore[arg-type]
                waiting.append(other)
    return [node for node in walked if (node, 1) in behind and (node, 0) not in behind]  # type: ignore[comparison-overlap]


def augmenting(room: Mapping[object, Mapping[object, float]]) -> list[tuple[object, object]]:
    """A shortest path along which more can flow; [] where there is none."""
    came: dict[object, object] = {"from": None}
    waiting = deque[object](["from"])
    while waiting and "to" not in came:
        here = waiting.popleft()
        for other, size in room[here].items():
            if size > 0 and other not in came:
                came[other] = here
                waiting.append(other)
    path, here = list[tuple[object, object]](), "to"
    while here in came and here != "from":
        path.append((came[here], here))
        here = came[here]
    return path[::-1]


def between(walked: Mapping[fx.Node, Made], cut: Sequence[fx.Node], call: AttentionCall) -> list[fx.Node]:
    """The nodes of the body, each behind its operands."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in found or node in cut:
            return
        for x, of in walked[node].operands(node):
            if of is not None:
                visit(x)
        found[node] = None

    visit(call.k)
    visit(call.v)
    return list(found)


# ---- the body --------------------------------------------------------------------------------------------------------
def body_of(walked: Mapping[fx.Node, Made], cut: Sequence[fx.Node], call: AttentionCall) -> tuple[list[fx.Node], str]:
    """The constants, and the text of (z [rows, L], *constants) -> K, V, where a row of z is one of each of `cut`.
    Raises NoBody."""
    nodes = between(walked, cut, call)
    whole = (x for node in nodes for x, of in walked[node].operands(node) if of is None)
    consts = list(dict.fromkeys(whole))
    graph = fx.Graph()
    z = graph.placeholder("z")
    fixed = {x: graph.placeholder(f"const{i}") for i, x in enumerate(consts)}
    values: dict[fx.Node, fx.Node] = {}
    first = 0
    for x in cut:
        values[x] = unpacked(graph, z, first, x, walked[x].place)
        first += int(numbers_of(x, walked[x].place))
    for node in nodes:
        how = walked[node]
        if how.fill is not None:
            values[node] = filled(graph, z, node, how)
            continue
        assert how.rule is not None
        places, tensors = iter(how.wanted), set(tensor_args(node))

        def operand(arg: fx.Node, places: Iterator[Sharded | None] = places, of: set[fx.Node] = tensors) -> fx.Node:
            if arg not in of:
                raise NoBody(f"{arg} is a number that is known only when the program runs", arg)
            return fixed[arg] if next(places) is None else values[arg]

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        values[node] = graph.call_function(*on_rows(node, how.rule, how.place, args, kwargs))
    graph.output((values[call.k], values[call.v]))
    return consts, to_text(fx.GraphModule(torch.nn.Module(), graph), 0, 1, len(consts))


def rows_first(x: fx.Node, place: Sharded) -> list[int]:
    """The dims of a value, that of its rows first."""
    return [place.dim, *(dim for dim in range(len(shape_of(x))) if dim != place.dim)]


def unpacked(graph: fx.Graph, z: fx.Node, first: int, x: fx.Node, place: Sharded) -> fx.Node:
    """Rows of `x` from those of z, of whose columns they begin at `first`."""
    order, sizes = rows_first(x, place), shape_of(x)
    part = graph.call_function(aten.slice.Tensor, (z, 1, first, first + int(numbers_of(x, place))))
    rows = graph.call_function(aten.reshape.default, (part, [-1, *(sizes[dim] for dim in order[1:])]))
    back = [order.index(dim) for dim in range(len(order))]
    return graph.call_function(aten.permute.default, (rows, back))


def filled(graph: fx.Graph, z: fx.Node, x: fx.Node, how: Made) -> fx.Node:
    """As many rows as z has, of one number."""
    sizes = [-1 if dim == how.place.dim else size for dim, size in enumerate(shape_of(x))]
    column = graph.call_function(aten.slice.Tensor, (z, 1, 0, 1))
    narrow = graph.call_function(aten.reshape.default, (column, [min(size, 1) for size in sizes]))
    wide = graph.call_function(aten.expand.default, (narrow, sizes))
    return graph.call_function(aten.full_like.default, (wide, how.fill), {"dtype": value_of(x).dtype})


def note_of_latents(latents: Latents, heads: Heads, found: Estimate) -> str:
    """For the report: whether what K and V are made of travels in their place."""
    few, many = bytes_text(latents.numbers * heads.itemsize), bytes_text(latents.whole * heads.itemsize)
    if found.latent:
        less = f"{latents.whole / latents.numbers:.3g} times less"
        return f"sends latents: {few} a token instead of {many}, {less}; K and V are made of them where they are used"
    why = "keys do not travel alone" if not found.carries else "to make K and V of them takes longer, predicted"
    return f"K and V travel, {many} a token, and not the {few} that they are made of: {why}"
