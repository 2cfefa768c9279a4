"""A page of 20,000 nodes: what it takes to open and to scroll, by the browser's own trace.

    python -m pytest -m zoo -s tests/reporting/test_page_speed.py     # prints the figures of BENCHMARKS.md
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ringopt.compare.graph_diff import GraphDiff, NodeView, diff_views
from ringopt.reporting.diff_page import diff_page
from tests.harness.browser import browser, missing

FRAMES, STEP = 120, 300  # of a fast wheel: pixels a frame
SCROLL = """
const box = document.querySelector('.view');
let frames = arguments[0];
view.show(0, true);
view.openAll();
performance.mark('scrolling');
return new Promise((done) => {
  const step = () => {
    box.scrollTop += arguments[1];
    if (frames--) requestAnimationFrame(step);
    else { performance.mark('scrolled'); done([view.rows.length, document.querySelectorAll('.line0').length]); }
  };
  requestAnimationFrame(step);
});
"""
OPENED = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
# What the thread of a page does in a frame; style and layout that scripts ask for are in the time of the script.
WORK = ("FireAnimationFrame", "EventDispatch", "PrePaint", "Paint", "Layerize", "ParseHTML", "EvaluateScript")


def large(layers: int = 100, steps: int = 200) -> GraphDiff:
    """A program of 20,000 nodes beside one in which every tenth is another operator."""

    def side(every: int) -> list[NodeView]:
        views = [NodeView("x", "input", "%x = input x", "x", shape="f32[1, 4096, 512]")]
        for layer in range(layers):
            for step in range(steps):
                name, last = f"n{layer}_{step}", views[-1].name
                op = f"op{step}" if step % every else f"ringopt::op{step}"
                where = f"model.layers.{layer}.part{step // 20}"
                views.append(NodeView(
                    name, op, f"%{name} = {op}(%{last}, 512, True)", "%, 512, True", (last,), where,
                    f"model.py:{step}  x = self.part(x)", "f32[1, 4096, 512]", "S(1)", 1024 * (step % every == 0), step,
                ))  # fmt: skip
        return [*views, NodeView("out", "output", f"return %{views[-1].name}", "%", (views[-1].name,))]

    return diff_views(side(steps + 1), side(10))


def work(events: Iterable[dict[str, Any]], pid: int, since: float, until: float) -> float:
    """Milliseconds of the processor between two times of a trace."""
    own = (event for event in events if event["pid"] == pid and event["name"] in WORK and event.get("ph") == "X")
    return float(sum(event.get("tdur", 0) for event in own if since <= event["ts"] <= until)) / 1000


@pytest.mark.zoo
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_20000_nodes_open_in_two_seconds_and_scroll_smoothly(tmp_path: Path) -> None:
    """The processor's time, so that what else the machine does is not counted."""
    page = tmp_path / "page.html"
    page.write_text(diff_page(large(), "before", "after"))
    with browser(traced=True) as window:
        window.resize(1400, 900)
        window.open(page)
        opened = window.run(OPENED)
        rows, lines = window.run(SCROLL, FRAMES, STEP)
        events = window.trace()
    begin, end = (next(event for event in events if event["name"] == name) for name in ("scrolling", "scrolled"))
    starts = [event["ts"] for event in events if event["name"] == "navigationStart" and event["pid"] == begin["pid"]]
    opening = work(events, begin["pid"], max(starts), begin["ts"])
    frame = work(events, begin["pid"], begin["ts"], end["ts"]) / FRAMES
    print(
        f"\n{page.stat().st_size / 2**20:.1f} MiB, {rows:,} rows, {lines} in the document; open after {opened:.0f} ms, "
        f"of the processor {opening:.0f} ms; a frame of scrolling {frame:.1f} ms of the processor"
    )
    assert rows > 20_000 and lines < 80
    assert opening < 2000 and frame < 1000 / 60
