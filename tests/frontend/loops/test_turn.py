"""One turn of a loop as a function, read off the source of the loop; and the loops that are none."""

from __future__ import annotations

import linecache
from types import CodeType
from typing import Any

import pytest
import torch

from ringopt.frontend.loops.source import loop_at, loops_of
from ringopt.frontend.loops.turn import NotATurn, turn_of
from ringopt.torch_compat.dynamo_ranges import Turn


def state_space(x: Any, a: Any, c: Any, out: Any, h: Any, decay: Any) -> Any:
    for t in range(x.shape[1]):
        h = h * decay[:, t, None] + a[t]
        y = h * c[..., t, :] + x[:, t : t + 1].sum(1)
        out[:, t] = y.to(out.dtype)
    return out, h


def the_turn(function: Any, live: set[str]) -> Turn:
    """Of the only loop of a function, behind which `live` names are read."""
    (loop,) = (loop for loop in loops_of(function.__code__).values() if loop.lineno in lines_of(function.__code__))
    return turn_of(loop, function.__code__, live, function.__globals__)


def lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}


def test_it_reads_rows_carries_what_is_read_before_it_is_set_and_gives_rows() -> None:
    turn = the_turn(state_space, {"h", "out", "x", "a", "c", "decay"})
    assert turn.carried == ("h",)  # y is set before it is read, and not read behind the loop
    assert turn.read == (("decay", 1), ("a", 0), ("c", -2), ("x", 1))
    assert turn.written == (("out", 1),) and turn.rest == ("out",)  # out.dtype alone is read of it
    h, decay, a, c, x, out = (torch.randn(2, 3) for _ in range(6))
    (carried,), (row,) = turn.function(h, decay, a, c, x, out)
    assert torch.equal(carried, h * decay[:, None] + a if decay.dim() == 1 else carried)
    assert row.shape == torch.broadcast_shapes(carried.shape, c.shape)


def test_its_lines_are_those_of_the_program() -> None:
    turn = the_turn(state_space, {"h"})
    assert turn.function.__code__.co_filename == __file__ and turn.function.__name__ == "state_space"
    assert lines_of(turn.function.__code__) <= lines_of(state_space.__code__)


def counts(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t] * t
    return h


def leaves_early(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
        if h is None:
            break
    return h


def reads_what_it_wrote(x: Any, h: Any) -> Any:
    for t in range(9):
        x[:, t] = x[:, t] + h
        h = h * 2
    return x


def reads_the_whole(x: Any, h: Any) -> Any:
    for _t in range(9):
        h = h + x.sum()
    return h


def writes_twice(x: Any, out: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
        out[:, t] = h
        out[:, t] = -h
    return out


def writes_sometimes(x: Any, out: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
        if h is not None:
            out[:, t] = h
    return out


def adds_to_rows(x: Any, out: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
        out[:, t] += h
    return out


def changes_what_it_reads(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
        x = x + h[:, None]
    return h


def picks_by_a_tensor(x: Any, h: Any, places: Any) -> Any:
    for t in range(9):
        h = h + x[:, t, places]
    return h


def takes_two_rows(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t : t + 2].sum(1)
    return h


def in_a_cell(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
    return lambda: h


def is_matched(x: Any, h: Any, kind: Any) -> Any:
    for t in range(9):
        match kind:
            case (h, _):
                kind = x[:, t]
    return h


class Private:
    def reads(self, x: Any, h: Any) -> Any:
        for t in range(9):
            h = h * self.__decay + x[:, t]
        return h


MORE_THAN_ROWS = "the number of the turn is read for more than rows of tensors"
ANOTHER_FORM = "it reads rows in a form that is not known here"
READS_OR_TWICE = "it reads what it writes, or writes it twice"


@pytest.mark.parametrize(
    "function, why",
    [
        (counts, MORE_THAN_ROWS),
        (leaves_early, "break stands in it"),
        (reads_what_it_wrote, READS_OR_TWICE),
        (reads_the_whole, "it reads no rows"),
        (writes_twice, READS_OR_TWICE),
        (writes_sometimes, "it writes a part of a row, or not in each turn"),
        (adds_to_rows, "it writes rows in a form that is not known here"),
        (changes_what_it_reads, "a tensor of which it reads or writes rows is another in each turn"),
        (picks_by_a_tensor, ANOTHER_FORM),
        (takes_two_rows, ANOTHER_FORM),
        (is_matched, "match stands in it"),
        (Private.reads, "a name in it is private to a class"),
        (in_a_cell, "a name in it is not of its function alone"),
    ],
)
def test_a_loop_that_is_more_than_that_is_none(function: Any, why: str) -> None:
    with pytest.raises(NotATurn) as problem:
        the_turn(function, {"h"})
    assert str(problem.value) == why


LOOP = "def f(x, h):\n    for t in range(9):\n        h = h + x[:, t]\n    return h\n"


def defined(text: str, file: str) -> CodeType:
    """The code of the function that a file defines."""
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    found: CodeType = names["f"].__code__
    return found


def test_the_source_has_to_be_that_of_the_code_that_runs(tmp_path: Any) -> None:
    """A file that was edited after it was imported says something else than runs."""
    file = tmp_path / "program.py"
    file.write_text(LOOP)
    runs = defined(LOOP, str(file))
    assert loop_at(runs, (2, 13)) is not None and loop_at(runs, (3, 13)) is None
    file.write_text(LOOP.replace("+ x", "- x"))
    linecache.checkcache()
    assert loops_of(runs) == {}
    file.write_text("def f(x, h:\n")
    linecache.checkcache()
    assert loops_of(runs) == {}


def test_what_has_no_source_has_no_loops() -> None:
    assert loops_of(defined(LOOP, "<no file>")) == {}
