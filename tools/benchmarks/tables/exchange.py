"""Every strategy, the one that is chosen, a plain all-gather and torch's own ring, on two ranks of this machine, and
SDPA on one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.names import OURS, TORCH
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error
from ringopt.tools.common.command import natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench exchange --quick
  ringopt bench exchange --lengths 8192 --heads 8 --patterns causal --json exchange.json
"""

RANKS = 2
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PATTERNS = {"full": "full", "causal": "causal", "window": "window(512)"}
# "auto" is one of the strategies; torch's ring has no window, and on the CPU no backward. It goes round in two ways.
WHO = (*OURS, "all-gather", *TORCH, "SDPA")


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench exchange`."""
    parser = tables.add_parser(
        "exchange",
        parents=[common],
        help="strategies of the exchange beside an all-gather and torch's ring, on two ranks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", metavar="N", nargs="+", type=natural, help="of the sequence (256 ... 8192)")
    parser.add_argument("--heads", metavar="N", type=natural, default=2, help="of 64 (2)")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), help="who sees whom (all)")
    parser.add_argument(
        "--repeats", metavar="N", type=natural, default=5, help="timed calls of each, by turns, at least (5)"
    )
    parser.add_argument("--quick", action="store_true", help="lengths 256 and 1024, 3 repeats")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Rows of every length, pattern and mode, on two processes. Raises CommandError for a length torch cannot split."""
    from ringopt.hardware.profile import here
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.exchange import DIM, on_a_rank
    from ringopt.tools.common.command import CommandError

    lengths = arguments.lengths or (LENGTHS[::2][:2] if arguments.quick else LENGTHS)
    repeats = 3 if arguments.quick else arguments.repeats
    if odd := [n for n in lengths if n % (2 * RANKS)]:
        raise CommandError(f"--lengths {odd[0]}: torch's ring takes multiples of {2 * RANKS}")
    rows: list[Row] = []
    for n in progress.track(lengths, description="lengths"):
        patterns = [PATTERNS[name] for name in arguments.patterns]
        found = as_ranks(RANKS, on_a_rank, patterns, n, arguments.heads, max(3, repeats), timeout=1200.0)
        rows += [row_of(list(ranks)) for ranks in zip(*found, strict=True)]
    sums = totals(rows)
    title = f"Attention over {RANKS} ranks of one thread, {arguments.heads} heads of {DIM}, float32; ms"
    return Result(title, COLUMNS, rows, sums, _sentences(sums), (*NOTES, f"rates: {here().source}"), KEYS)


def row_of(ranks: list[Row]) -> Row:
    """The slowest rank, and the largest error."""
    first = ranks[0]
    seconds = {who: max(rank["seconds"][who] for rank in ranks) for who in first["seconds"]}
    errors = {who: max(rank["errors"][who] for rank in ranks) for who in first["errors"]}
    best = min(seconds[who] for who in OURS if who in seconds)
    row: Row = {key: first[key] for key in ("pattern", "length", "heads", "mode", "chosen", "layout", "same")}
    row |= {"seconds": seconds, "errors": errors, "error": max(errors.values())}
    row["over_best"] = seconds["auto"] / best
    row["torch"] = min((seconds[who] for who in TORCH if who in seconds), default=None)
    others = {"torch": row["torch"], **{who: seconds.get(who) for who in ("gather", "all-gather", "SDPA")}}
    return row | {f"over_{who}": seconds["auto"] / other if other else None for who, other in others.items()}


def totals(rows: list[Row]) -> Row:
    """The largest ratio of auto's time to that of the best strategy and of each peer, and how many rows are wrong."""
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    found: Row = {"rows": len(rows), "wrong": sum(row["error"] > WRONG for row in rows)}
    for ratio in ("over_best", "over_gather", "over_all-gather", "over_torch"):
        found[ratio] = max((row[ratio] for row in rows if row[ratio] is not None), default=None)
    return found


def _sentences(sums: Row) -> tuple[str, ...]:
    parts = [f"auto takes at most {sums['over_best']:.2f} of the best strategy"]
    names = {"over_gather": "the gather", "over_all-gather": "the plain all-gather", "over_torch": "torch's ring"}
    parts += [f"{sums[key]:.2f} of {name}" for key, name in names.items() if sums[key] is not None]
    return (f"{', '.join(parts)}; wrong numbers in {sums['wrong']} of {sums['rows']} rows",)


SHORT = {"gather": "gath.", "ulysses": "ulys.", "all-gather": "all-g."}


def _ratio(key: str) -> Column:
    heading = f"auto/\n{SHORT.get(key.removeprefix('over_'), key.removeprefix('over_'))}"
    return Column(heading, lambda row: "-" if row[key] is None else f"{row[key]:.2f}")


def _milliseconds(who: str) -> Column:
    return Column(SHORT.get(who, who), lambda row: short(row["seconds"].get(who)))


def short(seconds: float | None) -> str:
    """In milliseconds."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


KEYS = ("pattern", "length", "heads", "mode")
COLUMNS = (
    Column("", lambda row: row["pattern"].replace("window(512)", "window"), right=False),
    Column("n", lambda row: str(row["length"])),
    Column("", lambda row: {"inference": "f", "training": "f+b"}[row["mode"]], right=False),
    *map(_milliseconds, ("ring", "ulysses", "blocks", "SDPA", "auto")),
    Column("that\nis", lambda row: str(SHORT.get(row["chosen"], row["chosen"])), right=False),
    *(_ratio(f"over_{who}") for who in ("best", "all-gather", "torch", "SDPA")),
    Column("error", error("error")),
)
NOTES = (
    "f: forward, f+b: and backward; medians by turns, the slower rank. Strategies without a column are in the JSON.",
    "auto/: its time over that of the best strategy; of one all-gather and masked SDPA (all-g.); of torch's ring by "
    "all-gather or all-to-all, whichever is faster; and of all rows on one process of one thread (SDPA).",
    "blocks: what auto takes, with nothing sent; no exchange can take less.",
    "error: the largest of all on two ranks, from dense float64, gradients included.",
    "auto is one of the strategies in one of the layouts; of equal plans, as ring and ring2 on 2 ranks, one is timed.",
)
