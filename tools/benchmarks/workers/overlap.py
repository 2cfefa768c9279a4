"""Ring attention over a link of known speed: compute alone, exchange alone, and both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringopt.tools.benchmarks.lab.link_lab import LinkLab, Links, as_ranks
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.workers.overlap_compiled import Hoisted
from ringopt.tools.benchmarks.workers.overlap_rank import FAST, LONGEST, OverlapCase, Rank, begin_rank, set_rate


def rows_of(cases: Sequence[OverlapCase], shares: Sequence[float], repeats: int, emulated: bool) -> list[Row]:
    """A row for each case, pass and share; the cases have equally many ranks. Raises LabError."""
    ranks, timeout = cases[0].ranks, LONGEST * len(cases) * (len(shares) + 1) * (repeats + 1)
    if emulated:
        found = as_ranks(ranks, on_a_rank, cases, shares, repeats, None, timeout=timeout)
    else:
        with LinkLab(ranks, FAST) as lab:
            found = lab.run(on_a_rank, cases, shares, repeats, lab.links, timeout=timeout)
    return [row_of(list(of_ranks)) for of_ranks in zip(*found, strict=True)]


def row_of(found: Sequence[dict[str, Any]]) -> Row:
    """The slowest rank of each."""
    times = ("compute", "exchange", "total", "moving", "exposed", "written")
    most = {key: max(rank[key] for rank in found) for key in times if found[0][key] is not None}
    compute, exchange, total = most["compute"], most["exchange"], most["total"]
    return {
        **found[0],
        **most,
        "rate": max(rank["bytes"] for rank in found) / exchange,
        "hidden": (compute + exchange - total) / min(compute, exchange),
        "over_longer": total / max(compute, exchange),
        "error": max(rank["error"] for rank in found),
    }


def on_a_rank(
    rank: int, ranks: int, cases: Sequence[OverlapCase], shares: Sequence[float], repeats: int, links: Links | None
) -> list[dict[str, Any]]:
    """The rows of one rank: each case, forward and backward, on links on which sending takes `shares` of computing."""
    mesh, found = begin_rank(), []
    for case in cases:
        part = (Hoisted if case.hoisted else Rank)(case, mesh)
        for backward in (False, True):
            set_rate(mesh, links, None)
            compute, sent = part.alone(backward, repeats)
            for share in shares:
                link = set_rate(mesh, links, sent / (share * compute))
                found.append({**vars(case), "share": share, **part.measured(link, backward, repeats)})
    return found
