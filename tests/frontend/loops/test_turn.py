"""One turn of a loop as a function, read off the source of the loop; and the loops that are none."""

from __future__ import annotations

from types import CodeType
from typing import Any

import pytest
import torch

from ringopt.frontend.loops.rows import NotATurn
from ringopt.frontend.loops.source import loops_of
from ringopt.frontend.loops.turn import turn_of
from ringopt.torch_compat.dynamo_ranges import RowsInTurns, Turn


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
    assert turn.read == (
        RowsInTurns("decay", 1),
        RowsInTurns("a", 0),
        RowsInTurns("c", -2),
        RowsInTurns("x", 1, wide=True),
    )
    assert turn.written == (RowsInTurns("out", 1),) and turn.rest == ("out",)  # out.dtype alone is read of it
    assert turn.lie(0, 8, 1, None) == ((0, 1),) * 5
    h, decay, a, c, x, out = torch.randn(2, 3), torch.randn(2), *(torch.randn(2, 3) for _ in range(3)), torch.ones(2)
    (carried,), (row,) = turn.function(h, decay, a, c, x[:, None], out)
    assert torch.equal(carried, h * decay[:, None] + a) and torch.equal(row, carried * c + x)


def in_chunks(x: Any, out: Any, h: Any, size: int) -> Any:
    states = []
    for i in range(x.shape[1] // size):
        start, end = i * size, min((i + 1) * size, x.shape[1])
        states.append(h)
        h = h + x[:, start:end].sum(1) / (end - start)
        out[..., start:end, :] = h[:, None] * x[0, start:end, None, -1]
    return torch.stack(states), out, h


def test_it_takes_as_many_rows_as_a_turn_goes_on_by() -> None:
    turn = the_turn(in_chunks, {"h", "out", "x", "size", "states"})
    assert turn.carried == ("h",) and turn.lists == ("states",)
    assert turn.read == (RowsInTurns("x", 1, wide=True),) and turn.rest == ("size", "x")
    assert turn.written == (RowsInTurns("out", -2, wide=True),)
    x, h = torch.randn(2, 12, 3), torch.randn(2, 3)
    assert turn.lie(0, 2, 1, 4, x) == ((0, 4), (0, 4))
    (carried,), (row, state) = turn.function(h, x[:, :4], 4, x)
    assert torch.equal(carried, h + x[:, :4].sum(1) / 4) and state is h
    assert torch.equal(row, carried[:, None] * x[0, :4, None, -1])


@pytest.mark.parametrize(
    "first, last, step, size, lies",
    [(0, 2, 1, 5, False), (1, 2, 1, 4, True), (-1, 2, 1, 4, False), (0, 2, 2, 4, False), (0, 1, 1, 4.0, False)],
)
def test_turns_are_alike_that_have_all_rows_one_behind_the_other(
    first: int, last: int, step: int, size: int, lies: bool
) -> None:
    turn = the_turn(in_chunks, {"h", "out", "x", "size", "states"})
    assert turn.lie(first, last, step, size, torch.ones(2, 12, 3)) == (((first * 4, 4),) * 2 if lies else None)


def written_then_scaled(x: Any, out: Any, h: Any) -> Any:
    rows = []
    for t in range(9):
        h = h + x[:, t]
        out[:, t] = h
        rows.append(h)
        h *= 2
    return torch.stack(rows), h


def test_a_row_is_what_was_written_and_one_in_a_list_what_it_is_later() -> None:
    turn = the_turn(written_then_scaled, {"x", "out", "h", "rows"})
    (h,), (written, listed) = turn.function(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.equal(written, torch.full((2, 3), 2.0)) and listed is h and torch.equal(h, torch.full((2, 3), 4.0))


def between(x: Any, h: Any) -> Any:
    rows = [h]
    for i in range(1, 9):
        h = h + x[:, i] - x[:, i - 1]
        rows += [h]
    return torch.stack(rows)


def of_a_new_dim(x: Any, h: Any) -> Any:
    for i in range(9):
        start = i
        h = h + x[None, :, start]
        start = i + 1
        h = h * x[0, start]
    return h


def test_a_dim_is_one_of_the_tensor_and_a_number_what_it_is_there() -> None:
    turn = the_turn(of_a_new_dim, {"x", "h"})
    assert turn.read == (RowsInTurns("x", 1), RowsInTurns("x", 1)) and turn.lie(0, 8, 1) == ((0, 1), (1, 1))
    h, now, later = torch.ones(1, 2, 3), torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(turn.function(h, now, later)[0][0], (h + now[None]) * later[0])


def test_rows_may_begin_later() -> None:
    turn = the_turn(between, {"x", "h", "rows"})
    assert turn.read == (RowsInTurns("x", 1), RowsInTurns("x", 1)) and turn.lie(1, 8, 1) == ((1, 1), (0, 1))
    assert turn.lists == ("rows",)


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


def counts_in_a_name(x: Any, h: Any) -> Any:
    for t in range(9):
        scale = 2 * t
        h = h + x[:, t] * scale
    return h


def keeps_a_number(x: Any, h: Any) -> Any:
    for t in range(9):
        start = 2 * t
        h = h + x[:, start : start + 2].sum(1)
    return h, start


def overlaps(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t : t * t].sum(1)
    return h


def squares(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t * t]
    return h


def skips(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, 2 * t : 2 * t + 2 : 2].sum(1)
    return h


def makes_a_dim(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[True, t]
    return h


def sets_a_number_again(x: Any, h: Any, odd: Any) -> Any:
    for t in range(9):
        start = t
        if odd:
            start = t + 1
        h = h + x[:, start]
    return h


def appends_all(x: Any, h: Any) -> Any:
    rows = [h]
    for t in range(9):
        rows += [*x[:, t]]
    return rows


KEPT: list[Any] = []


def appends_elsewhere(x: Any, h: Any) -> Any:
    for t in range(9):
        h = h + x[:, t]
        KEPT.append(h)
    return h


def other_sizes(x: Any, h: Any) -> Any:
    size = 2
    for t in range(9):
        h = h + x[:, t * size : (t + 1) * size].sum(1)
        size = size + 1
    return h


def reads_a_list(x: Any, h: Any) -> Any:
    rows = [h]
    for t in range(9):
        h = rows[-1] + x[:, t]
        rows.append(h)
    return rows


def appends_twice(x: Any, h: Any) -> Any:
    rows = [h]
    for t in range(9):
        rows.append(x[:, t])
        rows.append(h)
    return rows


def appends_two(x: Any, h: Any) -> Any:
    rows = [h]
    for t in range(9):
        rows += [x[:, t], h]
    return rows


def appends_sometimes(x: Any, h: Any) -> Any:
    rows = [h]
    for t in range(9):
        h = h + x[:, t]
        if h is not None:
            rows.append(h)
    return rows


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


def has_its_own_least(x: Any, h: Any, min: Any) -> Any:
    for t in range(9):
        h = h + x[:, t : min(t + 1, 8)]
    return h


class Private:
    def reads(self, x: Any, h: Any) -> Any:
        for t in range(9):
            h = h * self.__decay + x[:, t]
        return h


class PrivateSize:
    def reads(self, x: Any, h: Any) -> Any:
        for t in range(9):
            h = h + x[:, t * self.__size : (t + 1) * self.__size]
        return h


MORE_THAN_ROWS = "the number of the turn is read for more than rows of tensors"
ANOTHER_FORM = "it reads rows in a form that is not known here"
A_LIST = "it reads a list to which it appends, or appends to it twice"
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
        (overlaps, ANOTHER_FORM),
        (squares, ANOTHER_FORM),
        (skips, ANOTHER_FORM),
        (makes_a_dim, ANOTHER_FORM),
        (sets_a_number_again, MORE_THAN_ROWS),
        (appends_all, "it appends to a list in a form that is not known here, or not in each turn"),
        (appends_elsewhere, "a name in it is not of its function alone"),
        (counts_in_a_name, MORE_THAN_ROWS),
        (keeps_a_number, MORE_THAN_ROWS),
        (other_sizes, "the size of a row is another in each turn"),
        (reads_a_list, A_LIST),
        (appends_twice, A_LIST),
        (appends_two, "it appends to a list in a form that is not known here, or not in each turn"),
        (appends_sometimes, "it appends to a list in a form that is not known here, or not in each turn"),
        (is_matched, "match stands in it"),
        (has_its_own_least, "a name of Python's own is another there"),
        (Private.reads, "a name in it is private to a class"),
        (PrivateSize.reads, "a name in it is private to a class"),
        (in_a_cell, "a name in it is not of its function alone"),
    ],
)
def test_a_loop_that_is_more_than_that_is_none(function: Any, why: str) -> None:
    with pytest.raises(NotATurn) as problem:
        the_turn(function, {"h", "start", "size"})
    assert str(problem.value) == why
