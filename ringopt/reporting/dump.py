"""options={"dump": folder}: what the passes made of each graph, as files to read.

    folder/rank0/graph0/00_capture.txt      the graph before the first pass, one line a node
                        01_normalize.txt    and after each
                        changes.diff        what each pass changed
                        report.json
                        report.html
                        diff.html           before and after all passes, side by side

Every graph gets a folder of its own; none is overwritten.
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
from ringopt.pipeline import Pass
from ringopt.report import Report
from ringopt.reporting.diff_page import diff_page
from ringopt.reporting.report_page import report_page


class Dump:
    """The files of one graph. Methods do nothing without `options.dump`; they raise OptionError where the folder cannot
    be written."""

    def __init__(self, options: Options, rank: int):
        self.folder = fresh(Path(options.dump) / f"rank{rank}") if options.dump else None
        self.texts: list[tuple[str, str]] = []
        self.before: Sequence[NodeView] = ()

    def captured(self, gm: fx.GraphModule) -> None:
        if self.folder is not None:
            self.before = views_of(gm)
            self.keep("capture", gm)

    def passed(self, step: Pass, gm: fx.GraphModule) -> None:
        """The callback of a pipeline."""
        if self.folder is not None:
            self.keep(step.name, gm)

    def keep(self, name: str, gm: fx.GraphModule) -> None:
        assert self.folder is not None
        text = short(gm.graph, sizes=True) + "\n"
        write(self.folder / f"{len(self.texts):02}_{name}.txt", text)
        self.texts.append((name, text))

    def done(self, report: Report, gm: fx.GraphModule | None) -> None:
        """`gm` is None where the graph was refused."""
        if self.folder is None:
            return
        write(self.folder / "report.json", json.dumps(report.to_dict(), indent=2) + "\n")
        write(self.folder / "report.html", report_page(report, self.folder.name))
        write(self.folder / "changes.diff", "".join(self.changes()))
        if gm is not None:
            page = diff_page(diff_views(self.before, views_of(gm)), "captured", "sharded")
            write(self.folder / "diff.html", page)

    def changes(self) -> list[str]:
        """A unified diff a pass, of those that changed something."""
        found: list[str] = []
        for (before, one), (after, other) in zip(self.texts, self.texts[1:], strict=False):
            found += difflib.unified_diff(one.splitlines(True), other.splitlines(True), before, after, n=1)
        return found


def fresh(place: Path) -> Path:
    """A new folder graph0, graph1, ... in `place`."""
    for number in count():
        folder = place / f"graph{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise OptionError(f"option dump: cannot make {folder}: {error.strerror}") from None
        return folder
    raise AssertionError("numbers do not end")


def write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"option dump: cannot write {file}: {error.strerror}") from None
