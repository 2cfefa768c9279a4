"""Attention forward and backward, over and over, with random delays before every message: does it ever hang, or err?

Each step draws a pattern, lengths, heads, layout and strategy, the same on all ranks, runs on real processes (gloo),
and is held against float64 on one. Every rank sleeps for a time of its own before each message and collective. Once 300
cases are drawn, most steps take one of them again, as in training, and every tenth is new. With --compiled each step
is one of training, of one of a few small models that were drawn and compiled (aot_eager): exchanges and gathers that
start early and end late, and sums of gradients in buckets, are delayed as well.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringopt.tools.benchmarks.lab.names import TIMEOUT
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error
from ringopt.tools.common.command import CommandError, natural, two_or_more

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench soak --steps 10000 --ranks 3 --seconds 1200 --json soak.json
  ringopt bench soak --compiled --steps 500
"""


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench soak`."""
    parser = tables.add_parser(
        "soak",
        parents=[common],
        help="random attentions under random delays: no hang, no wrong number",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", metavar="N", type=natural, default=1000, help="forward and backward each (1000)")
    parser.add_argument("--ranks", metavar="P", type=two_or_more, default=3, help="processes (3)")
    parser.add_argument("--seconds", metavar="S", type=natural, default=600, help="to end after, steps or not (600)")
    parser.add_argument("--delay", metavar="MS", type=natural, default=2, help="longest, in milliseconds (2)")
    parser.add_argument("--compiled", action="store_true", help="training steps of compiled models")
    parser.add_argument("--seed", metavar="N", type=natural, default=1, help="of what is drawn (1)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError where a rank fails or hangs."""
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.soak import soaked

    progress.add_task(f"{arguments.steps} steps, {arguments.seconds} s at most", total=None)
    how = (arguments.steps, arguments.seconds, arguments.delay / 1e3, arguments.seed, arguments.compiled)
    found = as_ranks(arguments.ranks, soaked, *how, timeout=arguments.seconds + 2 * TIMEOUT)
    what = {"compiled": arguments.compiled, "ranks": arguments.ranks, "delay": arguments.delay}
    rows = [what | combined([rank[place] for rank in found]) for place in range(len(found[0]))]
    sums = _totals(rows)
    if sums["wrong"]:
        raise CommandError(f"{sums['wrong']} of {sums['steps']} steps gave wrong numbers; --seed {arguments.seed}")
    drawn = "models" if arguments.compiled else "attentions"
    title = f"Random {drawn} on {arguments.ranks} ranks, up to {arguments.delay} ms before each message"
    sentence = f"{sums['steps']} steps, no hang, wrong numbers in {sums['wrong']}"
    return Result(title, COLUMNS, rows, sums, (sentence,), NOTES, KEYS)


def combined(ranks: list[Row]) -> Row:
    """The worst of the ranks."""
    return ranks[0] | {key: max(rank[key] for rank in ranks) for key in ("wrong", "error", "longest")}


def _totals(rows: list[Row]) -> dict[str, Any]:
    return {key: sum(row[key] for row in rows) for key in ("steps", "wrong")}


KEYS = ("compiled", "ranks", "delay", "strategy")
COLUMNS = (
    Column("strategy", lambda row: row["strategy"], right=False),
    Column("steps", lambda row: f"{row['steps']:,}"),
    Column("refused", lambda row: f"{row['refused']:,}"),
    Column("wrong", lambda row: f"{row['wrong']:,}"),
    Column("error", error("error")),
    Column("longest step,\ns", lambda row: f"{row['longest']:.2f}"),
)
NOTES = (
    "refused: what was drawn is none for this strategy, and all ranks said so. Not counted as steps.",
    "error: outputs and gradients in float64, from one process, relative to the largest entry.",
)
