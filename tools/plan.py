"""`ringopt plan`: memory, bytes, FLOPs and time of a model, for lengths, ranks and hardware that are not at hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ringopt.errors import RingError
from ringopt.output.printable import printable
from ringopt.tools.common.command import (
    CommandError,
    Example,
    add_trusted,
    check_file,
    console,
    import_all,
    json_object,
    load_example,
    natural,
    positive,
    progress,
    write_page,
)

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringopt.planner.plan import Plan

EXAMPLES = """\
examples:
  ringopt plan ringopt.tools.example:tiny --world-size 8 1024 --hardware h100
  ringopt plan ringopt.tools.example:tiny --world-size 64 --lengths 65536 1048576 --formulas
  python -m ringopt.tools.example model.pt2
  ringopt plan model.pt2 --world-size 8 --lengths 65536
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt plan`."""
    parser = commands.add_parser(
        "plan",
        help="predict memory, bytes, FLOPs and time for lengths and numbers of ranks far beyond this machine",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="file of torch.export.save (.pt2), or module:factory")
    parser.add_argument("--world-size", metavar="P", nargs="+", type=positive, default=[512], help="ranks (512)")
    parser.add_argument("--lengths", metavar="N", nargs="+", type=natural, help="tokens (4096 to 16777216)")
    parser.add_argument("--hardware", metavar="NAME", default="h100", help="cpu, p100, v100, a100, h100, h200, b200")
    parser.add_argument("--link", metavar="NAME", help="such as infiniband-ndr (the one that the device comes with)")
    parser.add_argument("--options", metavar="JSON", type=json_object, default={}, help="options of the backend")
    parser.add_argument("--formulas", action="store_true", help="also print the formulas of the exchanges")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw it (.png, .svg, .pdf; needs matplotlib)")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="also write it as a page, one file that needs no network"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--import", metavar="MODULE", dest="imports", action="append", default=[], help="import what the file names"
    )
    add_trusted(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ringopt.planner.plan import PlanRequest, predicted

    check_file("--plot", arguments.plot)
    check_file("--html", arguments.html)
    if arguments.plot:
        from ringopt.tools.plan_pictures import check_matplotlib, check_picture

        check_matplotlib()
        check_picture(arguments.plot)
    asked = PlanRequest.of(
        arguments.world_size, arguments.hardware, arguments.link, arguments.lengths, arguments.options
    )
    import_all(arguments.imports)
    of_file = arguments.target.endswith(".pt2")
    example = of_program(arguments.target, arguments.trusted) if of_file else load_example(arguments.target)
    try:
        with progress() as bar:
            task = bar.add_task("trace", total=None)
            found = predicted(
                example.model, example.args, example.kwargs, asked,
                lambda done, of: bar.update(task, description="predict", completed=done, total=of),
            )  # fmt: skip
    except RingError:
        raise
    except Exception as error:
        raise CommandError(f"{arguments.target} could not be planned: {type(error).__name__}: {error}") from error
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        console().print(found)
        if arguments.formulas:
            _print_formulas(found)
    if arguments.plot:
        from ringopt.tools.plan_pictures import draw

        draw(found, arguments.plot)
    if arguments.html:
        from ringopt.tools.plan_page import plan_page

        write_page(arguments.html, plan_page(found, arguments.target))
    return 0


def of_program(path: str, trusted: bool) -> Example:
    """The module that a .pt2 file makes, with the inputs that it was exported with."""
    from ringopt.frontend.pt2.archive import load_with_provenance

    program, made = load_with_provenance(path, trusted=trusted)
    if made is not None:
        raise CommandError(f"{path} was converted by ringopt {made['ringopt']}; plan the program that it was made from")
    if program.example_inputs is None:
        raise CommandError(f"{path} holds no inputs; plan module:factory, which gives them")
    args, kwargs = program.example_inputs
    return Example(program.module(), tuple(args), dict(kwargs))


def _print_formulas(found: Plan) -> None:
    from ringopt.cost.formulas import LEGEND

    formulas = found.formulas()
    for name, text in formulas.items():
        print(printable(f"\n{name}, one attention on the busiest rank (bytes: on rank r)\n{text}"))
    print("\n" + "\n".join(LEGEND) if formulas else "\nno exchange that was chosen has a closed formula")
