"""A Report as one HTML file: sites, what was refused or gathered and why, the memory of a rank by cause."""

from __future__ import annotations

from dataclasses import dataclass

from ringopt.report import Report, bytes_text, drawn_by, several
from ringopt.reporting.page import filled

ACROSS, COLOURS = 1000, 5  # the picture of the memory: units across, colours before they come again


@dataclass(frozen=True)
class Bar:
    """One cause in the stack: where it starts and how wide it is, of ACROSS."""

    number: int
    cause: str
    bytes: int
    start: float
    width: float
    share: str


@drawn_by
def report_page(report: Report, title: str) -> str:
    """`title` says of what."""
    return filled(
        "report", title=f"ringopt explain: {title}", report=report, summary=_summary(report),
        memory=memory_bars(report), readable=bytes_text,
    )  # fmt: skip


def _summary(report: Report) -> str:
    sharded = f"{report.sharded_fraction:.1%} of matrix FLOPs are sharded"
    ranks = several(report.world_size, "rank")
    return f"{ranks}; {sharded}; this rank sends {bytes_text(report.bytes_sent)} in one forward."


def memory_bars(report: Report) -> list[Bar]:
    """The bytes of each cause, as parts of one bar that is ACROSS wide."""
    total, start, bars = sum(report.memory.values()), 0, list[Bar]()
    for number, (cause, size) in enumerate((report.memory if total else {}).items()):
        place, width = (round(ACROSS * part / total, 1) for part in (start, size))
        bars.append(Bar(number % COLOURS, cause, size, place, width, f"{size / total:.0%}"))
        start += size
    return bars
