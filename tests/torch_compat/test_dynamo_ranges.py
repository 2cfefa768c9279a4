"""A loop over a range is given to Dynamo as a function of all turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.builtin import BuiltinVariable

from ringopt.torch_compat import dynamo_ranges
from ringopt.torch_compat.dynamo import SCAN
from ringopt.torch_compat.dynamo_ranges import AtOnce, LoopHead, RowsInTurns, Turn, is_of_first_turn


def program(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    h, out = torch.zeros(2), torch.zeros_like(x)
    for t in range(n):
        h = h * 0.5 + x[t]
        out[t] = h
    return h, out


def step(h: Tensor, x_t: Tensor) -> tuple[tuple[Tensor], tuple[Tensor]]:
    h = h * 0.5 + x_t
    return (h,), (h,)


def lie(first: int, last: int, step: int) -> tuple[tuple[int, int], ...]:
    return ((first, 1), (first, 1))


def rows_of(x: Tensor, dim: int, wide: bool, turns: int, start: int, size: int) -> Tensor:
    return x[start : start + turns]


def scanned(turn: Any, apart: bool, carried: Any, rows: Any, rest: Any) -> Any:
    def cloned(carry: Any, row: Any) -> Any:
        (new,), (y,) = turn(*carry, *row)
        return (new.clone(),), (y.clone(),)

    return SCAN(cloned, carried, rows)


def put(into: Any, rows: Any) -> None:
    into[0].copy_(rows[0])


@contextmanager
def taught(turn: Turn) -> Iterator[list[str]]:
    """What Dynamo says meanwhile."""
    said: list[str] = []

    def turn_of(head: LoopHead) -> Turn | None:
        assert head.code is program.__code__ and head.place[1] == 13 and {"h", "out", "x"} <= head.live
        return turn if "left" not in said else None

    with patch.object(BuiltinVariable, "call_range", BuiltinVariable.call_range):
        noted = lambda head, node: said.append(node.name)  # noqa: E731
        left = lambda head, why: said.append("left")  # noqa: E731
        dynamo_ranges.in_the_place_of_loops(AtOnce(turn_of, rows_of, scanned, put, noted, left))
        torch._dynamo.reset()
        yield said


def nodes(given: tuple[Any, ...]) -> tuple[int, bool]:
    """How many Dynamo makes, and whether what runs is what the program gives."""
    graphs: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(len(gm.graph.nodes))
        return gm

    found = torch.compile(program, backend=backend, dynamic=False)(*given)
    return graphs[-1], all(torch.allclose(*pair) for pair in zip(found, program(*given), strict=True))


TURN = Turn(step, lie, ("h",), (RowsInTurns("x", 0),), (RowsInTurns("out", 0),), (), ())  # type: ignore[arg-type]


def test_its_graph_has_one_node_of_all_turns() -> None:
    with taught(TURN) as said:
        few, many = nodes((torch.ones(10, 2), 9)), nodes((torch.ones(40, 2), 33))
    assert few == many and few[1] and said == ["scan", "scan"]
    with taught(TURN) as said:
        assert nodes((torch.ones(10, 2), 7))[1] and said == []  # few turns are traced one by one


def test_where_dynamo_does_not_get_through_it_traces_the_frame_again() -> None:
    def wrong(h: Tensor, x_t: Tensor) -> Any:
        return (h[:1] + x_t[:1],), (h,)

    with taught(replace(TURN, function=wrong)) as said:  # type: ignore[arg-type]
        assert nodes((torch.ones(10, 2), 9))[1]
    assert said == ["left"]


def test_ranges_that_go_down_or_nowhere_are_as_they_were() -> None:
    def goes(x: Tensor, step: int) -> Tensor:
        for t in range(9, 0, step):
            x = x * t
        return x

    with taught(TURN) as said:
        x = torch.ones(2)
        assert torch.equal(torch.compile(goes, backend="eager")(x, -1), goes(x, -1))
        with pytest.raises(Exception, match=r"must not be zero|in goes"):  # torch 2.11 says where, not what
            torch.compile(goes, backend="eager")(x, 0)
    assert said == []


def test_it_is_told_what_only_the_first_turn_does() -> None:
    assert is_of_first_turn(RuntimeError("Expected init and carry to have same metadata but found: pair[0]"))
    assert not is_of_first_turn(RuntimeError("anything else"))


def test_a_graph_break_within_is_none_of_the_program() -> None:
    """Behind one, Dynamo would go on in the middle of what it traces in the place of the loop."""

    def breaks(*given: Any) -> Any:
        torch._dynamo.graph_break()
        return scanned(*given)

    turn_of = lambda head: TURN if "left" not in said else None  # noqa: E731
    said: list[str] = []
    with (
        patch.object(BuiltinVariable, "call_range", BuiltinVariable.call_range),
        torch._dynamo.config.patch(nested_graph_breaks=True),
    ):
        noted = lambda head, node: said.append(node.name)  # noqa: E731
        left = lambda head, why: said.append("left")  # noqa: E731
        dynamo_ranges.in_the_place_of_loops(AtOnce(turn_of, rows_of, breaks, put, noted, left))
        torch._dynamo.reset()
        assert nodes((torch.ones(10, 2), 9))[1]
    assert said == ["left"]
