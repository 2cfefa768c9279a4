"""The page of a report: what is in the file, and what a person sees of it in a browser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ringopt
from ringopt.output.drawn import MaskPicture, ModuleFigures, Prediction
from ringopt.report import Gather, Output, Report, Site
from ringopt.reporting.history import recorded
from ringopt.reporting.page import write_linked
from ringopt.reporting.report_page import report_page
from tests.harness.browser import Browser
from tests.harness.pages import data_of
from tests.tools.test_cli import Causal

PICTURE = MaskPicture(("#.", "##"), ("0.", "11"), ("0.", "10"))
PREDICTED = (Prediction("ring", 1e-3, 2048, 4096, True), Prediction("gather", 2e-3, 2048, 1 << 20, False))
TAKEN = Site(
    "layers.0", "sdpa", "causal", "ring", "math", "zigzag", None, 2048, ("why ring",), "model.py:3: sdpa(q)",
    predictions=PREDICTED, picture=PICTURE,
)  # fmt: skip
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
    modules=(
        ModuleFigures("layers.0", 3, 100, 0, 2048, 64, 0, 1e-3), ModuleFigures("layers.1", 2, 50, 50),
        ModuleFigures("head", 1, 10, 0, 0, 32, 4096),
    ),
)  # fmt: skip


def test_it_needs_nothing_from_elsewhere_and_holds_every_reason_as_text() -> None:
    page = report_page(REPORT, "<b>.pt2")
    assert "<b>.pt2" not in page and "&lt;b&gt;.pt2" in page and "<b>scores" not in page
    assert page.count("</script>") == 2 and "src=" not in page
    assert Report.from_dict(data_of(page)["report"]) == REPORT


def test_it_comes_back_from_json() -> None:
    assert Report.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT


def test_what_explain_finds_is_in_it() -> None:
    """Modules in the order of the program, whose sums are those of the report; each block of the mask has a rank; what
    each pass changed, down to the last."""
    with recorded() as histories:
        report = ringopt.explain(Causal(), torch.zeros(1, 64, 16), world_size=2)
    data = data_of(report_page(report, "model", histories))
    assert [module.module for module in report.modules if module.module] == ["before", "after"]
    assert sum(module.sent for module in report.modules) == report.bytes_sent
    assert sum(module.flops * 2 for module in report.modules) == report.matrix_flops
    [site] = report.sites
    assert site.predictions[0].strategy == site.strategy and site.picture is not None
    cells = zip("".join(site.picture.seen), "".join(site.picture.ranks), strict=True)
    assert {(seen == ".") for seen, rank in cells if rank == "."} <= {True}
    assert set("".join(site.picture.ranks)) - {"."} == {"0", "1"}
    [graph] = data["graphs"]
    names = [frame["name"] for frame in graph["frames"]]
    assert names[0] == "capture" and names[-2:] == ["schedule", "all passes"]
    changed = {frame["name"] for frame in graph["frames"] if any(isinstance(one, dict) for one in frame["changes"])}
    assert {"find_attention", "shard_sequence", "all passes"} <= changed and "dilate" not in changed


class Table(torch.nn.Module):
    """Made of its parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self) -> Tensor:
        return self.weight.sigmoid()


class Early(torch.nn.Module):
    """Something of a layer is computed before the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"table": Table(), "attention": Causal()})])
        self.embed = torch.nn.Embedding(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        table = layer["table"]()
        return layer["attention"](self.embed(ids) * table)


def test_modules_stand_where_they_first_compute_something_from_inputs() -> None:
    report = ringopt.explain(Early(), torch.zeros(1, 64, dtype=torch.long), world_size=2)
    names = [module.module for module in report.modules if module.module]
    assert names[:3] == ["embed", "layers.0.table", "layers.0.attention.before"]


def test_pages_of_a_folder_are_linked_from_each_other(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text("<p>of somebody else</p>")
    for name in ("one.html", "two.html"):
        write_linked(tmp_path / name, report_page(REPORT, name))
    texts = [(tmp_path / name).read_text() for name in ("one.html", "two.html", "other.html")]
    assert '<a href="two.html">explain: two</a>' in texts[0] and '<a href="one.html">explain: one</a>' in texts[1]
    assert texts[2] == "<p>of somebody else</p>"


def test_in_a_browser(tmp_path: Path, window: Browser) -> None:
    """The picture of the model, equal sites once, a site opened, sorted and searched; a theme that is kept."""
    sites = (REFUSED, *(replace(TAKEN, module=f"layers.{layer}.attention") for layer in range(32)))
    page = tmp_path / "page.html"
    page.write_text(report_page(replace(REPORT, sites=sites), "model.pt2"))
    window.open(page)
    assert window.requests() == [page.as_uri()]
    assert window.texts(".tile b")[:2] == ["32 of 33", "75%"]
    assert window.count(".layer") == 3
    assert window.texts("#sites .name") == ["layers.1", "layers.0-31.attention"]
    assert "refused: made of <b>scores</b>" in window.texts("#sites tbody tr")[0]
    window.run("document.querySelectorAll('#sites button.plain')[1].click()")
    assert window.count("tr.more svg.mask rect.full") == 3
    assert "holds 1 MiB: too much" in window.texts("tr.more .matter")[0]
    window.run("document.querySelectorAll('#sites thead button')[7].click()")
    assert window.texts("#sites .name")[0] == "layers.0-31.attention"
    window.type("/")
    window.type("layers.1.att")
    assert [bool(row) for row in window.texts("#sites tbody tr.row")] == [True, False]
    assert window.run("return CSS.highlights.get('hit').size") > 0
    window.type("Escape")
    window.click("#theme")
    theme = window.run("return document.documentElement.dataset.theme")
    window.open(page)
    assert window.run("return document.documentElement.dataset.theme") == theme
    for width in (1400, 400):
        window.resize(width, 800)
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert window.complaints() == []


class Odd(Causal):
    """Its softmax is over what no product of two activations gave: it is left alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * torch.softmax(self.before(x).sort(-1).values, -1)[..., :16]


def test_a_slider_goes_through_the_passes(tmp_path: Path, window: Browser) -> None:
    """A node that is chosen stays chosen, by provenance, forward and back; what a refusal looked at is shown."""
    with recorded() as histories:
        report = ringopt.explain(Odd(), torch.zeros(1, 64, 16), world_size=2)
    page = tmp_path / "page.html"
    page.write_text(report_page(report, "model", histories))
    window.open(page)
    slide = (
        "const one = document.querySelector('#graph0 > .panel input'); one.value = arguments[0];"
        "one.dispatchEvent(new Event('input'))"
    )
    names = [frame["name"] for frame in data_of(page.read_text())["graphs"][0]["frames"]]
    chosen = []
    window.run(slide, 0)
    window.run("look('scaled_dot')")
    window.click(".line0:not(.module)")
    window.run("look('')")
    for name in ("capture", "find_attention", "shard_sequence", "all passes", "normalize"):
        window.run(slide, names.index(name))
        chosen += [text.split(" = ")[1].partition("(")[0] for text in window.texts(".line0[aria-selected=true] .text")]
    sdpa, ring = "scaled_dot_product_attention", "ringopt::ring_attention"
    assert chosen == [sdpa, "ringopt::attention", ring, ring, sdpa]
    looked = next(place for place, name in enumerate(names) if name == "find_unfused")
    window.run(slide, looked)
    window.click("#graph0 li button")
    assert window.texts(".line0[aria-selected=true] .text")[0].partition(" = ")[2].startswith("softmax")
    assert any("sort" in text for text in window.texts(".line0.near .text"))
    assert window.complaints() == []
