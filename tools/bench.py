"""`ringopt bench`: measures this machine, ringopt beside the alternatives in one run, and whether the numbers agree."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ringopt.errors import RingError
from ringopt.tools.benchmarks.lab.against import compared, earlier
from ringopt.tools.benchmarks.tables import (
    calibrate,
    dilated,
    dropout,
    exchange,
    forms,
    gpu,
    kernels,
    launches,
    memory,
    models,
    one_process,
    overlap,
    passes,
    scan,
    soak,
    speedup,
    training,
    widths,
)
from ringopt.tools.common.command import CommandError, check_file, console, progress, write

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringopt.tools.benchmarks.lab.machine import Machine
    from ringopt.tools.benchmarks.lab.result import Result

EXAMPLES = """\
examples:
  ringopt bench --calibrate
  ringopt bench one-process --lengths 1024 --repeats 3 --json bench.json
"""

TABLES = (
    *(forms, one_process, overlap, kernels, gpu, launches, exchange),
    *(speedup, scan, memory, soak, dilated, dropout, training, widths, passes, models),
)


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine: ringopt beside Inductor, with a column of correctness",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", metavar="FILE", type=Path, help="also write machine, rows and totals as JSON")
    common.add_argument("--against", metavar="FILE", type=Path, help="the JSON of an earlier run, to compare with")
    parser.add_argument(
        "--calibrate", action="store_true", help=f"in place of a table: {calibrate.__doc__.split('.')[0]}"
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="with --calibrate: the link between nodes, such as infiniband-ndr, which one machine cannot measure",
    )
    tables = parser.add_subparsers(title="tables", metavar="TABLE", dest="table")
    for table in TABLES:
        table.add(tables, common)
    parser.set_defaults(run=_run, measure=None, json=None, against=None, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    from ringopt.tools.benchmarks.lab.machine import this_machine

    if (arguments.measure is None) is not arguments.calibrate:
        arguments.parser.error("expected a TABLE, or --calibrate")
    if arguments.network is not None and not arguments.calibrate:
        arguments.parser.error("--network is part of --calibrate")
    check_file("--json", arguments.json)
    before = earlier(arguments.against, arguments.table) if arguments.against else None
    result = _measured(arguments)
    machine = this_machine()
    show(machine, result)
    if arguments.json:
        _write_json(arguments.json, arguments.table, machine, result)
    if before is not None:
        table, notes = compared(before, result, machine)
        console().print(table, *notes, sep="\n", markup=False)
    return 0


def _measured(arguments: argparse.Namespace) -> Result:
    try:
        with progress() as bar:
            run = arguments.measure
            result: Result = calibrate.measure(bar, arguments.network) if run is None else run(arguments, bar)
    except (CommandError, RingError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommandError(f"the measurement failed: {type(error).__name__}: {reason}") from error
    return result


def show(machine: Machine, result: Result) -> None:
    """Prints a table with its machine, sentences and notes."""
    console().print(str(machine), result.rich(), *result.sentences, *result.notes, sep="\n", markup=False)


def _write_json(target: Path, table: str, machine: Machine, result: Result) -> None:
    found = {"table": table, "machine": dataclasses.asdict(machine), **result.to_dict()}
    write(target, json.dumps(found, indent=2) + "\n")
