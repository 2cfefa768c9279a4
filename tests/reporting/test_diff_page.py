"""The page of a diff: what is in the file, and what a person can do with it in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from ringopt.compare.graph_diff import GraphDiff, NodeView, SiteView, diff_views, with_errors
from ringopt.compare.node_values import NodeError
from ringopt.reporting.diff_page import diff_page
from tests.harness.browser import Browser
from tests.harness.pages import data_of

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
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>\s]*)""", text) == ["data:,", "#main"]
    assert text.count("</script>") == 2
    assert "<b>.pt2" not in text


def numbered() -> GraphDiff:
    """Errors from the seventh node on, the last of them without bound; and a profile."""
    nodes = [f"n0_{step}" for step in range(10)]
    errors = {name: NodeError(1e-9, 1e-8, 1e-4) for name in nodes[:6]}
    errors |= {name: NodeError(step + 0.5, 0.25, 1e-4) for step, name in enumerate(nodes[6:9])}
    diff = with_errors(many(), errors | {"n0_9": NodeError(float("inf"), float("inf"), 1e-4)})
    return diff.overlay("us", {"n1_3": 12.5, "n1_4": 3})


def test_numbers_of_nodes_are_json_without_infinity() -> None:
    data = data_of(diff_page(numbered(), "a.pt2", "b.pt2"))
    found = {metric["name"]: [x for x in metric["values"] if x is not None] for metric in data["metrics"]}
    assert found["error, relative"] == [1e-8] * 6 + [0.25] * 3 + ["inf"]
    assert found["us"] == [12.5, 3]
    assert "Infinity" not in json.dumps(data)


def test_of_5000_nodes_it_is_small() -> None:
    """And every node of both sides comes back."""
    page = diff_page(many(500), "a.pt2", "b.pt2")
    assert len(page) < 1_500_000
    graph = data_of(page)["graph"]
    [frame] = graph["frames"]
    assert sum(change[1] if isinstance(change, list) else 1 for change in frame["changes"]) == 5002
    assert [graph["words"][graph["views"][number][0]] for number in (0, 1, 2)] == ["x", "n0_0", "n0_1"]


def test_numbers_in_a_browser(tmp_path: Path, window: Browser) -> None:
    """The first bad node on top, others below in order; another metric by size; a click finds the node."""
    page = tmp_path / "page.html"
    page.write_text(diff_page(numbered(), "a.pt2", "b.pt2"))
    window.open(page)
    assert window.texts("#numbers-told") == ["10 nodes, 4 shown in order of computation; the first that is off: %n0_6"]
    assert [text.split(" = ")[0] for text in window.texts(".value.refused")] == ["%n0_6", "%n0_7", "%n0_8", "%n0_9"]
    assert window.texts("#values td.number") == ["0.250", "0.250", "0.250", "inf"]
    assert (window.count("#strip rect"), window.count("#strip rect.bad")) == (10, 4)
    window.click(".value")
    assert window.texts(".line0[aria-selected=true] .text") == ["%n0_6 = op6(%n0_5)"]
    assert window.texts(".details .warning") == ["value: off by 0.250 of its largest element (max abs 0.500)"]
    window.run("const all = byId('metric'); all.selectedIndex = 2; all.dispatchEvent(new Event('change'))")
    assert window.texts("#values td.number") == ["12.5", "3"]
    for width in (1280, 400):
        window.resize(width, 800)
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert window.complaints() == []


def test_in_a_browser(tmp_path: Path, window: Browser) -> None:
    """Sites counted, searched, opened; modules gone through by keys; a node read with both sides and its masks."""
    page = tmp_path / "page.html"
    page.write_text(diff_page(many(), "a.pt2", "b.pt2"))
    window.open(page)
    assert window.requests() == [page.as_uri()]
    assert window.texts("#attention-title") == ["2 attention sites"]
    assert window.texts("#sites tbody .times") == ["2 \u00d7"]
    window.click("#sites tbody button")
    assert [window.count(f"tr.more .columns > div:nth-child({side}) rect.{kind}") for side, kind in
            ((1, "full"), (1, "open"), (1, "partial"), (2, "full"), (2, "open"), (2, "partial"))] == [
        3, 1, 0, 1, 0, 2]  # fmt: skip
    window.type("/")
    window.type("n1_3")
    assert window.texts("#found") == ["0 lines, 2 nodes"]  # n1_3, and n1_4 which reads it
    assert window.texts(".line0:not(.module) .text") == ["%n1_3 = op3(%n1_2)", "%n1_4 = op4(%n1_3)"]
    window.type("Escape")
    window.run("document.querySelector('.view').focus()")
    keys = ("Home", "ArrowLeft", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowRight", "End", "Enter")
    for key in keys:
        window.type(key)
    assert window.run("return document.querySelector('.view').getAttribute('aria-activedescendant')")
    window.run("view.go('n1_9')")
    assert window.texts(".details pre") == ["%n1_9 = op9(%n1_8)", "%n1_9 = ring()"]
    assert window.texts(".line0[aria-selected=true] s") == ["op9"]
    assert (window.complaints(), window.requests()) == ([], [])


def test_5000_nodes_have_few_rows_and_layers_that_are_alike_are_one(tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(diff_page(with_odd_layer(many(500)), "a.pt2", "b.pt2"))
    window.resize(400, 800)
    window.open(page)
    assert window.count(".line0") < 80
    assert window.texts("#sites .times") == ["500 \u00d7"]
    window.run("view.show(0, true)")
    assert window.texts(".line0 .differs") == [", layer 7 differs"]
    assert "499 \u00d7" in window.texts(".line0 .times")
    window.run("view.openAll()")
    window.run("view.box.scrollTop = 1e9")
    window.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert window.count(".line0") < 80
    assert window.texts(".line0 .text")[-1].startswith("return")
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert window.complaints() == []


def with_odd_layer(diff: GraphDiff) -> GraphDiff:
    """A node of layer 7 has another shape."""
    changes = list(diff.changes)
    at = next(place for place, change in enumerate(changes) if change.node.name == "n7_3")
    changes[at] = replace(changes[at], after=replace(changes[at].node, shape="f32[5]"))
    return replace(diff, changes=tuple(changes))


def test_where_nothing_differs_it_says_so(tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    plain = [NodeView("x", "input", "%x = input x", "x"), NodeView("out", "output", "return %x", "%", ("x",))]
    page.write_text(diff_page(diff_views(plain, plain), "a.pt2", "a.pt2"))
    window.open(page)
    assert window.texts(".tile b")[:2] == ["2", "0"]
    assert window.count(".line0") == 4  # two groups with a node each: what there is, where nothing differs


def test_the_strip_parts_values_from_gradients_and_says_how_far_off(tmp_path: Path, window: Browser) -> None:
    """The more a value is off the deeper its colour; where gradients alone are off, another colour."""
    off = {"n1_0": NodeError(1.0, 0.5, 1e-4), "n2_0": NodeError(1e-3, 5e-4, 1e-4)}
    views = [change.before for change in many(4).changes if change.before]
    diff = with_errors(diff_views(views, views), off, {"n0_0": NodeError(1.0, 0.5, 1e-4)})
    page = tmp_path / "page.html"
    page.write_text(diff_page(diff, "a.pt2", "b.pt2"))
    window.open(page)
    deepest = """
      return [...document.querySelectorAll('.layer')].slice(0, 4).map((layer) => Math.max(...[...layer.children]
        .filter((part) => part.style.getPropertyValue('--tint') === arguments[0])
        .map((part) => +part.style.getPropertyValue('--o'))))
    """
    values, slopes = window.run(deepest, "var(--refused)"), window.run(deepest, "var(--gathered)")
    assert values[1] == 1 and 0.2 < values[2] < 0.9 and values[0] is values[3] is None  # JSON has no -Infinity
    assert slopes[0] == 1 and slopes[1:] == [None] * 3
    assert window.complaints() == []


def test_links_are_there_on_a_narrow_screen(tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(diff_page(many(4), "a.pt2", "b.pt2"))
    window.resize(390, 800)
    window.open(page)
    wide = "const one = document.querySelector('.graph canvas'); return one.clientWidth"
    assert window.run(wide) == 0
    window.click(".tolinks")
    assert 80 < window.run(wide) < 130
    painted = (
        "const one = document.querySelector('.graph canvas');"
        "const image = one.getContext('2d').getImageData(0, 0, one.width, one.height);"
        "return new Set(new Uint32Array(image.data.buffer)).size"
    )
    window.run("for (const paint of repaints) paint(true)")
    assert window.run(painted) > 3
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
