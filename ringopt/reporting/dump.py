"""options={"dump": folder}: what the passes made of each graph, as files to read.

    folder/rank0/graph0/00_capture.txt      the graph before the first pass, one line a node
                        01_normalize.txt    and after each
                        changes.diff        what each pass changed
                        report.json
                        report.html
                        diff.html           before and after all passes, side by side

Every graph gets a folder of its own; none is overwritten. A file that cannot be written (a full disk) is warned of,
once a process and folder, and ends the dump and not the program.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch.fx as fx

from ringopt.compare.graph_diff import NodeView, diff_views
from ringopt.compare.node_views import views_of
from ringopt.errors import OptionError
from ringopt.ir.printer import short
from ringopt.options import Options
from ringopt.output.files import FULL, write_whole
from ringopt.output.printable import logger, printable
from ringopt.pipeline import Pass
from ringopt.report import Report
from ringopt.reporting.diff_page import diff_page
from ringopt.reporting.report_page import report_page

log = logger(__name__)

# Folders that options name: in which something was written, and in which nothing can be.
_written: set[str] = set()
_given_up: set[str] = set()


class Dump:
    """The files of one graph. Methods do nothing without `options.dump`. Raises OptionError where the first folder of a
    process cannot be made, because of its path."""

    def __init__(self, options: Options, rank: int):
        self.root = options.dump or ""
        self.folder = self.first(Path(options.dump) / f"rank{rank}") if options.dump else None
        self.texts: list[tuple[str, str]] = []
        self.before: Sequence[NodeView] = ()

    def first(self, place: Path) -> Path | None:
        if self.root in _given_up:
            return None
        try:
            folder = fresh(place)
        except OSError as error:
            if self.root not in _written and error.errno not in FULL:
                raise OptionError(f"option dump: cannot make {error.filename}: {error.strerror}") from None
            self.give_up(error)
            return None
        _written.add(self.root)
        return folder

    def give_up(self, error: OSError) -> None:
        log.warning("option dump: cannot write in %s: %s; nothing more is written", self.root, error.strerror)
        _given_up.add(self.root)
        self.folder = None

    def write(self, name: str, text: str) -> None:
        if self.folder is None:
            return
        try:
            write_whole(self.folder / name, printable(text))
        except OSError as error:
            self.give_up(error)

    def captured(self, gm: fx.GraphModule) -> None:
        if self.folder is not None:
            self.before = views_of(gm)
            self.keep("capture", gm)

    def passed(self, step: Pass, gm: fx.GraphModule) -> None:
        """The callback of a pipeline."""
        if self.folder is not None:
            self.keep(step.name, gm)

    def keep(self, name: str, gm: fx.GraphModule) -> None:
        text = short(gm.graph, sizes=True) + "\n"
        self.write(f"{len(self.texts):02}_{name}.txt", text)
        self.texts.append((name, text))

    def done(self, report: Report, gm: fx.GraphModule | None) -> None:
        """`gm` is None where the graph was refused."""
        if self.folder is None:
            return
        title = self.folder.name
        self.write("report.json", json.dumps(report.to_dict(), indent=2) + "\n")
        self.write("report.html", report_page(report, title))
        self.write("changes.diff", "".join(self.changes()))
        if gm is not None:
            page = diff_page(diff_views(self.before, views_of(gm)), "captured", "sharded")
            self.write("diff.html", page)

    def changes(self) -> list[str]:
        """A unified diff a pass, of those that changed something."""
        found: list[str] = []
        for (before, one), (after, other) in zip(self.texts, self.texts[1:], strict=False):
            found += difflib.unified_diff(one.splitlines(True), other.splitlines(True), before, after, n=1)
        return found


def fresh(place: Path) -> Path:
    """A new folder graph0, graph1, ... in `place`. Raises OSError."""
    for number in count():
        folder = place / f"graph{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")
