"""What rich prints of a program's text, as it may be shown to a terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment

from ringopt.output.printable import printable


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
