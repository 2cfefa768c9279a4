"""The picture of examples/longnet.py tells what the plan says."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    import _picture

    yield _picture
    sys.modules.pop("_picture")


def test_who_keeps_receives_and_computes(picture: Any) -> None:
    svg = picture.draw("dilated(8:1,24:2)", 40, 2, 2, "contiguous")
    root = ElementTree.fromstring(svg)
    told = [words.text for words in root.iter("{http://www.w3.org/2000/svg}text")]
    # Of 8:1 the edge at 20 cuts rows 16 to 24; of 24:2 rows 0 to 24, of which each head keeps every second.
    assert "rank 0 computes 53% of all pairs and receives 12 rows, of all heads" in told
    assert "rank 1 computes 47% of all pairs and receives 28 rows, of all heads" in told
    colours = [rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert colours.count(picture.RECEIVED) - 1 == 4 + 2 + 4 + 10  # a cell a row, of head 0
