"""What ranks did when as one HTML file: lanes to zoom into, sums by rank and by attention with their masks, and
what was waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ringopt.output.drawn import MaskPicture
from ringopt.reporting.page import page
from ringopt.runtime.trace import LANES, Span, sums


def timeline_page(
    spans: Sequence[Span],
    title: str,
    links: Mapping[str, str] | None = None,
    masks: Mapping[str, MaskPicture] | None = None,
) -> str:
    """`title` says of what; seconds are counted from the first span; `masks` by site."""
    start, labels, sites = min(span.begin for span in spans), dict[str, int](), dict[str, int]()
    rows = [
        [
            span.rank, LANES.index(span.lane), labels.setdefault(span.label, len(labels)),
            round(span.begin - start, 9), round(span.end - start, 9), span.bytes,
            sites.setdefault(span.site, len(sites)),
        ]
        for span in spans
    ]  # fmt: skip
    data = {
        "spans": rows,
        "labels": list(labels),
        "sites": list(sites),
        "lanes": LANES,
        "end": max(span.end for span in spans) - start,
        "masks": {site: asdict(mask) for site, mask in (masks or {}).items() if site in sites},
        "sums": [{**asdict(one), "hidden": one.hidden} for one in sums(spans)],
    }
    return page("timeline", title, data, links)
