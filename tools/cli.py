"""The console script `ringopt`: reads the command line and hands it to the command.

A command is a module of this folder with `add(commands)`, which describes it to argparse, and `run(arguments)`, which
returns the exit code.
Torch is imported when a command runs, so that --help and --version are quick.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import ringopt
from ringopt.errors import RingError, meant
from ringopt.output.printable import printable
from ringopt.tools import bench, convert, diff, doctor, explain, passes, plan, timeline
from ringopt.tools.common.command import SHOWN, CommandError

# Exit codes: 0 done, 1 diff found differences, 2 a usage error (argparse uses 2 as well) or the command failed; and as
# shells have them, 130 after Ctrl-C, 141 where whoever read the output left.
FAILED, INTERRUPTED, UNREAD = 2, 130, 141
CHOICES = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)")

OPTIONS = re.compile(r"--[\w-]+")
# What an option is called elsewhere: by torchrun, and by `ringopt bench`.
ELSEWHERE = {"--ranks": "--world-size", "--nproc-per-node": "--world-size", "--nproc_per_node": "--world-size"}


class Parser(argparse.ArgumentParser):
    """A wrong use is one line, like every other error of this program. (Subcommands get parsers of this class too.)"""

    def error(self, message: str) -> NoReturn:
        choice = CHOICES.search(message)
        if choice is not None:
            message += meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        self.exit(FAILED, f"ringopt: error: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An option that is unknown is an error of the command that was asked for, which knows what it has."""
        chosen, rest = self.parse_known_args(args, namespace)
        if rest:
            known = [option for parser in self.asked(chosen) for option in OPTIONS.findall(parser.format_help())]
            first = rest[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(rest)}{meant(ELSEWHERE.get(first, first), known)}")
        return chosen

    def add_subparsers(self, **kwargs: Any) -> Any:
        commands = super().add_subparsers(**kwargs)
        self.commands = commands.choices
        return commands

    def asked(self, chosen: argparse.Namespace) -> Iterator[Parser]:
        """This one, and those of the commands below it that were chosen."""
        yield self
        for name, below in getattr(self, "commands", {}).items():
            if name in vars(chosen).values():
                yield from below.asked(chosen)


def parser() -> argparse.ArgumentParser:
    """The parser of `ringopt` and all of its commands."""
    top: argparse.ArgumentParser = Parser(
        prog="ringopt", description="Look at what torch.compile(model, backend='ring') does."
    )
    top.add_argument("--version", action="version", version=f"ringopt {ringopt.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    explain.add(commands)
    diff.add(commands)
    convert.add(commands)
    bench.add(commands)
    timeline.add(commands)
    plan.add(commands)
    doctor.add(commands)
    passes.add(commands)
    for one in (top, *commands.choices.values()):
        left_out = argparse.SUPPRESS  # so that `ringopt --quiet explain` is `ringopt explain --quiet`
        one.add_argument("--quiet", action="store_true", default=left_out, help="no progress and no warnings")
        one.add_argument("--no-color", action="store_true", default=left_out, help="as NO_COLOR=1 does")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    top = parser()
    chosen = top.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may know fewer letters than a program uses
    if chosen.command is None:
        top.print_help()
        return 0
    SHOWN.quiet, SHOWN.colour = hasattr(chosen, "quiet"), not hasattr(chosen, "no_color")
    logging.getLogger("ringopt").setLevel(logging.ERROR if SHOWN.quiet else logging.getLogger("ringopt").level)
    try:
        code = int(chosen.run(chosen))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("ringopt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        read_no_more()
        return UNREAD
    except (CommandError, RingError) as error:
        if error.__cause__ is not None:
            print(printable("".join(traceback.format_exception(error.__cause__))), end="", file=sys.stderr)
        return _failed(str(error))
    except Exception as error:  # Python's own exit code would be 1, which says of a diff that there is a difference
        print(printable("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return _failed(f"{type(error).__name__}: {error} (an error of ringopt itself; please report it)")


def read_no_more() -> None:
    """Python flushes standard output when it ends, and would say that nobody reads it."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(sentence: str) -> int:
    print(f"ringopt: error: {' '.join(printable(sentence).split())}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
