"""Every strategy, the one that is chosen, a plain all-gather and torch's own ring, on two ranks of this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.result import Column, Result, Row, error
from ringopt.tools.command import whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench exchange --quick
  ringopt bench exchange --lengths 1024 4096 --patterns causal --json exchange.json
"""

RANKS = 2
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PATTERNS = {"full": "full", "causal": "causal", "window": "window(512)"}
# "auto" is one of the strategies; torch's ring has no window, and on the CPU no backward.
OURS = ("local", "halo", "ring", "ring2", "gather", "ring_q", "gather_q", "ulysses", "auto")
WHO = (*OURS, "all-gather", "torch ring")


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = tables.add_parser(
        "exchange",
        parents=[common],
        help="strategies of the exchange beside an all-gather and torch's ring, on two ranks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", metavar="N", nargs="+", type=whole, help="of the sequence (256 ... 8192)")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), help="who sees whom (all)")
    parser.add_argument(
        "--repeats", metavar="N", type=whole, default=5, help="timed calls of each, by turns, at least (5)"
    )
    parser.add_argument("--quick", action="store_true", help="lengths 256 and 1024, 3 repeats")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    from ringopt.cost.profile import here
    from ringopt.tools.benchmarks.exchange_ranks import DIM, HEADS, on_a_rank
    from ringopt.tools.benchmarks.link_lab import as_ranks
    from ringopt.tools.command import CommandError

    lengths = arguments.lengths or (LENGTHS[::2][:2] if arguments.quick else LENGTHS)
    repeats = 3 if arguments.quick else arguments.repeats
    if odd := [n for n in lengths if n % (2 * RANKS)]:
        raise CommandError(f"--lengths {odd[0]}: torch's ring takes multiples of {2 * RANKS}")
    rows: list[Row] = []
    for n in progress.track(lengths, description="lengths"):
        patterns = [PATTERNS[name] for name in arguments.patterns]
        found = as_ranks(RANKS, on_a_rank, patterns, n, max(3, repeats), timeout=1200.0)
        rows += [row_of(list(ranks)) for ranks in zip(*found, strict=True)]
    sums = totals(rows)
    title = f"Attention over {RANKS} ranks of one thread, {HEADS} heads of {DIM}, float32; ms"
    return Result(title, COLUMNS, rows, sums, sentences(sums), (*NOTES, f"rates: {here().source}"), KEYS)


def row_of(ranks: list[Row]) -> Row:
    """The slowest rank, and the largest error."""
    first = ranks[0]
    seconds = {who: max(rank["seconds"][who] for rank in ranks) for who in first["seconds"]}
    errors = {who: max(rank["errors"][who] for rank in ranks) for who in first["errors"]}
    best = min(seconds[who] for who in OURS if who in seconds)
    row: Row = {key: first[key] for key in ("pattern", "length", "mode", "chosen", "layout", "same")}
    row |= {"seconds": seconds, "errors": errors, "error": max(errors.values())}
    row["over_best"] = seconds["auto"] / best
    for who in ("gather", "all-gather", "torch ring"):
        row[f"over_{who}"] = seconds["auto"] / seconds[who] if who in seconds else None
    return row


def totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.numbers import WRONG

    found: Row = {"rows": len(rows), "wrong": sum(row["error"] > WRONG for row in rows)}
    for ratio in ("over_best", "over_gather", "over_all-gather", "over_torch ring"):
        found[ratio] = max((row[ratio] for row in rows if row[ratio] is not None), default=None)
    return found


def sentences(sums: Row) -> tuple[str, ...]:
    said = [f"auto takes at most {sums['over_best']:.2f} of the best strategy"]
    names = {"over_gather": "the gather", "over_all-gather": "the plain all-gather", "over_torch ring": "torch's ring"}
    said += [f"{sums[key]:.2f} of {name}" for key, name in names.items() if sums[key] is not None]
    return (f"{', '.join(said)}; wrong numbers in {sums['wrong']} of {sums['rows']} rows",)


SHORT = {"gather": "gath.", "ulysses": "ulys.", "all-gather": "all-g.", "torch ring": "torch"}


def ratio(key: str) -> Column:
    heading = f"auto/\n{SHORT.get(key.removeprefix('over_'), key.removeprefix('over_'))}"
    return Column(heading, lambda row: "-" if row[key] is None else f"{row[key]:.2f}")


def milliseconds(who: str) -> Column:
    return Column(SHORT.get(who, who), lambda row: short(row["seconds"][who]) if who in row["seconds"] else "-")


def short(seconds: float) -> str:
    """In milliseconds."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


KEYS = ("pattern", "length", "heads", "mode")
COLUMNS = (
    Column("", lambda row: row["pattern"].replace("window(512)", "window"), right=False),
    Column("n", lambda row: str(row["length"])),
    Column("", lambda row: {"inference": "f", "training": "f+b"}[row["mode"]], right=False),
    *(milliseconds(who) for who in ("halo", "ring", "gather", "ulysses", "all-gather", "torch ring")),
    milliseconds("blocks"),
    Column("auto", lambda row: str(SHORT.get(row["chosen"], row["chosen"])), right=False),
    *(ratio(f"over_{who}") for who in ("best", "torch ring")),
    Column("error", error("error")),
)
NOTES = (
    "f: forward, f+b: and backward; medians by turns, the slower rank.",
    "blocks: what auto takes, with nothing sent; no exchange can take less.",
    "error: the largest of all columns but that, from dense float64, gradients included.",
    "auto is one of the strategies in one of the layouts; of equal plans, as ring and ring2 on 2 ranks, one is timed.",
)
