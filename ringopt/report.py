"""What ringopt did with a graph and why, as data that prints itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderHook, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ringopt.output.printable import printable

WIDTH = 100  # columns of a report as text
ALIKE = 8  # sites that read the same and are still told one by one


@dataclass(frozen=True)
class Site:
    """One attention site, or one recurrence (form "scan"). `refusal` is None where it was rewritten, else the reason;
    `not_dilated` is why the options' dilation is not applied, None where it is or was not asked for; `bytes_sent` is
    per rank, forward; `source` is the line of the program that it comes from, "" where that is not known."""

    module: str
    form: str
    pattern: str
    strategy: str
    kernel: str
    layout: str
    refusal: str | None
    bytes_sent: int
    notes: tuple[str, ...] = ()
    source: str = ""
    not_dilated: str | None = None


@dataclass(frozen=True)
class Gather:
    """A gather that sharding needed: `bytes` is the size of the whole value, `source` the line that needs it."""

    op: str
    why: str
    bytes: int
    module: str
    source: str = ""


@dataclass(frozen=True)
class Output:
    """An output that is not gathered: `form` is "lazy" (gathered when it is read) or "local" (this rank's rows of
    `placement`, as `layout` says); `bytes` is the size of the whole value."""

    name: str
    form: str
    placement: str
    layout: str
    bytes: int


@dataclass(frozen=True)
class Report:
    """One compiled graph, or (from explain) all graphs of a model.

    sites             attention sites in order
    left_alone        what looks like attention and is none, with the reason
    gathers           values that were needed whole
    outputs           values returned without being gathered
    sharded_fraction  share of the matrix FLOPs that run on this rank's rows only
    memory            bytes per rank by cause
    bytes_sent        per rank, one forward pass (ringopt/ops/traits.py); of rows picked by a tensor of numbers, at most
    refusal           why the whole graph was left unsharded, or None
    """

    world_size: int
    sites: tuple[Site, ...] = ()
    left_alone: tuple[str, ...] = ()
    gathers: tuple[Gather, ...] = ()
    outputs: tuple[Output, ...] = ()
    sharded_fraction: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields under their names, those of Site and Gather too; JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`, also after JSON made lists of tuples."""
        sites = tuple(Site(**{**site, "notes": tuple(site["notes"])}) for site in data["sites"])
        gathers = tuple(Gather(**gather) for gather in data["gathers"])
        outputs = tuple(Output(**output) for output in data["outputs"])
        texts = {name: tuple(data[name]) for name in ("left_alone", "notes")}
        return cls(**{**data, **texts, "sites": sites, "gathers": gathers, "outputs": outputs})

    @classmethod
    def merged(cls, reports: Iterable[Report], world_size: int) -> Report:
        """One report of all graphs of a model; `sharded_fraction` is that of the graph with most sites."""
        parts = list(reports)
        if len(parts) == 1:
            return parts[0]
        memory: dict[str, int] = {}
        for part in parts:
            for cause, size in part.memory.items():
                memory[cause] = memory.get(cause, 0) + size
        largest = max(parts, key=lambda part: len(part.sites), default=cls(world_size))
        return cls(
            world_size,
            tuple(site for part in parts for site in part.sites),
            tuple(reason for part in parts for reason in part.left_alone),
            tuple(gather for part in parts for gather in part.gathers),
            tuple(output for part in parts for output in part.outputs),
            largest.sharded_fraction,
            memory,
            sum(part.bytes_sent for part in parts),
            "; ".join(part.refusal for part in parts if part.refusal) or None,
            tuple(note for part in parts for note in part.notes),
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Plainly(self.rich())

    def __str__(self) -> str:
        console = Console(width=WIDTH, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def rich(self) -> Group:
        parts: list[Any] = [_site_table(self), *(text for site in self.sites for text in _refusals(site))]
        reasons = Counter(note for site in self.sites for note in site.notes)
        parts += [Text(f"{count} of {len(self.sites)} sites: {note}") for note, count in reasons.items()]
        if self.gathers:
            parts.append(_gather_table(self))
        for output in self.outputs:
            how = f"{output.form}, {output.placement} {output.layout}"
            parts.append(Text(f"not gathered: {output.name}, {bytes_text(output.bytes)} in all ({how})"))
        parts += [Text(f"left alone: {reason}") for reason in self.left_alone]
        parts += [Text(f"note: {note}") for note in self.notes]
        if self.refusal:
            parts.append(Text(f"not sharded: {self.refusal}", style="yellow"))
        if any(self.memory.values()):
            parts.append(Stack("memory of this rank", self.memory))
        parts.append(
            Text(f"sharded {self.sharded_fraction:.1%} of matrix FLOPs; sends {bytes_text(self.bytes_sent)} a forward")
        )
        return Group(*parts)


@dataclass(frozen=True)
class Plainly:
    """What `shown` prints, its text as it may be shown to a terminal; its colours stay."""

    shown: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.shown, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class PrintedPlainly(RenderHook):
    """For a console: all that it prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Plainly(shown) for shown in renderables]


def _site_table(report: Report) -> Table:
    scans = sum(site.form == "scan" for site in report.sites)
    found = several(len(report.sites) - scans, "attention site") + (f" and {several(scans, 'scan')}" if scans else "")
    table = Table(title=f"ringopt: {found} on {several(report.world_size, 'rank')}", title_justify="left")
    for name in ("module", "form", "pattern", "strategy", "layout", "kernel"):
        table.add_column(name, overflow="fold")
    table.add_column("sent", justify="right")
    for cells in fold_alike([_site_cells(site) for site in report.sites]):
        table.add_row(*map(escape, cells))
    return table


def _site_cells(site: Site) -> tuple[str, ...]:
    end = (site.strategy, site.layout, site.kernel, bytes_text(site.bytes_sent))
    return (site.module or "-", site.form, site.pattern, *end)


def fold_alike(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows that are alike but for their first cell as one, where there are more than ALIKE of them."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault(tuple(cells), []).append(name)
    for name, *cells in rows:
        names = alike[tuple(cells)]
        if len(names) <= ALIKE:
            yield (name, *cells)
        elif name == names[0]:
            yield (f"{name} and {len(names) - 1} like it, to {names[-1]}", *cells)


def _refusals(site: Site) -> Iterator[Text]:
    where = f" ({site.source})" if site.source else ""
    for what, reason in (("refused", site.refusal), ("not dilated", site.not_dilated)):
        if reason and (what == "refused" or reason != site.refusal):
            yield Text(f"{what}: {site.module or 'attention'}: {reason}{where}", style="yellow")


def _gather_table(report: Report) -> Table:
    table = Table(title="values needed whole", title_justify="left")
    table.add_column("op")
    table.add_column("why", overflow="fold")
    table.add_column("bytes", justify="right")
    for gather in report.gathers:
        where = f" ({gather.source})" if gather.source else ""
        table.add_row(gather.op, escape(gather.why + where), bytes_text(gather.bytes))
    return table


@dataclass(frozen=True)
class Stack:
    """Bytes by cause as bars, one a line, each drawn from where the one before ends."""

    title: str
    parts: Mapping[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total, start, names = sum(self.parts.values()), 0, max(map(len, self.parts))
        room, mark = options.max_width - names - 21, "#" if options.ascii_only else "\u2588"
        yield Text(f"{self.title}: {bytes_text(total)}")
        for name, size in self.parts.items():
            first, last = (round(max(room, 0) * place / total) for place in (start, start + size))
            bar = " " * first + mark * (last - first)
            yield Text(f"  {name:<{names}}  {bytes_text(size):>9}  {size / total:>4.0%}  {bar}", no_wrap=True)
            start += size


def bytes_text(size: float) -> str:
    """A number of bytes in the binary unit that fits: "512 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def several(number: int, what: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def counted(number: float) -> str:
    """With three digits: 3.86 G, 126 P."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if number < 999.5:
            return f"{number:.3g} {unit}".rstrip()
        number /= 1000
    return f"{number:,.0f} E" if number >= 99.5 else f"{number:.3g} E"
