"""`ringopt diff`: what two programs differ in: nodes, placements, bytes, FLOPs, attention, values."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringopt.output.printable import printable
from ringopt.tools.common.command import add_trusted, check_file, console, import_all, positive, working, write_page
from ringopt.tools.common.diff_rules import fail_rule

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ringopt.compare.graph_diff import GraphDiff

OPEN = re.compile(r"\bs\d")  # in a shape, the length or batch size that an export leaves open

EXAMPLES = """\
Exit code: 0 no difference, 1 some, 2 an error; with --fail-on: 0 no rule is broken, 1 one is. Nothing of a file is run,
unless --inputs asks for it.

marks:
  + added   - removed   -+ replaced, or with other arguments   ~ reads other values   = only shape or placement

examples:
  python -m ringopt.tools.example before.pt2
  ringopt convert before.pt2 after.pt2
  ringopt diff before.pt2 after.pt2 --stat
  ringopt diff before.pt2 after.pt2 --world-size 8 --html diff.html
  ringopt diff before.pt2 after.pt2 --inputs random:1
  ringopt diff before.pt2 after.pt2 --format markdown --fail-on bytes+10% --fail-on refused
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt diff`."""
    parser = commands.add_parser(
        "diff",
        help="show what two exported programs differ in",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="A.pt2", help="file of torch.export.save (.pt2), or folder of TORCH_TRACE")
    parser.add_argument("after", metavar="B.pt2", help="the same")
    parser.add_argument(
        "--world-size", metavar="N", type=positive, help="count bytes and FLOPs for N ranks where a file serves any"
    )
    parser.add_argument(
        "--inputs",
        metavar="X",
        help="run both and compare the value and the gradient of every node: a file of torch.save with a tuple or dict "
        "of tensors, or random[:SEED]",
    )
    parser.add_argument(
        "--no-gradients",
        action="store_true",
        help="with --inputs: run no backward, which holds all values of a program",
    )
    parser.add_argument(
        "--fail-on",
        metavar="RULE",
        type=fail_rule,
        action="append",
        default=[],
        help="end with 1 only where bytes, flops, nodes or refused attentions grow (bytes+10%%, nodes+5), or a value "
        "is off (error, error>1e-5); may be repeated",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--all", action="store_true", help="fold nothing")
    shown.add_argument("--stat", action="store_true", help="numbers of nodes by module only")
    shown.add_argument(
        "--format",
        choices=("text", "markdown", "github", "json"),
        help="markdown: for a comment, under 60,000 characters, the most important first; github: annotations",
    )
    shown.add_argument("--json", action="store_true", help="print the diff as JSON (see ringopt.GraphDiff.to_dict)")
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page to look through, one file that needs no network"
    )
    parser.add_argument(
        "--import", metavar="MODULE", dest="imports", action="append", default=[], help="import what the files name"
    )
    add_trusted(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import ringopt

    check_file("--html", arguments.html)
    import_all(arguments.imports)
    before, after, ranks = arguments.before, arguments.after, arguments.world_size
    with working("compare"):
        how = {"trusted": arguments.trusted, "inputs": arguments.inputs, "gradients": not arguments.no_gradients}
        diff = ringopt.diff(before, after, world_size=ranks, **how)
    if arguments.html:
        _write_html(diff, arguments)
    broken = [why for each in arguments.fail_on if (why := each.broken(diff))]
    if arguments.json or arguments.format == "json":
        print(json.dumps(diff.to_dict(), indent=2))
    elif arguments.format in ("markdown", "github"):
        _print_for_ci(diff, arguments, broken)
    elif diff.same:
        gradients = sum(change.gradient is not None for change in diff.changes)
        values = f", {len(diff.compared)} values and {gradients} gradients compared" if diff.compared else ""
        print(f"no difference: {diff.before.nodes} nodes on both sides{values}")
    else:
        _show(diff, arguments)
    for why in broken if arguments.format in (None, "text") else ():
        print(f"broken: {why}")
    return int(bool(broken)) if arguments.fail_on else int(not diff.same)


def _print_for_ci(diff: GraphDiff, arguments: argparse.Namespace, broken: Sequence[str]) -> None:
    from ringopt.tools.diff_ci import github_commands, markdown

    if arguments.format == "markdown":
        print(printable(markdown(diff, arguments.before, arguments.after, broken)), end="")
    else:
        print(printable("\n".join(github_commands(diff, broken))))


def _show(diff: GraphDiff, arguments: argparse.Namespace) -> None:
    from ringopt.tools.diff_text import rendered

    out = console()
    out.print(rendered(diff, arguments.all, arguments.stat), soft_wrap=not out.is_terminal)
    if any(None in (side.bytes_sent, side.flops) for side in (diff.before, diff.after)):
        print(f"unknown: {_why_unknown(diff, arguments.world_size)}")


def _why_unknown(diff: GraphDiff, ranks: int | None) -> str:
    shapes = [view.shape for change in diff.changes for view in (change.before, change.after) if view]
    if any(OPEN.search(shape) for shape in shapes):
        return "sizes of a program are open (s0), so its bytes and FLOPs are not numbers"
    if ranks is None:
        return "a file serves any number of ranks; --world-size N counts its bytes and FLOPs for N"
    return f"what {ranks} ranks send, or compute, depends on what is known only when the program runs"


def _write_html(diff: GraphDiff, arguments: argparse.Namespace) -> None:
    from ringopt.reporting.diff_page import diff_page

    write_page(arguments.html, diff_page(diff, arguments.before, arguments.after))
