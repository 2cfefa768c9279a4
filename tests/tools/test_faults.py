"""Which faults are planted, and that a planted one is noticed by a test that looks and survives one that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ringopt.tools import mutate
from ringopt.tools.common.faults import faults_of

SOURCE = '''\
"""A text: not 1 < 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import nothing
def last(rows: tuple[int, 2], limit: int = 3) -> int:
    if not rows and limit <= 4:
        raise ValueError("a < b")
    assert limit != 5
    clip(rows, limit)
    warnings.warn("small", stacklevel=2)
    return min(rows[-1] + 6, 7)
class Rows:
    def __repr__(self) -> str:
        return str(1 + 2)
'''
EXPECTED = """\
5: 3 -> 4
6: not rows and limit <= 4 -> False
6: and -> or
6: not rows -> rows
6: <= -> <
6: 4 -> 5
9: clip(rows, limit) -> pass
9: rows, limit -> limit, rows
11: min -> max
11: + -> -
11: 1 -> 2
11: 6 -> 7
11: 7 -> 8
"""


def test_what_computes_is_changed_and_nothing_else() -> None:
    found = list(faults_of(SOURCE))
    assert "".join(f"{one.line}: {one.what}\n" for one in found) == EXPECTED
    for one in found:
        pairs = zip(SOURCE.split("\n"), one.source.split("\n"), strict=True)
        differing = [number for number, (before, after) in enumerate(pairs, 1) if before != after]
        assert differing == [one.line]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "sums.py").write_text(
        "def add(a, b):\n    return a + b\n\n\ndef less(a, b):\n    return a < b\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import sys\nsys.path.insert(0, 'passes')\nimport sums\n"
        "def test_add():\n    assert sums.add(1, 2) == 3\n"
        "def test_less():\n    assert sums.less(1, 2)\n"
    )
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "_copied", lambda to: shutil.copytree(tmp_path, to))
    return tmp_path


@pytest.mark.zoo
def test_a_fault_that_no_test_sees_survives(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("coverage")
    results = checkout / "faults.jsonl"
    words = ["--only", "passes", "--count", "9", "--seconds", "5", "--results", str(results)]
    assert mutate.main(words) == 1
    found = {one["what"]: one["noticed"] for one in map(json.loads, results.read_text().splitlines())}
    assert found == {"+ -> -": "tests/test_sums.py::test_add", "< -> <=": None}
    assert "survived: passes/sums.py:6: < -> <=" in capsys.readouterr().out

    assert mutate.main([*words, "--bar", "0.5"]) == 0  # nothing is planted twice
    assert len(results.read_text().splitlines()) == 2
