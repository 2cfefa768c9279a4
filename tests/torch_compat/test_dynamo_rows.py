"""A loop over the rows of tensors is given to Dynamo as a function of all turns, and no tensor is taken apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat.dynamo import SCAN
from ringopt.torch_compat.dynamo_ranges import AtOnce, LoopHead, RowsInTurns, Turn
from ringopt.torch_compat.dynamo_rows import TAKE_APART, in_the_place_of_loops_over_rows
from tests.torch_compat.test_dynamo_ranges import lie, rows_of

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()


def program(x: Tensor, y: Tensor) -> Tensor:
    h, kept = torch.zeros(2), y.unbind(1)
    for x_t, y_t in zip(x.unbind(0), torch.unbind(y)):  # noqa: B905
        h = h * 0.5 + x_t * y_t
    return h + kept[0].sum()


def number(x: Tensor, y: Tensor) -> int:
    return x.shape[0] if x.shape[0] == y.shape[0] else -1


def step(h: Tensor, x_t: Tensor, y_t: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
    return (h * 0.5 + x_t * y_t,), ()


def scanned(turn: Any, apart: bool, carried: Any, rows: Any, rest: Any) -> Any:
    return SCAN(lambda carry, row: (turn(*carry, *row)[0], ()), carried, rows)


TURN = Turn(
    step,  # type: ignore[arg-type]
    lie,  # type: ignore[arg-type]
    ("h",),
    (RowsInTurns("x", 0), RowsInTurns("y", 0)),
    (),
    (),
    (),
    number=number,  # type: ignore[arg-type]
    counted=("x", "y"),
)


def traced(turn: Turn | None, *given: Tensor) -> tuple[list[str], list[str], bool]:
    """What Dynamo tells meanwhile, the nodes that it makes, and whether they give what the program gives."""
    told, nodes = list[str](), list[str]()

    def turn_of(head: LoopHead) -> Turn | None:
        line, column = head.place
        is_first = SOURCE[line - 1][column:].startswith("x.unbind(0)") and "h" in head.live
        return turn if is_first and "left" not in told else None

    def backend(gm: Any, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    left = lambda head, why: told.append("left")  # noqa: E731
    noted = lambda head, node: told.append("noted")  # noqa: E731
    with (
        patch.object(TensorVariable, "call_method", TensorVariable.call_method),
        patch.object(TorchInGraphFunctionVariable, "call_function", TorchInGraphFunctionVariable.call_function),
    ):
        in_the_place_of_loops_over_rows(AtOnce(turn_of, rows_of, scanned, lambda into, rows: None, noted, left))
        torch._dynamo.reset()
        found = torch.compile(program, backend=backend, dynamic=False)(*given)
    return told, nodes, torch.allclose(found, program(*given))


def test_all_turns_are_one_node() -> None:
    assert all(hasattr(Tensor, name) for name in TAKE_APART)
    told, nodes, right = traced(TURN, torch.randn(9, 2), torch.randn(9, 2))
    assert told == ["noted"] and right and sum("unbind" in name for name in nodes) == 1  # the one beside the loop


@pytest.mark.parametrize(
    "turn, rows, expected",
    [
        (None, (9, 9), []),
        (TURN, (4, 4), []),  # of a few rows
        (TURN, (9, 12), []),  # zip ends with the shorter
        (replace(TURN, carried=("nothing",)), (9, 9), ["left"]),  # Dynamo knows none of that name
    ],
)
def test_other_loops_are_traced_as_ever(turn: Turn | None, rows: tuple[int, int], expected: list[str]) -> None:
    told, nodes, right = traced(turn, *(torch.randn(n, 2) for n in rows))
    assert told == expected and right and sum("unbind" in name for name in nodes) == 3
