"""A GraphDiff as text for terminals, logs and goldens.

model.layers.0.self_attn  (and 31 like it: model.layers.1.self_attn .. model.layers.31.self_attn)
  - %y = scaled_dot_product_attention(%q, %k, %v, None, 0, True)
  + %y_ring = ringopt::ring_attention(%q, %k, %v, ...)
      shape f32[1, 2, 64, 8] -> f32[1, 2, 16, 8]
  ... 3 resized, 5 same
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ringopt.compare.align import LISTED
from ringopt.compare.graph_diff import (
    Change,
    GraphDiff,
    GraphTotals,
    NodeView,
    SiteView,
    differs,
    nodes_text,
    values_text,
)
from ringopt.compare.node_values import NodeError
from ringopt.report import fold_alike, several

MARKS = {"added": ("+", "green"), "removed": ("-", "red"), "resized": ("=", "dim"), "same": (" ", "dim")}
# Told by number, unless there is nothing else to tell.
FOLDED = ("resized", "same")
ROWS = 12  # of values, unless all are asked for
# Longer text in quotes (the terms of a mask) is cut.
QUOTED, LONGEST = re.compile(r"'[^']{60,}'"), 40
# So are long lists of values, and of their shapes.
LISTS, FIRST = re.compile(r"[\[(](?:%[\w/]+|\w+\[[^\]]*\])(?:, (?:%[\w/]+|\w+\[[^\]]*\])){8,}[\])]"), 3


@dataclass
class ModuleChanges:
    """The changes of one module; `like` names the modules whose changes read the same."""

    module: str
    changes: list[Change] = field(default_factory=list)
    like: list[str] = field(default_factory=list)

    def signature(self, lists: set[str]) -> tuple[object, ...]:
        """What the block says but for names, and but for the place of a value in one of `lists`."""
        return tuple(
            (change.kind, *(_content(view, lists) for view in (change.before, change.after) if view))
            for change in self.changes
        )


def _content(view: NodeView, lists: set[str]) -> tuple[str, str, str]:
    taken = view.op == "getitem" and view.inputs[0] in lists
    return view.op, "" if taken else view.arguments, view.shape


def changes_by_module(diff: GraphDiff, every: bool) -> list[ModuleChanges]:
    """By module, in the order of what both sides have of it; equal ones (layers) as one unless `every`."""
    blocks: dict[str, ModuleChanges] = {}
    for change in diff.changes:
        module = "(inputs)" if change.node.op == "input" else change.node.module or "(no module)"
        blocks.setdefault(module, ModuleChanges(module)).changes.append(change)
    place = {id(change): number for number, change in enumerate(diff.changes)}
    ordered = sorted(blocks.values(), key=lambda block: min(place[id(change)] for change in kept(block.changes)))
    if every:
        return ordered
    lists = {change.after.name for change in diff.changes if change.after and change.after.op == LISTED}
    first: dict[tuple[object, ...], ModuleChanges] = {}
    for block in ordered:
        known = first.setdefault(block.signature(lists), block)
        if known is not block:
            known.like.append(block.module)
    return list(first.values())


def kept(changes: list[Change]) -> list[Change]:
    """Those of nodes that both sides have, if there are any: what a rewrite adds may stand far from its reader."""
    return [change for change in changes if change.before and change.after] or changes


def rendered(diff: GraphDiff, every: bool = False, stat: bool = False) -> Group:
    """`every`: nothing folded. `stat`: numbers of nodes only. Of a diff without changes: nothing to read but that."""
    parts: list[Text | Table] = [Text(nodes_text(diff)), *_totals(diff.before, diff.after)]
    folded = () if every else FOLDED if any(change.kind not in FOLDED for change in diff.changes) else ("same",)
    if diff.compared:
        parts += values_lines(diff, every)
    if diff.sites:
        parts.append(_site_table(diff.sites, every))
    if stat:
        parts.append(_stat_table(changes_by_module(diff, every)))
        return Group(*parts)
    hidden = Counter[str]()
    for block in changes_by_module(diff, every):
        if all(change.kind in folded for change in block.changes):
            for change in block.changes:
                hidden[change.kind] += 1 + len(block.like)
            continue
        parts += _block_lines(block, folded)
    if hidden:
        parts.append(Text(f"elsewhere: {_counted(hidden)}", style="dim"))
    return Group(*parts)


# ---- values ----------------------------------------------------------------------------------------------------------
def values_lines(diff: GraphDiff, every: bool = False) -> Iterator[Text | Table]:
    """The first node whose value, or else whose gradient, differs by more than its dtype allows, with its place; then a
    table, in order of computation, of those that do, or of the largest differences where none does."""
    yield Text(f"\n{values_text(diff)}", style="bold")
    first = first_off(diff)
    if first is not None:
        node, what, error = first
        yield Text(f"  {_shortened(node.text)}  # {_shortened(node.shape)}", style="red")
        yield Text(f"      {what}: off by {error} (allowed: {error.allowed:.0e})")
        for name, where in (("module", node.module), ("source", node.source)):
            if where:
                yield Text(f"      {name}: {where}")
    rows = worst_values(diff, None if every else ROWS)
    if rows:
        yield _value_table(rows, len(diff.compared))


def first_off(diff: GraphDiff) -> tuple[NodeView, str, NodeError] | None:
    """The first node that is off, in what, and by how much: the first value, or from the outputs the first gradient."""
    change = diff.first_bad
    if change is not None and change.error is not None:
        return change.node, "value", change.error
    change = diff.first_bad_gradient
    return (change.node, "gradient", change.gradient) if change is not None and change.gradient is not None else None


def worst_values(diff: GraphDiff, most: int | None) -> list[Change]:
    """At most so many nodes, in order of computation: the first that differ by more than is allowed, or the largest
    differences where none does. Where gradients alone do, the last of them: those that a backward comes to first."""
    if diff.first_bad is None and diff.first_bad_gradient is not None:
        bad = [change for change in diff.changes if change.gradient is not None and change.gradient.bad]
        return bad[-most:] if most else bad
    bad = [change for change in diff.compared if change.error is not None and change.error.bad]
    if bad:
        return bad[:most]
    differing = [change for change in diff.compared if differs(change)]
    largest = {id(change) for change in sorted(differing, key=_relative)[::-1][:most]}
    return [change for change in differing if id(change) in largest]


def _relative(change: Change) -> float:
    return max(error.relative if error is not None else 0.0 for error in (change.error, change.gradient))


def _value_table(rows: Sequence[Change], compared: int) -> Table:
    table = Table(title=f"values, {len(rows)} of {compared} in order of computation", title_justify="left")
    both = any(change.gradient is not None for change in rows)
    heads = ("node", "relative", "max abs", *(("gradient",) if both else ()), "module")
    for name in heads:
        table.add_column(name, justify="left" if name in ("node", "module") else "right", overflow="fold")
    for change in rows:
        sizes = (*error_cells(change.error), *(error_cells(change.gradient)[:1] if both else ()))
        off = any(error is not None and error.bad for error in (change.error, change.gradient))
        cells = f"%{change.node.name}", *sizes, change.node.module or "-"
        table.add_row(*map(Text, cells), style="red" if off else "")
    return table


def error_cells(error: NodeError | None) -> tuple[str, str]:
    """Relative, and absolute; "-" where it was not compared."""
    return (f"{error.relative:.1e}", f"{error.largest:.1e}") if error is not None else ("-", "-")


def _totals(before: GraphTotals, after: GraphTotals) -> Iterator[Text]:
    for name, one, other in (
        ("sent by this rank in one forward, bytes", before.bytes_sent, after.bytes_sent),
        ("FLOPs of products on this rank", before.flops, after.flops),
    ):
        if one != other:
            yield Text(f"{name}: {_known(one)} -> {_known(other)}")


def _known(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _block_lines(block: ModuleChanges, fold: Sequence[str]) -> Iterator[Text]:
    like = f"  (and {len(block.like)} like it: {_span(block.like)})" if block.like else ""
    yield Text(f"\n{block.module}{like}", style="bold")
    folded = Counter[str]()
    for change in block.changes:
        if change.kind in fold:
            folded[change.kind] += 1
        else:
            yield from change_lines(change)
    if folded:
        yield Text(f"  ... {_counted(folded)}", style="dim")


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{kinds[kind]} {kind}" for kind in FOLDED if kinds[kind])


def change_lines(change: Change) -> Iterator[Text]:
    """One change: its nodes, and below them what else differs."""
    if change.kind in ("replaced", "changed") and change.before is not None and change.after is not None:
        yield _line("removed", change.before, sized=False)
        yield _line("added", change.after, sized=False)
    elif change.kind == "rerouted":
        yield Text(f"  ~ {_shortened(change.node.text)}", style="yellow")
    else:
        yield _line(change.kind, change.node)
    aspects = [aspect for aspect in change.aspects if aspect.name not in ("op", "arguments")]
    for aspect in aspects:
        yield Text(f"      {aspect.name}: {_shortened(aspect.before)} -> {_shortened(aspect.after)}", style="dim")


def _line(kind: str, view: NodeView, sized: bool = True) -> Text:
    mark, style = MARKS[kind]
    size = f"  # {_shortened(view.shape)} {view.placement}" if sized and view.shape else ""
    return Text(f"  {mark} {_shortened(view.text)}{size}", style=style)


def _shortened(text: str) -> str:
    return LISTS.sub(_few, QUOTED.sub(lambda found: f"{found[0][:LONGEST]}...'", text))


def _few(found: re.Match[str]) -> str:
    entries = re.findall(r"%[\w/]+|\w+\[[^\]]*\]", found[0])
    return f"{found[0][0]}{', '.join(entries[:FIRST])}, ... {len(entries) - FIRST} more{found[0][-1]}"


def _site_table(sites: Sequence[Change], every: bool) -> Table:
    table = Table(title=several(len(sites), "attention site"), title_justify="left")
    for name in ("module", "before", "after", "reason"):
        table.add_column(name, overflow="fold")
    rows = [_site_cells(change) for change in sites]
    for cells in rows if every else fold_alike(rows):
        table.add_row(*map(Text, cells))
    return table


def _site_cells(change: Change) -> tuple[str, ...]:
    views = [view.site if view else None for view in (change.before, change.after)]
    reason = next((view.reason for view in views[::-1] if view is not None and view.reason), "")
    return (change.node.module or "-", *map(_site_text, views), reason)


def _site_text(site: SiteView | None) -> str:
    if site is None:
        return "-"
    if site.strategy == "none":
        return site.pattern
    return f"{site.pattern}: {site.strategy}, {site.layout}, {site.kernel}"


def _stat_table(blocks: Sequence[ModuleChanges]) -> Table:
    kinds = ("added", "removed", "replaced", "rerouted", "changed", "resized", "same")
    table = Table(title="nodes by module", title_justify="left")
    table.add_column("module", overflow="fold")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for block in blocks:
        found = Counter[str](change.kind for change in block.changes)
        if set(found) != {"same"}:
            like = f" and {len(block.like)} like it, to {block.like[-1]}" if block.like else ""
            table.add_row(Text(f"{block.module}{like}"), *(str(found[kind] or "") for kind in kinds))
    return table
