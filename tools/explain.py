"""`ringopt explain`: a dry run in one process that reports what the backend would do on N ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ringopt.errors import RingError
from ringopt.tools.common.command import (
    CommandError,
    add_trusted,
    check_file,
    console,
    import_all,
    json_object,
    load_example,
    positive,
    working,
    write_page,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringopt.report import Report
    from ringopt.reporting.history import History

EXAMPLES = """\
module:factory is a function without arguments that returns (model, inputs), inputs a tuple or a dict of keywords; the
current folder is searched first. Of a file that `ringopt convert` wrote, the report that it holds is shown.

examples:
  ringopt explain ringopt.tools.example:tiny --world-size 4 --hardware h100 --options '{"layout": "contiguous"}'
  python -m ringopt.tools.example model.pt2
  ringopt explain model.pt2 --world-size 2 --html report.html
"""

RANKS = 8  # as in ringopt.explain


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt explain`."""
    parser = commands.add_parser(
        "explain",
        help="report what the backend does with a model on N ranks, without running it",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="file of torch.export.save (.pt2), or module:factory")
    parser.add_argument("--world-size", metavar="N", type=positive, help=f"number of ranks (default: {RANKS})")
    parser.add_argument("--hardware", metavar="NAME", help="choose for ranks of this kind, such as h100")
    parser.add_argument("--options", metavar="JSON", type=json_object, default={}, help="options of the backend")
    parser.add_argument("--verbose", action="store_true", help="print every site, value and note")
    parser.add_argument("--json", action="store_true", help="print the report as JSON (see ringopt.Report)")
    parser.add_argument("--html", metavar="FILE", help="also write a page, one file that needs no network")
    parser.add_argument(
        "--import", metavar="MODULE", dest="imports", action="append", default=[], help="import what the file names"
    )
    add_trusted(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    check_file("--html", arguments.html)
    import_all(arguments.imports)
    of_file = arguments.target.endswith(".pt2")
    if not of_file and ":" not in arguments.target:
        raise CommandError(f"{arguments.target!r} is not of the form module:factory, and no file that ends in .pt2")
    histories: list[History] = []
    with working("explain"), recorded_for(arguments.html, histories):
        made, report = report_of_file(arguments) if of_file else ("", _report_of_model(arguments))
    if arguments.html:
        from ringopt.reporting.report_page import report_page

        write_page(arguments.html, report_page(report, arguments.target, histories))
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
        return 0
    if made:
        console().print(made, markup=False)
    console().print(report.rich() if arguments.verbose else report)
    return 0


@contextmanager
def recorded_for(page: str | None, histories: list[History]) -> Iterator[None]:
    """Fills `histories` with the line of passes of each graph, where a page is to show it."""
    if not page:
        yield
        return
    from ringopt.reporting.history import recorded

    with recorded() as found:
        yield
    histories += found


def _report_of_model(arguments: argparse.Namespace) -> Report:
    example = load_example(arguments.target)
    return _explained(arguments, example.model, *example.args, **example.kwargs)


def report_of_file(arguments: argparse.Namespace) -> tuple[str, Report]:
    """The report, and where it comes from if the file has it."""
    from ringopt.frontend.pt2.archive import blamed, load_with_provenance

    program, made = load_with_provenance(arguments.target, trusted=arguments.trusted)
    if made is not None:
        return kept(arguments, made)
    with blamed(arguments.target, "explained"):
        return "", _asked(arguments, program)


def _explained(arguments: argparse.Namespace, model: Any, *args: Any, **kwargs: Any) -> Report:
    try:
        return _asked(arguments, model, *args, **kwargs)
    except RingError:
        raise
    except Exception as error:
        raise CommandError(f"{arguments.target} could not be explained: {type(error).__name__}: {error}") from error


def _asked(arguments: argparse.Namespace, model: Any, *args: Any, **kwargs: Any) -> Report:
    import ringopt

    how = {name: getattr(arguments, name) for name in ("options", "hardware")}
    how["world_size"] = arguments.world_size or RANKS
    return ringopt.explain(model, *args, **how, **kwargs)


def kept(arguments: argparse.Namespace, made: dict[str, Any]) -> tuple[str, Report]:
    """What a converted file holds."""
    import ringopt
    from ringopt.frontend.pt2.archive import blamed

    target, by = arguments.target, made["ringopt"]
    if by != ringopt.__version__:
        raise CommandError(f"{target} was converted by ringopt {by}, and this is {ringopt.__version__}; use that one")
    with blamed(target, "explained"):
        report = ringopt.Report.from_dict(made["report"])
        for verbose in (False, True):  # a damaged one fails here, not while it is printed
            report.text(verbose=verbose)
    if arguments.options or arguments.hardware or arguments.world_size not in (None, report.world_size):
        raise CommandError(
            f"{target} was converted already and holds the report for {report.world_size} ranks; leave out "
            "--world-size, --hardware and --options, or explain the program that it was made from"
        )
    options = ", ".join(f"{name}={value}" for name, value in made["options"].items())
    return f"converted by ringopt {by} with torch {made['torch']}; options {options}", report
