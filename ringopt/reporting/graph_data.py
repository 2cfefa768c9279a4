"""Graphs for a page: every view once, every text once, and of a line of graphs only what changes.

    words    all texts; elsewhere a text is its number
    views    a node: name, op, text, names of its inputs, module, source, shape, placement, bytes sent, FLOPs, site,
             bytes of its result, device
    sites    what is known of attentions, each once
    frames   a graph beside the one before: a list of changes; [first, many] are views that nothing happened to
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ringopt.compare.graph_diff import KINDS, Change, NodeView, SiteView, as_dict

NUMBER = {kind: number for number, kind in enumerate(KINDS)}
NONE = -1


class GraphData:
    """Collects what frames name."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.known: dict[NodeView, int] = {}
        self.sites: dict[SiteView, int] = {}
        self.views: list[list[Any]] = []
        self.frames: list[dict[str, Any]] = []

    def frame(self, name: str, changes: Iterable[Change], **more: Any) -> None:
        """Adds a graph, as it differs from the one before."""
        self.frames.append({"name": name, "changes": list(joined(map(self.change, changes))), **more})

    def data(self) -> dict[str, Any]:
        return {
            "kinds": KINDS,
            "words": list(self.words),
            "views": self.views,
            "sites": [asdict(site) for site in self.sites],
            "frames": self.frames,
        }

    def word(self, text: str) -> int:
        return self.words.setdefault(text, len(self.words))

    def view(self, view: NodeView | None) -> int:
        """Its number."""
        if view is None:
            return NONE
        if view not in self.known:
            self.known[view] = len(self.views)
            parts = (view.module, view.source, view.shape, view.placement)
            site = self.sites.setdefault(view.site, len(self.sites)) if view.site is not None else NONE
            self.views.append([
                self.word(view.name), self.word(view.op), view.text, [self.word(name) for name in view.inputs],
                *map(self.word, parts), view.bytes_sent, view.flops, site, view.result_bytes, self.word(view.device),
            ])  # fmt: skip
        return self.known[view]

    def change(self, change: Change) -> dict[str, Any] | int:
        """Of a node that nothing happened to, one side is enough."""
        after = self.view(change.after)
        run = change.error is not None or change.gradient is not None
        if change.kind == "same" and not run and not (change.is_site and change.before is not None):
            return after
        found = as_dict(change)
        short = {"k": NUMBER[change.kind], "b": self.view(change.before), "a": after}
        aspects = [[aspect["name"], aspect["before"], aspect["after"]] for aspect in found["aspects"]]
        more = {"s": aspects, "e": found["error"], "g": found["gradient"]}
        return {**short, **{name: value for name, value in more.items() if value}}


def joined(changes: Iterable[dict[str, Any] | int]) -> Iterator[Any]:
    """Numbers that follow each other as one run."""
    run: list[int] = []
    for change in changes:
        if isinstance(change, int) and run and change == run[0] + run[1]:
            run[1] += 1
            continue
        if run:
            yield run
        run = [change, 1] if isinstance(change, int) else []
        if not run:
            yield change
    if run:
        yield run


def unchanged(views: Sequence[NodeView]) -> Iterator[Change]:
    """The first graph of a line."""
    return (Change("same", None, view) for view in views)
