"""Every causal language model of transformers on ranks: is its loss exact, is every gradient, how much is on shards?

Each type of AutoModelForCausalLM is built tiny, by general rules, in float64, and runs on one process as it is and on
ranks (gloo) compiled by `backend="ring"`. A type that crashes or hangs is a row as well. With --json the run can be
interrupted: the same command takes the types that the file does not have yet. --mapping AutoModel: the same of another
class of transformers' factory. --library: of another library, such as diffusers (its transformers) or timm (a model of
each of its modules).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.names import INNER
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error
from ringopt.tools.benchmarks.libraries import LIBRARIES, models_of
from ringopt.tools.benchmarks.models.judged import judged_apart
from ringopt.tools.common.command import CommandError, check_file, natural, two_or_more, write

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench models --only '^(llama|mixtral)$'
  ringopt bench models --ranks 2 3 --json models.json --html models.html
  ringopt bench models --mapping AutoModel --only 'bert|vit'
  ringopt bench models --library diffusers --only 'Flux|Wan'
  ringopt bench models --library timm --html timm.html
"""

WORKER = "ringopt.tools.benchmarks.models.conformance"
SHARE = 0.95
TRANSFORMERS = "transformers"
CAUSAL = "AutoModelForCausalLM"


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench models`."""
    parser = tables.add_parser(
        "models",
        parents=[common],
        help="every causal language model of transformers (or models of other libraries) on ranks: exact or not",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--library", choices=(TRANSFORMERS, *LIBRARIES), default=TRANSFORMERS, help=f"whose models ({TRANSFORMERS})"
    )
    parser.add_argument(
        "--mapping", metavar="CLASS", nargs="+", default=[CAUSAL], help=f"classes of transformers' factory ({CAUSAL})"
    )
    parser.add_argument("--only", metavar="RE", dest="pattern", help="types that the regular expression is found in")
    parser.add_argument("--ranks", metavar="P", nargs="+", type=two_or_more, default=[2], help="processes (2)")
    parser.add_argument("--seconds", metavar="S", type=natural, default=300, help="for one type on P ranks (300)")
    parser.add_argument(
        "--inner-backend", choices=INNER, default="aot_eager", dest="inner", help="what runs the graphs (aot_eager)"
    )
    parser.add_argument("--again", action="store_true", help="also types that the file of --json has")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the table as a page")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the table as Markdown")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError where no type is chosen, or the file of --json is of another table."""
    for option, target in (("--html", arguments.html), ("--markdown", arguments.markdown)):
        check_file(option, target)
    known = _kept(arguments.json)
    kinds = _kinds(arguments.library, arguments.mapping, arguments.pattern)
    chosen = [(kind, ranks) for kind in kinds for ranks in arguments.ranks]
    left = [key for key in chosen if arguments.again or key not in known]
    for kind, ranks in progress.track(left, description="types"):
        row = known[kind, ranks] = judged_apart(WORKER, kind, ranks, arguments.seconds, arguments.inner)
        progress.console.print(f"{kind}, {ranks} ranks: {row['verdict']} {row['reason']}", markup=False)
        if arguments.json:
            found = {"table": "models", "rows": list(known.values()), "totals": _totals(list(known.values()))}
            write(arguments.json, json.dumps(found, indent=2) + "\n")
    result = _of_rows([known[key] for key in sorted(known)])
    if arguments.html:
        write(arguments.html, _page(result))
    if arguments.markdown:
        write(arguments.markdown, _markdown(result))
    return result


def _kinds(library: str, mappings: Sequence[str], only: str | None) -> list[str]:
    """Those that `only` is found in."""
    what = f"types of {', '.join(mappings)}" if library == TRANSFORMERS else f"models of {library}"
    try:
        names = _of_transformers(mappings) if library == TRANSFORMERS else _of_library(library)
    except ImportError as error:
        raise CommandError(f"the models are those of {library}: {error}; pip install {library}") from error
    try:
        chosen = [name for name in names if re.search(only or "", name)]
    except re.error as error:
        raise CommandError(f"--only {only!r} is not a regular expression: {error}") from error
    if not chosen:
        raise CommandError(f"--only {only!r}: none of {len(names)} {what} has it in its name")
    return chosen


def _of_transformers(mappings: Sequence[str]) -> list[str]:
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    found: list[str] = []
    for mapping in mappings:
        factory = getattr(transformers, mapping, None)
        if not (isinstance(factory, type) and issubclass(factory, _BaseAutoModelClass)):
            raise CommandError(f"--mapping {mapping}: not a class of transformers' factory, such as AutoModel")
        names = list(factory._model_mapping._model_mapping)  # type: ignore[attr-defined]
        found += names if mapping == CAUSAL else [f"{mapping}/{name}" for name in names]
    return found


def _of_library(library: str) -> list[str]:
    return [f"{library}/{name}" for name in models_of(library).kinds()]


def _kept(target: Path | None) -> dict[tuple[str, int], Row]:
    """The rows of an earlier run."""
    if target is None or not target.exists():
        return {}
    try:
        found = json.loads(target.read_text())
    except ValueError as error:
        raise CommandError(f"--json {target}: a file that is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("table") != "models":
        raise CommandError(f"--json {target}: a file that `ringopt bench models` did not write; name another")
    return {(row["type"], row["ranks"]): row for row in found["rows"]}


def _of_rows(rows: list[Row]) -> Result:
    return Result(TITLE, COLUMNS, rows, _totals(rows), (_sentence(_totals(rows)),), NOTES, KEYS)


def _totals(rows: list[Row]) -> Row:
    count: Row = {name: sum(row["verdict"] == name for row in rows) for name in VERDICTS}
    shared = sum(row["share"] is not None and row["share"] >= SHARE for row in rows)
    refused = sum(row["hf"] is False for row in rows)
    exact = sum(row["hf"] is False and row["verdict"] == "exact" for row in rows)
    return {"types": len(rows), **count, "at_95": shared, "hf_refuses": refused, "hf_refuses_exact": exact}


def _sentence(sums: Row) -> str:
    counted = ", ".join(f"{sums[name]} {name}" for name in VERDICTS if sums[name] or name in ("exact", "wrong"))
    return (
        f"{sums['types']} rows: {counted}; in {sums['at_95']} at least {SHARE:.0%} of the matrix work is on shards. "
        f"the library's own context parallelism refuses {sums['hf_refuses']} of them, of which "
        f"{sums['hf_refuses_exact']} are exact here"
    )


def _markdown(result: Result) -> str:
    head = [column.heading.replace("\n", " ") for column in result.columns]
    sides = ["---:" if column.right else "---" for column in result.columns]
    cells = [[column.cell(row).replace("|", r"\|") for column in result.columns] for row in result.rows]
    lines = ["| " + " | ".join(line) + " |" for line in (head, sides, *cells)]
    return "\n".join([*result.sentences, "", *lines, ""])


def _page(result: Result) -> str:
    """The table as it is printed, in HTML."""
    from io import StringIO

    from rich.console import Console

    console = Console(record=True, file=StringIO(), width=200)
    console.print(result.rich(), *result.sentences, *result.notes, sep="\n", markup=False)
    return console.export_html()


def _rule(row: Row) -> str:
    return {None: "", True: "takes it", False: "refuses it"}[row["hf"]]


VERDICTS = ("exact", "wrong", "error", "hang", "not built")
TITLE = "Models of a library, tiny, on ranks"
KEYS = ("type", "ranks")
COLUMNS = (
    Column("type", lambda row: row["type"], right=False),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("", lambda row: row["verdict"], right=False),
    Column("error", error("error")),
    Column("on\nshards", lambda row: "" if row["share"] is None else f"{row['share']:.1%}"),
    Column("at another\nlength", lambda row: "" if row.get("later") is None else f"{row['later']:.1%}"),
    Column("bytes\na token", lambda row: "" if row["bytes"] is None else f"{row['bytes']:,.0f}"),
    Column("by\nattentions", lambda row: "" if row["by_sites"] is None else f"{row['by_sites']:,.0f}"),
    Column("memory", lambda row: "" if row.get("memory") is None else f"{row['memory']:.0%}"),
    Column("compile,\ns", lambda row: "" if row["compile"] is None else f"{row['compile']:.0f}"),
    Column("Inductor,\ns", lambda row: "" if row.get("by_inductor") is None else f"{row['by_inductor']:.0f}"),
    Column("the library", _rule, right=False),
    Column("first reason", lambda row: row["reason"], right=False),
)
NOTES = (
    "error: of the loss and every gradient in float64, from one process, relative to the largest entry of each; exact "
    "up to 1e-8, or ten times what the last bit of every weight moves it (BatchNorm over two values), 1e-4 at most.",
    "on shards: share of the matrix work. at another length: of the graphs that a second call compiles, with fewer "
    "tokens in the same process; its numbers count for the error.",
    "bytes a token: sent by a rank in one forward, by all tokens; by attentions (and recurrences): the part that their "
    "plans name; the rest is what gathers and halos send.",
    "memory: the most bytes of tensors that a step takes on a rank beside the weights and their gradients, of what it "
    "takes on one process, as it is.",
    "compile: seconds of the processor that a rank takes for a first step, loss and backward, all caches empty and one "
    "thread; Inductor: the same of the unchanged program on one process (with --inner-backend inductor), if it is done "
    "in the seconds that are left.",
    "the library: whether its own context parallelism takes the model: `supports_context_parallel` of transformers, a "
    "`_cp_plan` of diffusers; the others have none.",
    "first reason: why the first of what is refused or gathered is, with its line.",
)
