"""`ringopt timeline`: what the ranks did when, from the folder of `options={"trace": folder}`."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringopt.tools.common.command import CommandError, check_file, console, write, write_page

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence

    from rich.table import Table

    from ringopt.runtime.trace import Span

EXAMPLES = """\
examples:
  ringopt timeline traces
  ringopt timeline traces --html timeline.html --last 0.5
  ringopt timeline traces --perfetto all-ranks.json
"""

MIB = 2**20


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt timeline`."""
    parser = commands.add_parser(
        "timeline",
        help="which exchange was hidden behind which compute, in a recorded run",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with a file of each rank")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a page to zoom into, one file")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="also write all ranks as one Chrome trace")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also draw it")
    parser.add_argument("--last", metavar="SECONDS", type=float, help="only the end of the run")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    for option in ("svg", "html", "perfetto"):
        check_file(f"--{option}", getattr(arguments, option))
    from ringopt.runtime.trace import chrome, read_masks

    spans = last(read_all(arguments.folder), arguments.last)
    masks = {site: mask for path in files_of(arguments.folder) for site, mask in read_masks(path).items()}
    if arguments.html:
        from ringopt.reporting.timeline_page import timeline_page

        write_page(arguments.html, timeline_page(spans, str(arguments.folder), masks=masks))
    if arguments.perfetto:
        write(arguments.perfetto, json.dumps(chrome(spans, masks)))
    if arguments.svg:
        write(arguments.svg, drawn(spans))
    console().print(_table(spans), NOTE, sep="\n", markup=False)
    return 0


NOTE = (
    "link: an exchange was under way; compute: blocks of attention; program: what else was computed beside it; "
    "exposed: the rank waited for it, or stood in a collective, and did nothing else; hidden: the rest of link."
)


def files_of(folder: Path) -> list[Path]:
    """Of each rank."""
    return sorted(folder.glob("rank-*.json"))


def read_all(folder: Path) -> list[Span]:
    """Raises CommandError where there is no trace."""
    from ringopt.runtime.trace import read_spans

    paths = files_of(folder)
    if not paths:
        raise CommandError(f'{folder} holds no rank-*.json; run the program with options={{"trace": {str(folder)!r}}}')
    try:
        spans = [span for path in paths for span in read_spans(path)]
    except (ValueError, OSError) as problem:
        raise CommandError(str(problem)) from None
    if not spans:
        raise CommandError(f"{folder} holds traces in which nothing was exchanged")
    return spans


def last(spans: list[Span], seconds: float | None) -> list[Span]:
    """The end of a run: spans cut at `seconds` before the last end. Raises CommandError unless `seconds` is above 0."""
    if seconds is None:
        return spans
    if not seconds > 0:
        raise CommandError(f"--last {seconds:g}: expected a number of seconds above 0")
    end = max(span.end for span in spans)
    return [replace(span, begin=max(span.begin, end - seconds)) for span in spans if span.end > end - seconds]


def _table(spans: Sequence[Span]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ringopt.runtime.trace import sums

    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("rank", "total, s", "compute, s", "program, s", "link, s", "exposed, s", "hidden", "sent, MiB"):
        found.add_column(heading, justify="right")
    for rank in sums(spans):
        seconds = (rank.total, rank.compute, rank.program, rank.link, rank.exposed)
        sent = f"{rank.bytes / MIB:,.1f}"
        found.add_row(str(rank.rank), *(f"{x:.3f}" for x in seconds), f"{rank.hidden:.0%}", sent)
    return found


# ---- the picture -----------------------------------------------------------------------------------------------------
LEFT, WIDTH, MARGIN, LANE, GAP, TOP = 110, 980, 40, 18, 14, 44
COLOURS = {"compute": "#4c78a8", "program": "#9ecae9", "link": "#b8b8b8", "exposed": "#e45756"}
ROWS = {"compute": 0, "program": 0, "link": 1, "exposed": 2}
NAMES = ("compute", "link", "exposed")
TICKS = 8  # about


def drawn(spans: Sequence[Span]) -> str:
    """An SVG: three rows a rank, time from left to right; each span has a tooltip."""
    from html import escape

    ranks = sorted({span.rank for span in spans})
    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    scale = (WIDTH - LEFT) / max(end - start, 1e-9)
    block = len(NAMES) * LANE + GAP
    height = TOP + block * len(ranks) + 30
    parts = [f'<rect width="{WIDTH + MARGIN}" height="{height}" fill="white"/>']
    for number, lane in enumerate(COLOURS):
        x = LEFT + 130 * number
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{COLOURS[lane]}"/>')
        parts.append(f'<text x="{x + 18}" y="22">{lane}</text>')
    for tick in ticks(end - start):
        at, label = LEFT + tick * scale, f"{tick * 1e3:,.10g} ms"
        parts.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{height - 26}" stroke="#e8e8e8"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle">{label}</text>')
    for place, rank in enumerate(ranks):
        y = TOP + block * place
        parts.append(f'<text x="10" y="{y + 1.5 * LANE + 4}" font-weight="bold">rank {rank}</text>')
        for number, lane in enumerate(NAMES):
            parts.append(f'<text x="62" y="{y + number * LANE + 13}" fill="#808080">{lane}</text>')
    for span in spans:
        left, y = (
            LEFT + (span.begin - start) * scale,
            TOP + block * ranks.index(span.rank) + LANE * ROWS[span.lane],
        )
        tooltip = f"rank {span.rank}, {span.label}: {span.seconds * 1e3:.2f} ms"
        tooltip += f", {span.bytes:,} bytes" if span.bytes else ""
        parts.append(
            f'<rect x="{left:.2f}" y="{y}" width="{max(span.seconds * scale, 0.3):.2f}" height="{LANE - 3}" '
            f'fill="{COLOURS[span.lane]}" fill-opacity="0.85"><title>{escape(tooltip)}</title></rect>'
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + MARGIN} {height}" font-family="sans-serif" '
    return "\n".join([head + 'font-size="11">', *parts, "</svg>", ""])


def ticks(seconds: float) -> list[float]:
    """From 0 on, about TICKS of them, of round numbers."""
    least = max(seconds, 1e-9) / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= least)
    return [step * number for number in range(math.floor(seconds / step) + 1)]
