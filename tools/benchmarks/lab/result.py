"""What a table of `ringopt bench` found, as data that is printed or written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringopt.tools.common.command import CommandError

if TYPE_CHECKING:
    from rich.table import Table

# Inference is a call under no_grad, training a call and its backward.
MODES = {"inference": False, "training": True}

# What was measured in one row, by name: numbers, texts, booleans; None where there is nothing to measure.
Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the text of a row's cell. `right`: aligned right, as numbers are."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = True


@dataclass(frozen=True)
class Result:
    """`totals` of the rows, by name, and as `sentences`; `notes` say how to read the columns; `keys` of a row tell what
    was measured, all others what was found."""

    title: str
    columns: tuple[Column, ...]
    rows: list[Row]
    totals: Row
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    keys: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": self.rows, "totals": self.totals, "notes": list(self.notes)}

    def rich(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in self.columns:
            side = "right" if column.right else "left"
            table.add_column(column.heading, justify=side, overflow="fold")  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(column.cell(row) for column in self.columns))
        return table


def line_of(row: Row, columns: Sequence[Column]) -> str:
    """A row, shown when it is there: rows that take minutes may be all there is of a run that is cut off."""
    name, *others = columns
    cells = (f"{column.heading.replace(chr(10), ' ')} {column.cell(row)}" for column in others)
    return f"{name.cell(row)}: {'; '.join(cells)}"


def error(key: str) -> Callable[[Row], str]:
    """Shows a relative difference."""
    return lambda row: "-" if row[key] is None else f"{row[key]:.0e}"


def long_enough(lengths: Sequence[int], ranks: int) -> None:
    """For a zigzag, in which each rank has two pieces. Raises CommandError."""
    for length in lengths:
        if length < 2 * ranks:
            raise CommandError(f"--lengths {length}: {ranks} ranks share {2 * ranks} rows or more")


def chosen(only: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Those of `known` that --only names, in the order of `known`. Raises CommandError for a name that is none."""
    for name in only or ():
        if name not in known:
            raise CommandError(f"--only {name}: expected one of {', '.join(known)}")
    return [name for name in known if not only or name in only]
