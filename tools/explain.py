"""`ringopt explain`: a dry run in one process that reports what the backend would do on N ranks."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ringopt.errors import RingError
from ringopt.tools.command import CommandError, json_object, load_example, positive

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLE = """\
example:
  # my_models.py
  def tiny():
      return MyModel(), (torch.zeros(1, 4096, dtype=torch.long),)       # or a dict of keyword arguments

  ringopt explain my_models:tiny --world-size 8 --options '{"layout": "zigzag"}'
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="report what the backend does with a model on N ranks, without running it",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="module:factory; factory() returns (model, inputs)")
    parser.add_argument("--world-size", metavar="N", type=positive, required=True, help="number of ranks")
    parser.add_argument("--options", metavar="JSON", type=json_object, default={}, help="options of the backend")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import ringopt

    example = load_example(arguments.target)
    try:
        report = ringopt.explain(
            example.model,
            *example.args,
            world_size=arguments.world_size,
            options=arguments.options,
            **example.kwargs,
        )
    except RingError:
        raise
    except Exception as error:
        raise CommandError(f"{arguments.target} could not be explained: {type(error).__name__}: {error}") from error
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        from rich.console import Console

        Console().print(report)
    return 0
