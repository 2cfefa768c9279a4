"""What two graphs differ in, as data: nodes, their places, and what they mean.

    - %y = aten::sdpa(%q, %k, %v)      replaced      + %y = ringopt::ring_attention(%q_rows, ...)
      aspects: op, shape f32[1, 2, 64, 8] -> f32[1, 2, 32, 8], placement replicated -> S(2), bytes sent 0 -> 4096, ...

Nothing here prints or reads torch: `ringopt/compare/` makes the views of real graphs, `tools/` shows a diff.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any, Literal

from ringopt.compare.align import PARTED, Alignment, Item, align
from ringopt.compare.node_values import NodeError
from ringopt.errors import ProgramError
from ringopt.output.printable import printable

Kind = Literal["same", "resized", "rerouted", "changed", "replaced", "removed", "added"]
KINDS: dict[Kind, str] = {
    "same": "nothing differs",
    "resized": "only shape, placement, bytes or FLOPs differ",
    "rerouted": "the same operator reads other values",
    "changed": "an argument, or the value of a constant, differs",
    "replaced": "another operator stands in its place",
    "removed": "only before",
    "added": "only after",
}
SCHEMA_VERSION = 3
SHOWN = 12  # attentions in a notebook


@dataclass(frozen=True)
class SiteView:
    """One attention site of one side. `mask` is a picture in blocks, one string of ".", "/", "#" and "?" (nothing,
    some, all of the block is seen, or tensors decide) a row of blocks; empty where sizes are open; `ranks` and `steps`
    say who computes each block, and when (ringopt.output.drawn.MaskPicture)."""

    pattern: str
    strategy: str
    layout: str
    kernel: str
    reason: str
    mask: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeView:
    """One node of one side.

    text        the node as one line: `%y = linear(%x, %weight)`
    arguments   as text, with % for every value read; of an input, what the program calls it
    inputs      names of the values read, one for each %
    source      `file:line  code`, "" where the graph does not tell
    shape       such as f32[1, 10, 4]
    placement   "replicated", "S(1)", "local" (each rank its own, such as a part of a sum), or "?" where the graph does
                not tell
    bytes_sent  by this rank, forward; None where it is not known (ranks or sizes are symbolic)
    flops       of products, on this rank; None likewise
    result_bytes, device   of what it gives; None and "" where that is not known
    path        `folder/file:line`, as the trace of the graph has it; of `source`, which is shown
    """

    name: str
    op: str
    text: str
    arguments: str
    inputs: tuple[str, ...] = ()
    module: str = ""
    source: str = ""
    shape: str = ""
    placement: str = "replicated"
    bytes_sent: int | None = 0
    flops: int | None = 0
    site: SiteView | None = None
    result_bytes: int | None = 0
    device: str = ""
    path: str = ""


@dataclass(frozen=True)
class Aspect:
    """One thing that differs."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Change:
    """One node, or two that are each other's counterparts. `error`: how far the value after is from that before, where
    both programs were run on the same inputs; `gradient`: likewise its gradient."""

    kind: Kind
    before: NodeView | None
    after: NodeView | None
    aspects: tuple[Aspect, ...] = ()
    error: NodeError | None = None
    gradient: NodeError | None = None

    @property
    def node(self) -> NodeView:
        node = self.after or self.before
        assert node is not None
        return node

    @property
    def is_site(self) -> bool:
        return any(view is not None and view.site is not None for view in (self.before, self.after))


@dataclass(frozen=True)
class GraphTotals:
    """Sums over one graph; None where the part of some node is not known."""

    nodes: int
    sites: int
    bytes_sent: int | None
    flops: int | None

    @classmethod
    def of(cls, views: Sequence[NodeView]) -> GraphTotals:
        sent, flops = [view.bytes_sent for view in views], [view.flops for view in views]
        return cls(len(views), sum(view.site is not None for view in views), total(sent), total(flops))


def total(parts: Sequence[int | None]) -> int | None:
    """The sum of the parts, None where one is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


@dataclass(frozen=True, repr=False)
class GraphDiff:
    """`changes` has every node of both sides, in the order of `after`, removed ones where they stood; `overlays` has
    numbers of others, by the names of nodes; `no_gradients` says why none were compared where values were."""

    changes: tuple[Change, ...]
    before: GraphTotals
    after: GraphTotals
    overlays: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    no_gradients: str = ""

    @property
    def same(self) -> bool:
        """Whether neither nodes differ, nor values or gradients by more than their dtypes allow."""
        bad = self.first_bad or self.first_bad_gradient
        return bad is None and all(change.kind == "same" for change in self.changes)

    @property
    def first_bad(self) -> Change | None:
        """The first node, in order of computation, whose value differs by more than its dtype allows; None also where
        nothing was run (`diff(..., inputs=...)` runs both)."""
        return next((change for change in self.compared if change.error is not None and change.error.bad), None)

    @property
    def first_bad_gradient(self) -> Change | None:
        """The first node, in the order of the backward, whose gradient differs by more than its dtype allows."""
        return next(
            (change for change in self.changes[::-1] if change.gradient is not None and change.gradient.bad), None
        )

    @property
    def compared(self) -> tuple[Change, ...]:
        """The nodes whose values were compared, in order of computation."""
        return tuple(change for change in self.changes if change.error is not None)

    def overlay(self, name: str, values: Mapping[Any, float]) -> GraphDiff:
        """The diff with numbers of your own on its nodes: `values` by node, or by the name of one, after or before.
        Pages colour nodes by them, and JSON holds them. Raises ProgramError for a node that is on neither side."""
        known = {view.name for change in self.changes for view in (change.before, change.after) if view is not None}
        given = {str(getattr(node, "name", node)): float(value) for node, value in values.items()}
        if unknown := [node for node in given if node not in known]:
            shown = ", ".join(unknown[:3])
            raise ProgramError(f"overlay {name!r}: no node {shown} on either side; nodes are those of diff.changes")
        return replace(self, overlays={**self.overlays, name: given})

    @property
    def counts(self) -> dict[Kind, int]:
        found = Counter(change.kind for change in self.changes)
        return {kind: found[kind] for kind in KINDS}

    @property
    def sites(self) -> tuple[Change, ...]:
        """The attention sites of either side."""
        return tuple(change for change in self.changes if change.is_site)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, as ringopt/compare/diff.schema.json says: all fields of Change, NodeView, SiteView, Aspect and
        NodeError under their names. `changes` has no "same" nodes but sites, and those whose values differ."""
        shown = [change for change in self.changes if change.kind != "same" or change.is_site or differs(change)]
        first, backwards = self.first_bad, self.first_bad_gradient
        return {
            "schema": SCHEMA_VERSION,
            "same": self.same,
            "counts": self.counts,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "compared": len(self.compared),
            "first_bad": first.node.name if first is not None else None,
            "gradients_compared": sum(change.gradient is not None for change in self.changes),
            "first_bad_gradient": backwards.node.name if backwards is not None else None,
            "no_gradients": self.no_gradients,
            "overlays": {name: {node: finite(x) for node, x in of.items()} for name, of in self.overlays.items()},
            "changes": [as_dict(change) for change in shown],
        }

    def __repr__(self) -> str:
        return f"<ringopt.GraphDiff: {self}>"

    def __str__(self) -> str:
        return f"{nodes_text(self)}; {values_text(self)}" if self.compared else nodes_text(self)

    def _repr_html_(self) -> str:
        """For notebooks: how many nodes of each kind, and the first attentions. `ringopt diff --html` has all."""
        kinds = [(kind, f"{number:,}", KINDS[kind]) for kind, number in self.counts.items() if number]
        sites = [(change.node.module or "-", _site(change.before), _site(change.after)) for change in self.sites]
        shown = _table(("nodes", "number", ""), kinds) + _table(("attention", "before", "after"), sites[:SHOWN])
        more = f"<p>and {len(sites) - SHOWN:,} more</p>" if len(sites) > SHOWN else ""
        return f"<p>{escape(printable(str(self)))}</p>{shown}{more}"


def nodes_text(diff: GraphDiff) -> str:
    """How many nodes there are of each kind."""
    counted = ", ".join(f"{number} {kind}" for kind, number in diff.counts.items() if number)
    return f"{diff.before.nodes} nodes before, {diff.after.nodes} after: {counted or 'nothing'}"


def values_text(diff: GraphDiff) -> str:
    """How many values and gradients were compared, and how many differ."""
    gradients = [change.gradient for change in diff.changes if change.gradient is not None]
    values = _compared_text(
        "value", [change.error for change in diff.compared if change.error is not None], diff.first_bad
    )
    if not gradients:
        return values + (f"; no gradients: {diff.no_gradients}" if diff.no_gradients else "")
    return f"{values}; {_compared_text('gradient', gradients, diff.first_bad_gradient)}"


def _compared_text(what: str, errors: Sequence[NodeError], first: Change | None) -> str:
    which = (
        f"{sum(x.bad for x in errors)} differ, the first %{first.node.name}" if first is not None else "none differs"
    )
    return f"of {len(errors)} {what}s compared {which}"


def as_dict(change: Change) -> dict[str, Any]:
    """For JSON, which has no infinity."""
    found = asdict(change)
    for name, error in (("error", change.error), ("gradient", change.gradient)):
        if error is not None:
            found[name] = {**{part: finite(value) for part, value in asdict(error).items()}, "bad": error.bad}
    return found


def finite(value: float) -> float | str:
    """A number for JSON, or what it is called."""
    return value if math.isfinite(value) else str(value)


def differs(change: Change) -> bool:
    """Whether its value or its gradient was compared, and is another."""
    return any(error is not None and error.largest != 0 for error in (change.error, change.gradient))


def with_errors(
    diff: GraphDiff, errors: Mapping[str, NodeError], gradients: Mapping[str, NodeError] | None = None
) -> GraphDiff:
    """Of values, and of gradients, by the names of nodes after."""
    of = (errors, gradients or {})
    found = (replace(one, error=of[0].get(one.after.name), gradient=of[1].get(one.after.name)) if one.after else one
             for one in diff.changes)  # fmt: skip
    return replace(diff, changes=tuple(found))


def _site(view: NodeView | None) -> str:
    if view is None or view.site is None:
        return "" if view is None else view.op
    return ", ".join(part for part in (view.site.pattern, view.site.strategy, view.site.layout) if part)


def _table(head: Iterable[str], rows: Sequence[Iterable[str]]) -> str:
    if not rows:
        return ""
    cells = ["".join(f"<th>{name}</th>" for name in head)]
    cells += ["".join(f"<td>{escape(printable(cell))}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def diff_views(before: Sequence[NodeView], after: Sequence[NodeView]) -> GraphDiff:
    """Both in topological order, names unique on each side."""
    found = align(before, after)
    views = {view.name: view for view in before}, {view.name: view for view in after}
    origin = {other: name for name, other in (*found.pairs.items(), *found.replaced.items())}
    changes: list[tuple[tuple[int, int, int], Change]] = []
    place = {view.name: number for number, view in enumerate(after)}
    for number, view in enumerate(after):
        one = views[0].get(origin.get(view.name, ""))
        changes.append(((number, 1, 0), change_of(one, view, found)))
    reached = 0
    for number, view in enumerate(before):
        other = found.counterpart(view.name)
        if other is None:
            changes.append(((reached, 2, number), Change("removed", view, None)))
        else:
            reached = place[other]
    ordered = tuple(change for _key, change in sorted(changes, key=lambda entry: entry[0]))
    return GraphDiff(ordered, GraphTotals.of(before), GraphTotals.of(after))


def with_values(diff: GraphDiff, differ: Callable[[str, str], bool]) -> GraphDiff:
    """`diff`, with inputs and constants whose values differ: `differ` is asked for the names of two counterparts."""
    changes = []
    for change in diff.changes:
        one, other = change.before, change.after
        held = other is not None and other.op in ("input", "constant")
        if one is not None and other is not None and held and differ(one.name, other.name):
            kind: Kind = "changed" if change.kind in ("same", "resized") else change.kind
            change = replace(change, kind=kind, aspects=(*change.aspects, Aspect("values", "stored", "other values")))
        changes.append(change)
    return replace(diff, changes=tuple(changes))


def change_of(before: NodeView | None, after: NodeView, found: Alignment) -> Change:
    """What differs between a node and its counterpart, and the strongest word for it: replaced, changed, rerouted,
    resized, or same."""
    if before is None:
        return Change("added", None, after)
    routes = reroutes(before, after, found)
    pairs = [("op", before.op, after.op), ("arguments", before.arguments, after.arguments)]
    content = [Aspect(*pair) for pair in pairs if pair[1] != pair[2]]
    size = _size_aspects(before, after)
    kind: Kind = "resized" if size else "same"
    if before.op != after.op:
        kind = "replaced"
    elif content:
        kind = "changed"
    elif routes:
        kind = "rerouted"
    return Change(kind, before, after, (*content, *routes, *size))


def reroutes(before: NodeView, after: NodeView, found: Alignment) -> list[Aspect]:
    """Operands that are not each other's counterparts, with the placement of each: what changed on an edge."""
    if len(before.inputs) != len(after.inputs):
        return [Aspect("inputs", _placed(before.inputs, found.before.items), _placed(after.inputs, found.after.items))]
    changed = []
    for number, (one, other) in enumerate(zip(before.inputs, after.inputs, strict=True)):
        if found.counterpart(one) not in (other, made_by(other, found)):
            name = f"input {number}" if len(before.inputs) > 1 else "input"
            changed.append(Aspect(name, _placed([one], found.before.items), _placed([other], found.after.items)))
    return changed


def made_by(name: str, found: Alignment) -> str:
    """The operator with several results of which `name` takes one."""
    item = found.after.items[name]
    source = item.inputs[0] if item.op == "getitem" else name
    return source if found.after.items[source].op in PARTED else name


def _placed(names: Sequence[str], views: Mapping[str, Item]) -> str:
    placements = [views[name].placement for name in names]
    return ", ".join(f"%{name} {place}".strip() for name, place in zip(names, placements, strict=True))


def _size_aspects(before: NodeView, after: NodeView) -> list[Aspect]:
    pairs = (
        ("shape", before.shape, after.shape),
        ("placement", before.placement, after.placement),
        ("bytes sent", _known_or_question_mark(before.bytes_sent), _known_or_question_mark(after.bytes_sent)),
        ("FLOPs", _known_or_question_mark(before.flops), _known_or_question_mark(after.flops)),
    )
    return [Aspect(*pair) for pair in pairs if pair[1] != pair[2]]


def _known_or_question_mark(value: int | None) -> str:
    return "?" if value is None else str(value)
