"""The page of a report: sites, reasons with their lines, and the memory drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ringopt.report import Gather, Output, Report, Site
from ringopt.reporting.report_page import memory_bars, report_page
from tests.harness.browser import browser, missing

TAKEN = Site("layers.0", "sdpa", "causal", "ring", "math", "zigzag", None, 2048, ("why ring",), "model.py:3: sdpa(q)")
REFUSED = Site("layers.1", "unfused", "mask", "none", "none", "none", "made of <b>scores</b>", 0, (), "model.py:9: x")
REPORT = Report(
    world_size=4,
    sites=(TAKEN, REFUSED),
    left_alone=("softmax over channels (model.py:12: softmax(x, 1))",),
    gathers=(Gather("sort", "sort needs all rows of x", 4096, "head", "model.py:20: x.sort(1)"),),
    outputs=(Output("logits", "local", "S(1)", "zigzag", 8192),),
    sharded_fraction=0.75,
    memory={"parameters": 1024, "sharded values": 3072},
    bytes_sent=6144,
    notes=("export may have lost something",),
)


def test_it_tells_every_reason_with_its_line() -> None:
    text = report_page(REPORT, "model.pt2")
    for said in ("refused: made of &lt;b&gt;scores&lt;/b&gt;", "model.py:9: x", "sort needs all rows of x",
                 "model.py:20: x.sort(1)", "model.py:12", "logits", "export may have lost something"):  # fmt: skip
        assert said in text
    assert "<b>" not in text


def test_it_comes_back_from_json() -> None:
    assert Report.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_memory_is_stacked() -> None:
    assert [(bar.cause, bar.start, bar.width, bar.share) for bar in memory_bars(REPORT)] == [
        ("parameters", 0.0, 250.0, "25%"), ("sharded values", 250.0, 750.0, "75%"),
    ]  # fmt: skip
    assert memory_bars(Report(2)) == []


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report_page(REPORT, "model.pt2"))
    with browser() as window:
        window.open(page)
        assert window.count("#sites tbody tr") == 2
        widths = "return [...document.querySelectorAll('rect')].map((bar) => bar.getBBox().width)"
        assert window.run(widths) == [250, 750]
        window.click("#search")
        window.type("layers.1")
        assert window.texts("#found") == ["1 of 6 lines"]
        assert [bool(row) for row in window.texts("#sites tbody tr")] == [False, True]
        assert (window.complaints(), window.requests()) == ([], [page.as_uri()])


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_sites_that_read_the_same_are_one_line_until_asked_for(tmp_path: Path) -> None:
    sites = [replace(TAKEN, module=f"layers.{layer}.attention") for layer in range(32)]
    page = tmp_path / "page.html"
    page.write_text(report_page(replace(REPORT, sites=(REFUSED, *sites)), "model.pt2"))
    with browser() as window:
        window.open(page)
        assert [row.split()[0] for row in window.texts("#sites tbody tr:not(.folded)")] == [
            "layers.1", "layers.0.attention", "31",
        ]  # fmt: skip
        assert window.texts("tr.more") == ["31 more like this: layers.1-31.attention"]
        window.click("tr.more button")
        assert window.count("#sites tbody tr.folded") == 0
