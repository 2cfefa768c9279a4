"""What ringopt did with a graph and why, as data that prints itself."""

from __future__ import annotations

import dataclasses
import html
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ringopt.output.drawn import MaskPicture, ModuleFigures, Prediction
from ringopt.output.files import write_whole
from ringopt.output.plainly import Plainly
from ringopt.output.printable import printable

WIDTH = 100  # columns of a report as text
ALIKE = 8  # sites that read the same and are still told one by one


@dataclass(frozen=True)
class Site:
    """One attention site, or one recurrence (form "scan"). `refusal` is None where it was rewritten, else the reason;
    `not_dilated` is why the options' dilation is not applied, None where it is or was not asked for; `bytes_sent` is
    per rank, forward; `source` is the line of the program that it comes from, "" where that is not known; `by_rows`: it
    was refused, and yet a rank computes the rows of its own queries only, with keys and values whole; `predictions`: of
    the strategies that were compared, the chosen one first; `picture`: its mask, None where sizes are open."""

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
    by_rows: bool = False
    predictions: tuple[Prediction, ...] = ()
    picture: MaskPicture | None = None


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


@dataclass(frozen=True, repr=False)
class Report:
    """One compiled graph, or (from explain) all graphs of a model.

    sites             attention sites in order
    left_alone        what looks like attention and is none, with the reason
    gathers           values that were needed whole
    outputs           values returned without being gathered
    sharded_fraction  share of the matrix FLOPs that run on this rank's rows only
    matrix_flops      FLOPs of all products of one forward, on all ranks, those that are computed on every rank once
    heaviest          where most of the matrix work is that every rank does whole: module and source line; "" if none is
    memory            bytes per rank by cause
    bytes_sent        per rank, one forward pass (ringopt/ops/traits.py); of rows picked by a tensor of numbers, at most
    refusal           why the whole graph was left unsharded, or None
    modules           what each module costs this rank, in the order of the program
    unknown           operators of other libraries that no rule describes, and where they are called
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
    matrix_flops: int = 0
    heaviest: str = ""
    modules: tuple[ModuleFigures, ...] = ()
    unknown: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields under their names, those of Site and Gather too; JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`, also after JSON made lists of tuples."""
        sites = tuple(_site_of(site) for site in data["sites"])
        gathers = tuple(Gather(**gather) for gather in data["gathers"])
        outputs = tuple(Output(**output) for output in data["outputs"])
        texts = {name: tuple(data[name]) for name in ("left_alone", "notes", "unknown") if name in data}
        modules = tuple(ModuleFigures(**module) for module in data.get("modules", ()))
        parts = {"sites": sites, "gathers": gathers, "outputs": outputs, "modules": modules}
        return cls(**{**data, **texts, **parts})

    @classmethod
    def merged(cls, reports: Iterable[Report], world_size: int) -> Report:
        """One report of all graphs of a model."""
        parts = list(reports)
        if len(parts) == 1:
            return parts[0]
        memory: dict[str, int] = {}
        for part in parts:
            for cause, size in part.memory.items():
                memory[cause] = memory.get(cause, 0) + size
        flops = sum(part.matrix_flops for part in parts)
        sharded = sum(part.sharded_fraction * part.matrix_flops for part in parts)
        heaviest = max(parts, key=lambda part: (1 - part.sharded_fraction) * part.matrix_flops, default=cls(world_size))
        return cls(
            world_size,
            tuple(site for part in parts for site in part.sites),
            tuple(reason for part in parts for reason in part.left_alone),
            tuple(gather for part in parts for gather in part.gathers),
            tuple(output for part in parts for output in part.outputs),
            sharded / flops if flops else 0.0,
            memory,
            sum(part.bytes_sent for part in parts),
            "; ".join(part.refusal for part in parts if part.refusal) or None,
            tuple(note for part in parts for note in part.notes),
            flops,
            heaviest.heaviest,
            tuple(module for part in parts for module in part.modules),
            tuple(dict.fromkeys(name for part in parts for name in part.unknown)),
        )

    @property
    def shards_nothing(self) -> str:
        """Why no rank has less to compute than one process, where nothing that was found was refused; else ""."""
        if self.world_size == 1 or self.sharded_fraction or not self.matrix_flops or self.refusal or self.sites:
            return ""
        most = f", most of it in {self.heaviest}" if self.heaviest else ""
        found = f"no attention and no recurrence was found, so every rank does all of the matrix work{most}"
        inside = ". Nothing is found inside of operators that no rule describes (ringopt.rule): "
        return found + (inside + _first_of(self.unknown) if self.unknown else "")

    @property
    def headline(self) -> str:
        """`4 of 4 attentions, 100% of matrix work on shards, 2 ranks`."""
        scans = [site for site in self.sites if site.form == "scan"]
        parts = []
        for what, sites in (("attention", [site for site in self.sites if site not in scans]), ("scan", scans)):
            if sites:
                parts.append(f"{sum(site.refusal is None for site in sites)} of {several(len(sites), what)}")
        if self.matrix_flops or self.sharded_fraction:
            parts.append(f"{percent(self.sharded_fraction)} of matrix work on shards")
        return ", ".join([*parts, several(self.world_size, "rank")])

    def __repr__(self) -> str:
        return printable(f"<ringopt.Report: {self.headline}>")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Plainly(Group(*_short(self)))

    def __str__(self) -> str:
        return self.text()

    def text(self, verbose: bool = False) -> str:
        """Five lines; `verbose`: every site, value and note."""
        console = Console(width=WIDTH, no_color=True)
        with console.capture() as captured:
            console.print(Plainly(self.rich()) if verbose else self)
        return captured.get()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"

    def to_html(self, path: str | os.PathLike[str] | None = None, title: str = "report") -> str:
        """As a page, one file that needs no network; written where a `path` is given. Raises OSError."""
        page = _PAGES[0](self, title)
        if path is not None:
            write_whole(Path(path), page)
        return page

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


def _site_of(data: Mapping[str, Any]) -> Site:
    drawn = data.get("picture")
    picture = MaskPicture(**{name: tuple(rows) for name, rows in drawn.items()}) if drawn else None
    predictions = tuple(Prediction(**one) for one in data.get("predictions", ()))
    return Site(**{**data, "notes": tuple(data["notes"]), "predictions": predictions, "picture": picture})


# How a report becomes a page: ringopt/reporting/report_page.py, which stands above this module.
_PAGES: list[Callable[[Report, str], str]] = []
Page = TypeVar("Page", bound=Callable[..., str])


def drawn_by(page: Page) -> Page:
    """A decorator."""
    _PAGES[:] = [page]
    return page


FEW = 2  # kinds of sites, refusals and notes that the short report names


def _short(report: Report) -> Iterator[RenderableType]:
    """What was sharded, what was not and why, what is sent, what is held."""
    yield Text(f"ringopt: {report.headline}")
    lines = Table.grid(padding=(0, 2), pad_edge=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    sharded = [site for site in report.sites if site.refusal is None or site.by_rows]
    kinds = _by_kind((_kind(site), site) for site in sharded)
    missed = _missed(report)
    lines.add_row("sharded", Text(_first_of(kinds) or "no attention"))
    lines.add_row("whole", Text(_first_of(missed) or "nothing", style="yellow" if missed else ""))
    lines.add_row("sends", Text(f"{bytes_text(report.bytes_sent)} a rank in one forward"))
    held = [f"{cause.removesuffix(' values')} {bytes_text(size)}" for cause, size in report.memory.items() if size]
    lines.add_row("holds", Text(f"{bytes_text(sum(report.memory.values()))}: {', '.join(held) or 'nothing'}"))
    for note in report.notes[:FEW]:
        lines.add_row("note", Text(note))
    yield lines
    more = [several(len(report.notes) - FEW, "more note")] if len(report.notes) > FEW else []
    more += [several(len(report.sites), "site")] if report.sites else []
    if more:
        yield Text(f"--verbose, or report.text(verbose=True), has {' and '.join(more)} one by one", style="dim")


def _kind(site: Site) -> str:
    if site.refusal is not None:
        return f"by rows of queries, with keys and values whole, for {site.refusal}"
    return f"{site.pattern}, {site.strategy}, {site.layout}"


def _by_kind(sites: Iterable[tuple[str, Site]]) -> list[str]:
    """`36 x causal, ring, zigzag (layers.0 to layers.35)`, the most frequent first."""
    found: dict[str, list[Site]] = {}
    for kind, site in sites:
        found.setdefault(kind, []).append(site)
    kinds = []
    for kind, alike in sorted(found.items(), key=lambda item: -len(item[1])):
        names = [site.module for site in (alike[0], alike[-1]) if site.module]
        where = f" ({' to '.join(dict.fromkeys(names))})" if names else ""
        kinds.append(f"{len(alike)} x {kind}{where}" if len(alike) > 1 else f"{kind}{where}")
    return kinds


def _missed(report: Report) -> list[str]:
    """What every rank does or holds whole, and why."""
    found = [report.refusal] if report.refusal else []
    found += _by_kind((site.refusal, site) for site in report.sites if site.refusal and not site.by_rows)
    found += [report.shards_nothing] if report.shards_nothing and not report.left_alone else []
    if not report.sharded_fraction:  # else what only looks like attention is sharded with the rest
        found += report.left_alone
    if 0 < report.sharded_fraction < 1:
        most = f", most of it in {report.heaviest}" if report.heaviest else ""
        found.append(f"{percent(1 - report.sharded_fraction)} of the matrix work{most}")
    for gather in sorted(report.gathers, key=lambda gather: -gather.bytes):
        why = "" if gather.op == "output" else f" ({gather.why})"
        found.append(f"{bytes_text(gather.bytes)} gathered for {gather.op}{why}")
    return found


def _first_of(items: Sequence[str]) -> str:
    more = len(items) - FEW
    return "; ".join([*items[:FEW], *([f"{more} more"] if more > 0 else [])])


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
    """A number of bytes in the binary unit that fits, with three digits at most: "512 B", "1.5 MiB", "512 KiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if size < 999.5 or unit == units[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"


def percent(share: float) -> str:
    """With three digits; "100%" only of all."""
    return "100%" if share >= 1 else f"{min(100 * share, 99.9):.3g}%"


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
