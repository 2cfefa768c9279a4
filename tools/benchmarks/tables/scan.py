"""Layers that are recurrences (a gated delta net, Mamba2), forward and backward: on one process, beside Inductor of the
same program; and on ranks, their scan on shards beside the same program with its scan gathered."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import Column, Result, Row, chosen, error, line_of
from ringopt.tools.common.command import CommandError, natural, two_or_more

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench scan --lengths 1024 4096 --unrolled 4096
  ringopt bench scan --only mamba2 --json scan.json
"""

MIB = 2**20


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench scan`."""
    parser = tables.add_parser(
        "scan",
        parents=[common],
        help="recurrent layers on one process and on ranks, beside Inductor and beside a gathered scan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", metavar="N", nargs="+", type=natural, default=[2048, 16384], help="of the sequence (2048 16384)"
    )
    parser.add_argument(
        "--unrolled",
        metavar="N",
        type=natural,
        default=2048,
        help="the longest at which Inductor is given the program as written, whose graph grows with the length; at "
        "longer ones a loop is torch's scan, of which Dynamo traces one step (2048)",
    )
    parser.add_argument(
        "--heads", metavar="H", type=natural, default=4, help="of 64 numbers each: layers are H x 64 wide (4)"
    )
    parser.add_argument("--ranks", metavar="P", type=two_or_more, default=2, help="no more than cores (2)")
    parser.add_argument("--repeats", metavar="N", type=natural, default=3, help="timed steps of each (3)")
    parser.add_argument(
        "--only",
        metavar="LAYER",
        nargs="+",
        help='only these layers: "gated delta net", "mamba2", "mamba2, multiplied"',
    )
    parser.add_argument(
        "--longest", metavar="S", type=natural, default=900, help="seconds that each may take, compilation too (900)"
    )
    parser.add_argument(
        "--inner", choices=["inductor", "aot_eager"], default="inductor", help="what compiles the graphs (inductor)"
    )
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises LabError where a rank fails, CommandError for lengths that are not whole chunks of every rank."""
    from ringopt.tools.benchmarks.models.recurrent_layers import CHUNK, LAYERS
    from ringopt.tools.benchmarks.workers.scan import row_of

    names, least = chosen(arguments.only, list(LAYERS)), CHUNK * arguments.ranks
    for length in arguments.lengths:
        if length % least:
            raise CommandError(
                f"--lengths {length}: {arguments.ranks} ranks have whole chunks of {CHUNK}: a multiple of {least}"
            )
    cases = [(name, length) for name in names for length in arguments.lengths]
    ranks, repeats, longest = arguments.ranks, arguments.repeats, float(arguments.longest)
    inner, unrolled = arguments.inner, arguments.unrolled
    rows = list[Row]()
    for name, length in progress.track(cases, description="layers"):
        as_written = length <= unrolled
        rows.append(row_of((name, arguments.heads), length, ranks, repeats, longest, inner, as_written=as_written))
        progress.console.print(line_of(rows[-1], COLUMNS), markup=False, soft_wrap=True)
    failed = tuple(f"{row['layer']}, n = {row['length']}, as written: {row['failed']}" for row in rows if row["failed"])
    return Result(TITLE, COLUMNS, rows, _totals(rows), (), NOTES + failed, KEYS)


def _totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    errors = [row[key] for row in rows for key in ("ring_error", "plain_error", "states_error")]
    return {"rows": len(rows), "wrong": sum(found is not None and found > WRONG for found in errors)}


def _number(key: str, heading: str, scale: float = 1.0, form: str = ",.0f") -> Column:
    return Column(heading, lambda row: "-" if row[key] is None else format(row[key] / scale, form))


def _ratio(key: str, other: str, heading: str) -> Column:
    return Column(heading, lambda row: f"{row[key] / row[other]:.2f}" if row[key] and row[other] else "-")


BACKENDS = {"ring": "ring", "plain": "as written"}
TITLE = "A recurrent layer, heads of 64, float32, one thread a process, forward and backward"
KEYS = ("layer", "heads", "length", "ranks")
COLUMNS = (
    Column("layer", lambda row: row["layer"], right=False),
    _number("heads", "heads"),
    _number("length", "n"),
    *(_number(f"{who}_compile", f"{name}\nfirst, s", form=".1f") for who, name in BACKENDS.items()),
    *(_number(f"{who}_seconds", f"{name}\nms", 1e-3) for who, name in BACKENDS.items()),
    _ratio("ring_seconds", "plain_seconds", "ratio"),
    _ratio("ring_bytes", "plain_bytes", "mem.\nratio"),
    Column("nodes", lambda row: f"{row['ring_written']} > {row['ring_nodes']}"),
    _number("states_seconds", "p ranks\nms", 1e-3),
    _number("faster_states", "times\nalone", form=".2f"),
    _number("faster_heads", "same,\nall-to-all", form=".2f"),
    _number("faster_gathered", "same,\ngathered", form=".2f"),
    _number("faster_apart", "at\nmost", form=".2f"),
    _ratio("states_bytes", "gathered_bytes", "mem.\nratio"),
    _number("sent", "sent\nKiB", 2**10),
    _number("formula", "told\nKiB", 2**10),
    Column("error", lambda row: error("error")({"error": max(row["ring_error"], row["states_error"])})),
)
NOTES = (
    "as written: by Inductor alone, up to --unrolled tokens; beyond, the loop over chunks is torch's scan. first: the "
    "first step, compiled anew. ratio: ring / as written, by turns in one process. mem. ratio: peak of a step above "
    "what was resident before it; over ranks, on shards / gathered. nodes: as Dynamo traced it, and as it is compiled.",
    "p ranks: the slowest rank's median, by turns with one process alone (times alone: alone / p ranks), and with the "
    "scan's heads exchanged for tokens (all-to-all), and with the scan gathered, run whole by all ranks, beside rows "
    "of everything else. at most: p programs of n / p tokens each, side by side, which exchange nothing.",
    "sent: for the scan, by all ranks in a step; told: by the sizes of the states. error: of one process and of ranks, "
    "from eager in float64, relative to the largest entry, gradients included.",
)
