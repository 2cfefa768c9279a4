"""`ringopt diff` in a pull request: a comment that fits, annotations, and rules on which a check fails."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from ringopt.compare.graph_diff import GraphDiff, GraphTotals, diff_views, with_errors
from ringopt.compare.node_values import NodeError
from ringopt.tools.common.diff_rules import fail_rule
from ringopt.tools.diff_ci import LONGEST, github_commands, markdown, placed
from tests.compare.test_graph_diff import CHAIN, program
from tests.reporting.test_diff_page import NAUGHTY, many


def sent(before: int | None, after: int | None) -> GraphDiff:
    """One program, that sends so many bytes."""
    diff = diff_views(program(CHAIN), program(CHAIN.replace("relu", "gelu")))
    sides = (GraphTotals(5, 0, number, 100) for number in (before, after))
    return replace(diff, before=next(sides), after=next(sides))


@pytest.mark.parametrize(
    ("text", "before", "after", "broken"),
    [
        ("bytes", 100, 100, False), ("bytes", 100, 101, True), ("bytes", 100, 99, False),
        ("bytes+10%", 100, 110, False), ("bytes+10%", 100, 111, True), ("bytes+5", 100, 105, False),
        ("bytes+5", 100, 106, True), ("bytes", 0, 1, True), ("bytes+10%", 0, 0, False), ("bytes", None, 1, True),
        ("flops", 1, 1, False), ("nodes+1", 1, 1, False), ("refused", 1, 1, False), ("error", 1, 1, True),
    ],
)  # fmt: skip
def test_a_rule_is_broken_by_more_than_it_allows(text: str, before: int, after: int, broken: bool) -> None:
    said = fail_rule(text).broken(sent(before, after))
    assert bool(said) == broken and said.startswith(text if broken else "")


def test_errors_have_rules() -> None:
    diff = with_errors(sent(1, 1), {"y": NodeError(1e-7, 2e-6, 1e-4), "z": NodeError(1e-3, 2e-3, 1e-4)})
    assert fail_rule("error").broken(diff).startswith("error: %z is off by 2.0e-03")
    assert fail_rule("error>1e-6").broken(diff).startswith("error>1e-6: %y is off by")
    assert fail_rule("error>0").broken(diff).startswith("error>0: %y is off by")
    assert fail_rule("error>0.1").broken(diff) == ""


@pytest.mark.parametrize("text", ["byte", "bytes+", "bytes+10%%", "error+1", "nodes>3", "error>"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no rule, such as bytes\+10%"):
        fail_rule(text)


def test_a_comment_begins_with_what_matters_and_fits() -> None:
    diff = with_errors(many(400), {"n3_4": NodeError(1.0, 0.5, 1e-4)})
    comment = markdown(diff, "a.pt2", "b.pt2", ["bytes+10%: 1 -> 2"])
    assert len(comment) < LONGEST
    order = ["### a.pt2 → b.pt2", "❌ bytes+10%: 1 -\\> 2", "the first %n3\\_4", "| bytes sent by a rank |", "```diff"]
    assert [comment.index(part) for part in order] == sorted(comment.index(part) for part in order)
    outside = "".join(part for place, part in enumerate(comment.split("```")) if place % 2 == 0)
    assert NAUGHTY not in outside and "<script>" not in outside.replace("\\<", "")
    modules = program("\n".join(["x = input", *(f"n{n} = op{n}(x) @layer.x{n}" for n in range(1500))]))
    long = markdown(diff_views(program("x = input"), modules), "a", "b")
    assert len(long) < LONGEST and "more modules that differ" in long


def test_annotations_are_one_line_each() -> None:
    diff = with_errors(many(), {"n0_6": NodeError(0.5, 0.25, 1e-4)})
    lines = list(github_commands(diff, ["bytes+10%:\n 1 -> 2"]))
    assert lines[0] == "::error title=ringopt diff::bytes+10%25:%0A 1 -> 2"
    assert lines[1].startswith("::error title=ringopt diff: the first value that is off::%25n0_6 is off by 2.5e-01")
    assert lines[2].startswith("::notice title=ringopt diff::") and len(lines) == 3


def test_annotations_stand_at_lines_of_the_repository(tmp_path: Path) -> None:
    """Also where the program was exported in another folder; a file that is not there is not named."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a,b.py").write_text("")
    assert placed("/home/runner/work/src/a,b.py:12", tmp_path) == "file=src/a%2Cb.py,line=12,"
    assert [placed(path, tmp_path) for path in ("", "/elsewhere/b.py:3", "../src/c.py:1", "src/a,b.py:x")] == [""] * 4
    diff = many()
    changes = list(diff.changes)
    at = next(place for place, change in enumerate(changes) if change.is_site)
    view = changes[at].after
    assert view is not None and view.site is not None
    refused = replace(view, site=replace(view.site, reason="made of scores"), path=str(tmp_path / "src" / "a,b.py:7"))
    changes[at] = replace(changes[at], after=refused)
    lines = list(github_commands(replace(diff, changes=tuple(changes)), [], tmp_path))
    assert lines[0].startswith("::warning file=src/a%2Cb.py,line=7,title=ringopt diff: not sharded::layers.0.")
