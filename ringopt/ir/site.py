"""One attention of a graph, as far as it is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class SiteInfo:
    """What is known of one attention site; the passes fill it in, the report shows it. `masked`: the program gave a
    mask; `source`: the line of the program that it comes from; `not_dilated`: why the options' dilation is not applied
    to it; `whole`: the side that has too few rows to be spread, which is on every rank; `reason`: the one of the notes
    that says why this strategy."""

    module: str
    form: str
    pattern: str = "full"
    masked: bool = False
    source: str = ""
    strategy: str = "none"
    layout: str = "none"
    kernel: str = "none"
    refusal: str | None = None
    not_dilated: str | None = None
    bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    whole: Literal["", "queries", "keys"] = ""
