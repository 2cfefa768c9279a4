"""The console script `ringopt`: reads the command line and hands it to the command.

A command is a module of this folder with `add(commands)`, which describes it to argparse, and `run(arguments)`, which
returns the exit code.
Torch is imported when a command runs, so that --help and --version are quick.
"""

from __future__ import annotations

import argparse
import io
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import ringopt
from ringopt.errors import RingError
from ringopt.output.printable import printable
from ringopt.tools import bench, convert, diff, doctor, explain, passes, plan, timeline
from ringopt.tools.common.command import CommandError

# Exit codes: 0 done, 1 diff found differences, 2 a usage error (argparse uses 2 as well) or the command failed.
FAILED = 2


class Parser(argparse.ArgumentParser):
    """A wrong use is one line, like every other error of this program. (Subcommands get parsers of this class too.)"""

    def error(self, message: str) -> NoReturn:
        self.exit(FAILED, f"ringopt: error: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of `ringopt` and all of its commands."""
    top: argparse.ArgumentParser = Parser(
        prog="ringopt", description="Look at what torch.compile(model, backend='ring') does."
    )
    top.add_argument("--version", action="version", version=f"ringopt {ringopt.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    explain.add(commands)
    diff.add(commands)
    convert.add(commands)
    bench.add(commands)
    timeline.add(commands)
    plan.add(commands)
    doctor.add(commands)
    passes.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    chosen = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may know fewer letters than a program uses
    try:
        return int(chosen.run(chosen))
    except (CommandError, RingError) as error:
        if error.__cause__ is not None:
            print(printable("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
        return _failed(str(error))
    except Exception as error:  # Python's own exit code would be 1, which says of a diff that there is a difference
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return _failed(f"{type(error).__name__}: {error} (an error of ringopt itself; please report it)")


def _failed(sentence: str) -> int:
    print(f"ringopt: error: {' '.join(printable(sentence).split())}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
