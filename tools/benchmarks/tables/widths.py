"""Two layers of Llama-3-8B, DeepSeek-V2-Lite and Qwen3-Next, as wide as they are, forward and backward: on ranks,
beside one process compiled by Inductor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import Column, Result, Row, chosen, error, line_of, long_enough
from ringopt.tools.common.command import CommandError, natural, two_or_more

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench widths --only Llama-3-8B --lengths 1024 --repeats 1
  ringopt bench widths --json widths.json
"""

MIB = 2**20


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench widths`."""
    parser = tables.add_parser(
        "widths",
        parents=[common],
        help="layers of models that people run, as wide as those are, on ranks and on one process",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", metavar="N", nargs="+", type=natural, default=[1024, 2048], help="of the sequence (1024 2048)"
    )
    parser.add_argument("--only", metavar="FAMILY", nargs="+", help="only these, such as Llama-3-8B")
    parser.add_argument("--ranks", metavar="P", type=two_or_more, default=2, help="no more than cores (2)")
    parser.add_argument("--repeats", metavar="N", type=natural, default=2, help="timed steps of each (2)")
    parser.add_argument(
        "--longest", metavar="S", type=natural, default=1800, help="seconds that a row may take (1800)"
    )
    parser.add_argument(
        "--inner", choices=["inductor", "aot_eager"], default="inductor", help="what compiles the graphs (inductor)"
    )
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises LabError where a rank fails, CommandError without transformers."""
    from ringopt.tools.benchmarks.models.real_widths import FAMILIES
    from ringopt.tools.benchmarks.workers.widths import Wide, widths_of

    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise CommandError(f"the models are those of transformers: {error}; pip install transformers") from error
    names = chosen(arguments.only, list(FAMILIES))
    long_enough(arguments.lengths, arguments.ranks)
    cases = [(name, length) for name in names for length in arguments.lengths]
    rows = list[Row]()
    for name, length in progress.track(cases, description="layers"):
        wide = Wide(FAMILIES[name], length, arguments.repeats, arguments.inner)
        found = widths_of(wide, arguments.ranks, float(arguments.longest))
        rows.append({"family": name, "length": length, "ranks": arguments.ranks} | found)
        progress.console.print(line_of(rows[-1], COLUMNS), markup=False, soft_wrap=True)
    smaller = tuple(f"{name}: {FAMILIES[name].smaller}." for name in names if FAMILIES[name].smaller)
    return Result(TITLE.format(arguments.ranks), COLUMNS, rows, _totals(rows), (), NOTES + smaller, KEYS)


def _totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    return {"rows": len(rows), "wrong": sum(row["error"] > WRONG for row in rows)}


def _size(key: str, heading: str) -> Column:
    return Column(heading, lambda row: "-" if row[key] is None else f"{row[key] / MIB:,.0f}")


def _seconds(key: str, heading: str) -> Column:
    return Column(heading, lambda row: f"{row[key]:.1f}")


TITLE = "Two layers at real widths on {} ranks, float32, one thread each, forward and backward; s, MiB"
WHO = {"alone_": "alone", "": "ranks"}
KEYS = ("family", "length", "ranks")
COLUMNS = (
    Column("layers of", lambda row: row["family"], right=False),
    Column("M p.", lambda row: f"{row['parameters'] / 1e6:,.0f}"),
    Column("n", lambda row: f"{row['length']:,}"),
    *(_seconds(f"{who}first", f"{name}\nfirst") for who, name in WHO.items()),
    *(_seconds(f"{who}seconds", f"{name}\ns") for who, name in WHO.items()),
    Column("times\nas fast", lambda row: f"{row['alone_seconds'] / row['seconds']:.2f}"),
    *(_size(f"{who}kept", f"{name}\nkept") for who, name in WHO.items()),
    *(_size(f"{who}peak", f"{name}\npeak") for who, name in WHO.items()),
    _size("sent", "sent"),
    Column("error", error("error")),
)
NOTES = (
    "alone: one of the processes, by Inductor as written, while the others wait, by turns. s: the slowest rank's "
    "median. first: the first step, compiled anew. times as fast: alone / ranks.",
    "kept: what is held beside parameters between forward and backward. peak: the most in a step beside parameters, "
    "their gradients and messages of these among it. Both of the rank that has most. sent: by all ranks in a step, "
    "gradients among it.",
    "error: from one process, relative to the largest entry: of the loss, and of 4,096 entries of each gradient.",
    "M p.: millions of parameters; weights are random, and the vocabulary has 1,024 words.",
)
