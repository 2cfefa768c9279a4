"""The spellings of attention that people write, and what is easily taken for one: who rewrites which?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import MODES, Column, Result, Row, chosen, error

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench forms --json forms.json
  ringopt bench forms --only div_scale softcap over_queries
"""

WHO = ("ringopt", "inductor")


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench forms`."""
    parser = tables.add_parser(
        "forms",
        parents=[common],
        help="26 unfused spellings of attention: found by ringopt, found by Inductor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="FORM", nargs="+", help="only these spellings or look-alikes")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError for an unknown FORM."""
    from ringopt.tools.benchmarks.models.spellings import FORMS, LOOKALIKES

    unfused = [name for name, form in FORMS.items() if not form.fused]
    names = chosen(arguments.only, [*unfused, *LOOKALIKES])
    rows = [look(name, name in LOOKALIKES) for name in progress.track(names, description="forms")]
    sums = totals(rows)
    sentences = tuple(_sentence(who, sums) for who in WHO)
    return Result("Spellings of attention, in float32", COLUMNS, rows, sums, sentences, NOTES, KEYS)


def look(name: str, lookalike: bool) -> Row:
    """`<who>_<mode>`: was it rewritten; `<who>_error`: the larger error of the modes that can be compared."""
    from ringopt.tools.benchmarks.workers.forms import by_inductor, by_ringopt

    row: Row = {"form": name, "lookalike": lookalike}
    for who, find in zip(WHO, (by_ringopt, by_inductor), strict=True):
        findings = {mode: find(name, training) for mode, training in MODES.items()}
        row |= {f"{who}_{mode}": finding.rewritten for mode, finding in findings.items()}
        row[f"{who}_error"] = max(finding.error for finding in findings.values() if finding.error is not None)
    return row


def totals(rows: list[Row]) -> Row:
    """Of the forms, how many were found; of the look-alikes, how many were left alone; and how many rows are wrong."""
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    forms = [row for row in rows if not row["lookalike"]]
    others = [row for row in rows if row["lookalike"]]
    found: Row = {"forms": len(forms), "lookalikes": len(others)}
    for who in WHO:
        for mode in MODES:
            found[f"{who}_{mode}"] = sum(row[f"{who}_{mode}"] for row in forms)
        found[f"{who}_left_alone"] = sum(not any(row[f"{who}_{mode}"] for mode in MODES) for row in others)
        found[f"{who}_wrong"] = sum(row[f"{who}_error"] > WRONG for row in rows)
    return found


def _sentence(who: str, sums: Row) -> str:
    found = ", ".join(f"{sums[f'{who}_{mode}']} of {sums['forms']} in {mode}" for mode in MODES)
    alone = f"left alone {sums[f'{who}_left_alone']} of {sums['lookalikes']} look-alikes"
    return f"{who}: found {found}; {alone}; wrong numbers in {sums[f'{who}_wrong']}"


def _verdict(key: str) -> Column:
    who, _, mode = key.partition("_")

    def cell(row: Row) -> str:
        if row["lookalike"]:
            return "rewritten" if row[key] else "left alone"
        return "found" if row[key] else "-"

    return Column(f"{who},\n{mode}", cell, right=False)


KEYS = ("form",)
COLUMNS = (
    Column("form", lambda row: f"{row['form']} (look-alike)" if row["lookalike"] else row["form"], right=False),
    *(_verdict(f"{who}_{mode}") for mode in MODES for who in WHO),
    *(Column(f"{who},\nerror", error(f"{who}_error")) for who in WHO),
)
NOTES = (
    "found: ringopt shards it on 2 ranks and refuses nothing; a pattern of Inductor's matched.",
    "error: from eager, relative to the largest entry, gradients included; not where dropout draws.",
)
