"""The page of a diff: what is in the file, and what a person can do with it in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ringopt.compare.graph_diff import GraphDiff, NodeView, SiteView, diff_views, with_errors
from ringopt.compare.node_values import NodeError
from ringopt.reporting.diff_page import diff_page
from tests.harness.browser import browser, missing

NAUGHTY = "</script><script>alert(1)</script>"  # markup, if it reached a page as such


def many(layers: int = 2) -> GraphDiff:
    """Layers of one site and ten nodes each."""
    site = SiteView("causal", "none", "none", "none", "", ("#?", "##"))
    before = [NodeView("x", "input", "%x = input x", "x")]
    for layer in range(layers):
        for step in range(10):
            name, last = f"n{layer}_{step}", before[-1].name
            text = f"%{name} = op{step}(%{last})"
            where = f"layers.{layer}.{NAUGHTY}"
            before.append(NodeView(name, f"op{step}", text, "%", (last,), where, "model.py:1  <b>x</b>", "f32[4]"))
        before[-1] = replace(before[-1], site=site)
    before.append(NodeView("out", "output", f"return %{before[-1].name}", "%", (before[-1].name,)))
    ring = replace(site, strategy="ring", layout="zigzag", kernel="math", mask=("/.", "#/"))
    after = [
        replace(view, op="ring", site=ring, text=f"%{view.name} = ring()") if view.site else view for view in before
    ]
    return diff_views(before, after)


def test_it_needs_nothing_from_elsewhere_and_holds_names_as_text() -> None:
    text = diff_page(many(), "a.pt2", "<b>.pt2")
    addresses = set(re.findall(r"""(?:https?:)?//[\w.][^\s"'<`]*""", re.sub(r"\s// .*", "", text)))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>\s]*)""", text) == ["data:,"]
    assert text.count("</script>") == 2
    assert "<b>" not in text


def numbered() -> GraphDiff:
    """Errors from the seventh node on, the last of them without bound; and a profile."""
    nodes = [f"n0_{step}" for step in range(10)]
    errors = {name: NodeError(1e-9, 1e-8, 1e-4) for name in nodes[:6]}
    errors |= {name: NodeError(step + 0.5, 0.25, 1e-4) for step, name in enumerate(nodes[6:9])}
    diff = with_errors(many(), errors | {"n0_9": NodeError(float("inf"), float("inf"), 1e-4)})
    return diff.overlay("us", {"n1_3": 12.5, "n1_4": 3})


def test_numbers_of_nodes_are_json_without_infinity() -> None:
    text = diff_page(numbered(), "a.pt2", "b.pt2")
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)[0])
    found = {metric["name"]: [x for x in metric["values"] if x is not None] for metric in data["metrics"]}
    assert found["error, relative"] == [1e-8] * 6 + [0.25] * 3 + ["inf"]
    assert found["us"] == [12.5, 3]
    assert "Infinity" not in json.dumps(data)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_numbers_in_a_browser(tmp_path: Path) -> None:
    """The first bad node on top, others below in order; another metric by size; a click finds the node."""
    page = tmp_path / "page.html"
    page.write_text(diff_page(numbered(), "a.pt2", "b.pt2"))
    with browser() as window:
        window.open(page)
        assert window.texts("#numbers-told") == [
            "10 nodes, 4 shown in order of computation; the first that is off: %n0_6"
        ]
        assert [text.split(" = ")[0] for text in window.texts("tr.value.bad")] == ["%n0_6", "%n0_7", "%n0_8", "%n0_9"]
        assert window.texts("tr.value td.number") == ["0.250", "0.250", "0.250", "inf"]
        assert (window.count("#strip rect"), window.count("#strip rect.bad")) == (10, 4)
        window.click("tr.value")
        assert window.texts("#modules .node")[0] == "  %n0_6 = op6(%n0_5)  # f32[4] replicated"
        said = "value: off by 0.250 of its largest element (max abs 0.500)"
        assert window.texts("#modules .aspects.bad")[0] == said
        choose = "const all = byId('metric'); all.selectedIndex = 2; all.dispatchEvent(new Event('change'))"
        window.run(choose)
        assert window.texts("tr.value td.number") == ["12.5", "3"]
        for width in (1280, 400):
            window.resize(width, 800)
            assert window.run("return document.documentElement.scrollWidth <= innerWidth")
        assert window.complaints() == []


def test_of_5000_nodes_it_is_small() -> None:
    assert len(diff_page(many(500), "a.pt2", "b.pt2")) < 4_000_000


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_in_a_browser(tmp_path: Path) -> None:
    """Sites counted, searched, opened by a click and by keys, and read back; no complaint, no request."""
    page = tmp_path / "page.html"
    page.write_text(diff_page(many(), "a.pt2", "b.pt2"))
    with browser() as window:
        window.open(page)
        assert window.requests() == [page.as_uri()]
        assert window.texts("#site-title") == ["2 attention sites"]
        assert (window.count("tr.site"), window.count(".node")) == (2, 0)

        window.type("/")
        window.type("n1_9")
        assert [bool(row) for row in window.texts("tr.site")] == [False, True]
        window.type("Escape")
        assert all(window.texts("tr.site"))
        window.type("/")
        window.type("n1_3")
        assert window.texts("#found") == ["2 nodes shown"]  # n1_3, and n1_4 which reads it
        assert window.texts("#modules .node")[0] == "  %n1_3 = op3(%n1_2)  # f32[4] replicated"
        window.type("Escape")

        window.click("tr.site")
        assert window.texts("#site-name") == [f"layers.0.{NAUGHTY}"]
        assert window.texts("#site-body pre") == ["%n0_9 = op9(%n0_8)", "%n0_9 = ring()"]
        assert [window.count(f"#site-body section:nth-child({side}) .{kind}") for side, kind in
                ((1, "full"), (1, "open"), (1, "partial"), (2, "full"), (2, "open"), (2, "partial"))] == [
            3, 1, 0, 1, 0, 2]  # fmt: skip
        window.type("ArrowRight")
        assert window.texts("#site-name") == [f"layers.1.{NAUGHTY}"]
        window.type("Escape")
        assert window.texts("#site-name") == [""]

        window.run("document.activeElement.blur()")
        window.type("j")
        window.type("Enter")
        assert window.texts("#site-name") == [f"layers.0.{NAUGHTY}"]
        window.type("Escape")

        theme = "return document.documentElement.dataset.theme"
        before = window.run(theme)
        window.click("#theme")
        assert {before, window.run(theme)} == {"dark", "light"}
        assert window.complaints() == []
        assert window.requests() == []


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_5000_nodes_open_at_once_and_sites_that_read_the_same_are_one_line(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(diff_page(many(500), "a.pt2", "b.pt2"))
    with browser() as window:
        window.resize(400, 800)
        window.open(page)
        assert window.count("tr.site") == 500
        assert window.count(".node") == 0  # rows are made when a module is opened
        shown = "return [...document.querySelectorAll('tr.site')].filter((row) => row.offsetParent).length"
        more = f"499 more like this: layers.1-499.{NAUGHTY}"
        assert (window.run(shown), window.texts("tr.more"), window.texts("#modules .more")) == (1, [more], [more])

        window.type("/")
        window.type("n499_9")
        assert (window.run(shown), window.texts("#found")) == (1, ["2 nodes shown"])  # and the return
        assert window.texts("tr.site:not([hidden])")[0].startswith(f"layers.499.{NAUGHTY}")
        window.type("Escape")
        window.click("tr.more button")
        assert window.run(shown) == 500
        # Of a narrow window the page takes no more than its width, and what stays on top little of its height.
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
        assert window.run("return document.querySelector('nav').offsetHeight") < 80
        assert window.complaints() == []


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_where_nothing_differs_it_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    plain = [NodeView("x", "input", "%x = input x", "x"), NodeView("out", "output", "return %x", "%", ("x",))]
    page.write_text(diff_page(diff_views(plain, plain), "a.pt2", "a.pt2"))
    with browser() as window:
        window.open(page)
        assert window.texts("#site-title, #modules, #found") == [
            "0 nodes shown", "No attention site", "No node is of the kinds chosen above.",
        ]  # fmt: skip
