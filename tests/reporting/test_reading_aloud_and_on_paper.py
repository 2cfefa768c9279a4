"""Pages as a screen reader has them, by the browser's own accessibility tree, and as they are printed."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import ringopt
from ringopt.reporting.diff_page import diff_page
from ringopt.reporting.report_page import report_page
from ringopt.reporting.timeline_page import timeline_page
from ringopt.tools.example import tiny
from ringopt.tools.plan_page import plan_page
from tests.harness.browser import Browser
from tests.reporting.test_diff_page import numbered
from tests.reporting.test_report_page import REPORT
from tests.reporting.test_timeline_page import SPANS


@cache
def planned() -> str:
    model, inputs = tiny()
    return plan_page(ringopt.plan(model, *inputs, world_size=(2, 4), lengths=(4096, 65536)), "tiny")


PAGES = {
    "explain": lambda: report_page(REPORT, "model.pt2"),
    "plan": planned,
    "diff": lambda: diff_page(numbered(), "a.pt2", "b.pt2"),
    "timeline": lambda: timeline_page(SPANS, "traces"),
}
# Roles of what is read or worked by its name.
NAMED = {
    "button", "link", "checkbox", "slider", "searchbox", "combobox", "treegrid", "application", "heading", "region",
    "table", "image", "navigation", "option", "columnheader", "tree", "treeitem",
}  # fmt: skip
# What is wider than its box and cut off there.
CLIPPED = """
const cut = (one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1
  && getComputedStyle(one).overflowX !== 'visible';
return [...document.querySelectorAll('main *')].filter(cut).map((one) => one.outerHTML.slice(0, 90));
"""


@pytest.mark.parametrize("kind", PAGES)
def test_all_that_can_be_worked_has_a_name(kind: str, tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[kind]())
    window.open(page)
    nodes = [node for node in window.accessibility() if not node["ignored"]]
    roles = {node["role"]["value"] for node in nodes}
    assert {"button", "heading", "table", "searchbox", "navigation", "main"} <= roles
    worked = [node for node in nodes if any(one["name"] == "focusable" for one in node.get("properties", ()))]
    named = [node for node in nodes if node["role"]["value"] in NAMED] + worked
    assert [node["role"]["value"] for node in named if not node["name"]["value"].strip()] == []
    assert {node["role"]["value"] for node in worked} <= NAMED | {"RootWebArea", "group", "DisclosureTriangle"}
    headings = [one for node in nodes if node["role"]["value"] == "heading" for one in node["properties"]]
    levels = [one["value"]["value"] for one in headings if one["name"] == "level"]
    assert levels[0] == 1 and all(below <= above + 1 for above, below in pairwise(levels))


@pytest.mark.parametrize("kind", PAGES)
def test_on_paper_all_is_open_in_light_and_nothing_is_cut_off(kind: str, tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[kind]())
    window.resize(760, 1000)
    window.open(page)
    window.run("root.dataset.theme = 'dark'")
    before = window.run("return document.querySelectorAll('tr.more').length")
    window.cdp("Emulation.setEmulatedMedia", media="print")
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run("return root.dataset.theme") == "light"
    assert window.count("main [aria-expanded=false]:not(.line0)") == 0
    assert window.run(CLIPPED) == []
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    window.cdp("Emulation.setEmulatedMedia", media="")
    window.run("dispatchEvent(new Event('afterprint'))")
    assert window.run("return [root.dataset.theme, document.querySelectorAll('tr.more').length]") == ["dark", before]
    assert window.complaints() == []


def test_spans_are_gone_through_by_keys_and_said(tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(timeline_page(SPANS, "traces"))
    window.open(page)
    window.run("document.querySelector('.lanes canvas:not(.over)').focus()")
    said = []
    for key in ("ArrowDown", "ArrowDown", "PageDown", "ArrowUp"):
        window.type(key)
        said.append(window.texts(".readout")[0].split(" of ")[0])
    assert said == ["rank 0, compute: <b> 0", "rank 0, compute: <b> 1", "rank 0, link: <b> 1", "rank 0, link: <b> 0"]
