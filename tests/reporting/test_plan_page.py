"""The page of a plan: charts, masks with the ranks that compute them, numbers in columns of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import ringopt
from ringopt.tools.example import tiny
from ringopt.tools.plan_page import plan_page
from tests.harness.browser import Browser
from tests.harness.pages import data_of


@cache
def planned() -> str:
    model, inputs = tiny()
    plan = ringopt.plan(model, *inputs, world_size=(2, 16), lengths=(4096, 1 << 24), hardware="h100")
    return plan_page(plan, "tiny")


def test_each_exchange_is_drawn_with_the_ranks_that_compute_it() -> None:
    """Every point is of one exchange of the site; what a causal mask sees has a rank."""
    data = data_of(planned())
    assert {tuple(site["modules"]) for site in data["sites"]} == {("0", "1")}
    places = [place for site in data["sites"] for place, *_ in site["points"]]
    assert sorted(places) == list(range(len(data["points"])))
    drawn = {site["which"].rpartition(", ")[2]: site["picture"] for site in data["sites"]}
    assert "8 ranks as of 16" in drawn
    for picture in drawn.values():
        seen, ranks = "".join(picture["seen"]), "".join(picture["ranks"])
        assert "#" in seen and {mark for mark, rank in zip(seen, ranks, strict=True) if rank == "."} <= {"."}
    assert set("".join(drawn["8 ranks as of 16"]["ranks"])) - {"."} == set("01234567")


def test_in_a_browser(tmp_path: Path, window: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(planned())
    window.resize(1400, 900)
    window.open(page)
    heads = window.texts("#points-table thead button")
    assert heads[4:6] == ["sent", "off node"]
    cells = window.texts("#points-table tbody td:nth-child(5)")
    assert len(cells) == 4 and {cell.split(" ", 1)[1] for cell in cells} <= {"KiB", "MiB", "GiB", "TiB"}
    assert window.texts("#longest-table thead button")[:3] == ["ranks", "tokens", "of each rank"]
    window.run("document.querySelectorAll('#sites button[aria-expanded]').forEach((one) => one.click())")
    assert window.count("#sites tr.more svg.mask rect.full") > 20
    assert window.count("#sites tr.more table") == window.count("#sites tr.more")
    for width in (1400, 900, 390):
        window.resize(width, 900)
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert window.complaints() == []
