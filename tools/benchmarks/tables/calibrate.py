"""Measure this machine's kernels and link, and keep the rates for strategy="auto" in the user's cache folder.

Two processes of one thread measure at the same time, as two ranks of a program would compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import Column, Result, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.progress import Progress

RANKS = 2


def measure(progress: Progress, network: str | None = None) -> Result:
    """Writes the profile, with the link between nodes that is called `network`. Raises OptionError for a name that the
    table of links does not have, CommandError where that cannot be done, or a rank fails."""
    from ringopt.hardware.devices import link_of
    from ringopt.hardware.profile import store
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.calibrate import kernels_on_a_rank, link_on_a_rank, rates_from
    from ringopt.tools.common.command import CommandError

    between = link_of(network) if network is not None else None
    task = progress.add_task("kernels, then the link", total=2)
    kernels = as_ranks(RANKS, kernels_on_a_rank)
    progress.advance(task)
    link = as_ranks(RANKS, link_on_a_rank)
    progress.advance(task)
    rates = replace(rates_from(kernels, link), between=between)
    try:
        path = store(rates)
    except OSError as problem:
        raise CommandError(f"the profile cannot be written: {problem}") from problem
    rows: list[Row] = [
        {"what": name, "rate": speed.rate, "overhead": speed.overhead} for name, speed in rates.speeds.items()
    ]
    rows.append({"what": "link between two processes", "rate": rates.link.rate, "overhead": rates.link.latency})
    if between is not None:
        rows.append({"what": f"link between nodes, {network}", "rate": between.rate, "overhead": between.latency})
    totals = {"profile": str(path), "digest": rates.digest, **rates.to_dict()}
    sentences = (
        f"messages one way take {rates.link.one_way:.0%} of the time of as many both ways; of the exchange "
        f"{rates.overlap:.0%} hides behind compute; a call costs {_microseconds(rates.calls)} us beside "
        f"its tiles, a step {rates.step * 1e6:.0f} us; sums are merged at {rates.touch / 1e9:.1f} GB/s",
        f'strategy="auto" goes by it from now on: {path}',
    )
    return Result("Rates of one rank, a thread each", COLUMNS, rows, totals, sentences, NOTES, KEYS)


def _microseconds(calls: Mapping[str, float]) -> str:
    return ", ".join(f"{seconds * 1e6:.0f} ({name})" for name, seconds in calls.items())


def _rate(row: Row) -> str:
    return f"{row['rate'] / 1e9:,.1f} G{'B' if row['what'].startswith('link') else 'FLOP'}/s"


KEYS = ("what",)
COLUMNS = (
    Column("what", lambda row: row["what"], right=False),
    Column("rate", _rate),
    Column("once a tile\nor message, us", lambda row: f"{row['overhead'] * 1e6:,.0f}"),
)
NOTES = ("a tile takes what it costs once (with what the executor adds), so much a query, and its FLOPs at the rate.",)
