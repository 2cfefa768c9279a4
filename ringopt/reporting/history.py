"""The line of passes to look through: the graph after each of them, and what was refused in it.

    with recorded() as histories:
        ringopt.explain(model, x)    # one History for each graph that is compiled
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from ringopt.compare.graph_diff import NodeView, diff_views
from ringopt.compare.node_views import views_of
from ringopt.ir.nodes import module_path
from ringopt.pipeline import Context
from ringopt.reporting.graph_data import GraphData, unchanged

# Those that graphs of this process are recorded for, the innermost last.
_listeners: list[list[History]] = []


@dataclass(frozen=True)
class Looked:
    """What is not sharded, and the node that this is about: "" where it names none. `what`: "left alone", "refused" or
    "gathered"."""

    node: str
    what: str
    sentence: str


@dataclass
class History:
    """Of one graph. `names` of passes, "capture" first; `graphs` after each, the same object where nothing changed;
    `refusals` that came up in each; `finished`: a
    graph may be begun anew, when a pass fails."""

    names: list[str] = field(default_factory=list)
    graphs: list[Sequence[NodeView]] = field(default_factory=list)
    refusals: list[list[Looked]] = field(default_factory=list)
    finished: bool = False
    _known: set[str] = field(default_factory=set)

    def keep(self, name: str, gm: fx.GraphModule, context: Context | None, changed: bool = True) -> None:
        self.names.append(name)
        self.graphs.append(views_of(gm) if changed or not self.graphs else self.graphs[-1])
        self.refusals.append([one for one in looked_at(context) if one.sentence not in self._known])
        self._known |= {one.sentence for one in self.refusals[-1]}

    def data(self) -> dict[str, Any]:
        """For a page: what each pass changed, and all of them together."""
        found = GraphData()
        before: Sequence[NodeView] = ()
        for name, graph, refusals in zip(self.names, self.graphs, self.refusals, strict=True):
            changes = unchanged(graph) if graph is before or not before else diff_views(before, graph).changes
            found.frame(name, changes, refused=[[found.word(one.node), one.what, one.sentence] for one in refusals])
            before = graph
        if len(self.graphs) > 1:
            found.frame("all passes", diff_views(self.graphs[0], before).changes, refused=[])
        return found.data()


def looked_at(context: Context | None) -> Iterator[Looked]:
    """What is refused so far."""
    if context is None:
        return
    for refused in context.left_alone:
        yield Looked(refused.node.name if refused.node is not None else "", "left alone", refused.sentence)
    for node, info in context.sites.items():
        if info.refusal is not None:
            yield Looked(node.name, "refused", f"{info.module or node.name}: {info.refusal}")
    for gather in context.gathers:
        node = last_of(context, gather.module, gather.op)
        yield Looked(node, "gathered", gather.why)


def last_of(context: Context, module: str, op: str) -> str:
    """The name of a node of that operator in that module, "" where there is none."""
    graph = context.inputs[0].graph if context.inputs else fx.Graph()
    found = [node.name for node in graph.nodes if op in str(node.target) and module_path(node) == module]
    return found[-1] if found else ""


@contextmanager
def recorded() -> Iterator[list[History]]:
    """A history of each graph that goes through the passes meanwhile."""
    histories: list[History] = []
    _listeners.append(histories)
    try:
        yield histories
    finally:
        _listeners.remove(histories)


def history_asked_for() -> History | None:
    """A history that someone listens to; None where nobody does."""
    if not _listeners:
        return None
    history = History()
    _listeners[-1].append(history)
    return history
