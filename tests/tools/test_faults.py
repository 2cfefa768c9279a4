"""Which faults are planted, and that a planted one is noticed by a test that looks and survives one that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ringopt.tools import mutate
from ringopt.tools.common.faults import faults_of
from ringopt.tools.common.swapped import take_code

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
SUMS = """\
BASE = 1
class Sums:
    def add(self, a):
        return [x + BASE for x in a]
def same(a):
    return a
"""
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


def test_a_living_function_takes_the_code_of_a_changed_file() -> None:
    before = SUMS
    names: dict[str, Any] = {}
    exec(compile(before, "sums.py", "exec"), names)
    held = names["Sums"]().add
    assert not take_code(before, before.replace("BASE = 1", "BASE = 2"), "sums.py"), "that has run"
    assert take_code(before, before.replace("+", "-"), "sums.py")
    assert held([3]) == [2] and names["same"](3) == 3


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "sums.py").write_text(
        "LIMIT = 2\n\n\ndef add(a, b):\n    return a + b\n\n\ndef less(a, b):\n    return a < b\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "import sys\nsys.path.insert(0, 'passes')\nimport sums\n"
        "def test_add():\n    assert sums.add(1, 2) == 3\n"
        "def test_less():\n    assert sums.less(1, 2)\n"
        "def test_limit():\n    assert sums.LIMIT == 2\n"
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
    known = {"+ -> -": "tests/test_sums.py::test_add", "2 -> 3": "tests/test_sums.py::test_limit"}
    assert found == {**known, "< -> <=": None}
    assert "survived: passes/sums.py:9: < -> <=" in capsys.readouterr().out

    assert mutate.main([*words, "--bar", "0.5"]) == 0  # nothing is planted twice
    assert len(results.read_text().splitlines()) == 3
