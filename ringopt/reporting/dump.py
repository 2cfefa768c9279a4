"""options={"dump": folder}: what the passes made of each graph, as files to read.

    folder/rank0/graph0/00_capture.txt      the graph before the first pass, one line a node
                        01_normalize.txt    and after each
                        changes.diff        what each pass changed
                        report.json
                        report.html         with the graph after every pass, to step through
                        diff.html           before and after all passes, side by side

Every graph gets a folder of its own; none is overwritten. A file that cannot be written (a full disk) is warned of,
once a process and folder, and ends the dump and not the program.
"""

from __future__ import annotations

import difflib
import json
from itertools import count
from pathlib import Path

import torch.fx as fx

from ringopt.compare.graph_diff import diff_views
from ringopt.compare.node_views import views_of
from ringopt.errors import OptionError
from ringopt.ir.printer import short
from ringopt.options import Options
from ringopt.output.files import FULL, write_whole
from ringopt.output.printable import logger, printable
from ringopt.pipeline import Context, Pass
from ringopt.report import Report
from ringopt.reporting.diff_page import diff_page
from ringopt.reporting.history import History, history_asked_for
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
        listened = history_asked_for()
        self.history = listened or (History() if self.folder is not None else None)

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

    def captured(self, gm: fx.GraphModule, context: Context | None = None) -> None:
        self.keep("capture", gm, context)

    def passed(self, step: Pass, gm: fx.GraphModule, context: Context | None = None) -> None:
        """In the callback of a pipeline."""
        self.keep(step.name, gm, context)

    def keep(self, name: str, gm: fx.GraphModule, context: Context | None) -> None:
        if self.history is None:
            return
        text = short(gm.graph, sizes=True) + "\n"
        changed = not self.texts or text != self.texts[-1][1] or name == "shard_sequence"  # which notes placements
        self.history.keep(name, gm, context, changed)
        self.write(f"{len(self.texts):02}_{name}.txt", text)
        self.texts.append((name, text))

    def done(self, report: Report, gm: fx.GraphModule | None) -> None:
        """`gm` is None where the graph was refused."""
        if self.history is not None:
            self.history.finished = bool(self.history.names)
        if self.folder is None:
            return
        title, history = self.folder.name, self.history
        assert history is not None
        self.write("report.json", json.dumps(report.to_dict(), indent=2) + "\n")
        links = {"diff": "diff.html"} if gm is not None else {}
        self.write("report.html", report_page(report, title, [history], links))
        self.write("changes.diff", "".join(self.changes()))
        if gm is not None:
            found = diff_views(history.graphs[0], views_of(gm))
            self.write("diff.html", diff_page(found, "captured", "sharded", {"explain": "report.html"}))

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
