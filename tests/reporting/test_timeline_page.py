"""The page of a timeline: lanes that zoom, and what was waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ringopt.output.drawn import MaskPicture
from ringopt.reporting.timeline_page import timeline_page
from ringopt.runtime.trace import Span
from tests.harness.browser import Browser
from tests.harness.pages import data_of

SPANS = [
    Span(rank, lane, f"<b> {step}", 100 + step + begin, 100 + step + end, size, f"model.layers.{step}.<i>")
    for rank in (0, 3)
    for step in range(5)
    for lane, begin, end, size in (("compute", 0, 0.6, 0), ("link", 0.1, 0.8, 1 << 20), ("exposed", 0.6, 0.8, 0))
]


def test_seconds_count_from_the_first_span() -> None:
    page = timeline_page(SPANS, "traces")
    data = data_of(page)
    assert "<b> 1" not in page and (data["spans"][0][3], round(data["end"], 9)) == (0, 4.8)
    assert [round(one["hidden"], 3) for one in data["sums"]] == [round(1 - 0.2 / 0.7, 3)] * 2


def test_in_a_browser(tmp_path: Path, window: Browser) -> None:
    """The wheel's part by keys, a wait found by a click; the canvas has colours of all lanes."""
    page = tmp_path / "page.html"
    masks = {"model.layers.2.<i>": MaskPicture(("#.", "##"), ("0.", "33"), ("0.", "10")), "of no span": MaskPicture(())}
    page.write_text(timeline_page(SPANS, "traces", masks=masks))
    window.open(page)
    assert list(data_of(page.read_text())["masks"]) == ["model.layers.2.<i>"]
    assert window.count("#sites-table svg.mask.small") == 1 and window.count("#mask rect.full") == 3
    assert window.texts("#mask h3 .name") == ["model.layers.2.<i>"]
    assert window.texts(".tile b")[:3] == ["2", "4.8 s", "71.4%"]
    window.run("lanes.paint(); document.querySelector('.lanes canvas:not(.over)').focus()")
    for key in ("+", "+", "ArrowRight"):
        window.type(key)
    assert round(window.run("return lanes.to - lanes.from"), 6) == 1.2
    window.click("#waits-table tbody button")
    assert window.texts(".readout")[0].startswith("rank 0, exposed: <b> ")
    assert window.texts("#sites-table .name") == [f"model.layers.{step}.<i>" for step in range(5)]
    window.click("#sites-table tbody button")
    assert window.texts(".readout")[0].startswith("rank 0, link: <b> 0 of model.layers.0.<i>, 700 ms")
    assert [window.run("return lanes.fitting(lanes.canvas.getContext('2d'), lanes.picked, arguments[0])", wide)
            for wide in (500, 100, 9)] == ["model.layers.0.<i>: <b> 0", "0.<i>: <b> 0", "0.<i>"]  # fmt: skip
    painted = window.run(
        "lanes.range(0, lanes.end); lanes.paint(); const one = lanes.canvas, pen = one.getContext('2d');"
        "return new Set(new Uint32Array(pen.getImageData(0, 0, one.width, one.height).data.buffer)).size"
    )
    assert painted > 4
    assert window.count("#mask rect") == 0  # of an attention that was not drawn
    window.resize(400, 800)
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert (window.complaints(), window.requests()) == ([], [page.as_uri()])


def test_a_column_in_which_nothing_stands_is_left_out(tmp_path: Path, window: Browser) -> None:
    """Of waits that belong to no attention the column of attentions would be one of dashes."""
    page, heads = tmp_path / "page.html", []
    for spans in (SPANS, [replace(span, site="") for span in SPANS]):
        page.write_text(timeline_page(spans, "traces"))
        window.open(page)
        heads.append(window.texts("#waits-table thead button")[:3])
    assert heads == [["exchange", "of", "waits"], ["exchange", "waits", "in all"]]
