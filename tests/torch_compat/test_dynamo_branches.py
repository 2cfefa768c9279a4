"""Branches that data decide, and what Dynamo had traced of them."""

from __future__ import annotations

import operator
from types import CodeType
from typing import Any

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable

from ringopt.torch_compat import dynamo
from ringopt.torch_compat.dynamo_branches import (
    ERRORS,
    JUMP_BREAK,
    Branch,
    RowLoop,
    branches_and_loops,
    decides,
    places_taken,
    raises,
    takes_branches,
)

MOST = 4
too_long: list[CodeType] = []
found: list[tuple[list[Branch], list[RowLoop]]] = []


def here(code: CodeType, _place: int) -> bool:
    return code.co_filename == __file__


def over(rows: torch.fx.Node) -> torch.fx.Node | None:
    return rows.args[0] if rows.target == "nonzero" else None  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def taught(monkeypatch: pytest.MonkeyPatch) -> Any:
    translator = InstructionTranslatorBase
    for kind, name in ((TensorVariable, "unpack_var_sequence"), (translator, "step"), (BuiltinVariable, "call_index")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    takes_branches(here, over, MOST, too_long.append)
    torch._dynamo.reset()
    found.clear()
    too_long.clear()
    with dynamo.patched(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def trace(program: Any, x: torch.Tensor, whole: bool = True) -> torch.fx.Graph:
    graphs: list[torch.fx.Graph] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.append(branches_and_loops()[:2])
        graphs.append(gm.graph)
        return gm

    torch.compile(program, backend=backend, fullgraph=whole)(x)
    return graphs[-1]


def test_a_branch_is_traced_as_if_it_were_taken() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if x.sum() > 0:
            y.mul_(2)
        return y

    graph = trace(program, torch.zeros(3))
    (branch,), _ = found[-1]
    assert isinstance(branch.condition, torch.fx.Node) and branch.condition.name == "gt" and branch.when is True
    assert [node.name for node in branch.nodes if node.target is not decides] == ["mul_"]
    assert branch.ended and not branch.changes and not branch.carried and branch.within is None
    assert [node for node in graph.nodes if node.target is decides]


@pytest.mark.parametrize("skips", [True, False])
def test_so_is_the_rest_of_a_turn_that_may_be_skipped(skips: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for row in range(2):
            if (x[row] > 0).any() if skips else not (x[row] > 0).any():
                continue
            x = x + 1
        return x

    trace(program, torch.zeros(3))
    assert [branch.when for branch in found[-1][0]] == [not skips] * 2
    assert [[new.name for _, new in branch.carried] for branch in found[-1][0]] == [["x"], ["x_1"]]


def test_a_loop_over_rows_that_are_found_has_a_turn_for_each_place() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number in (x > 0).nonzero():
            y[int(number)] += [1.0, 2.0, 3.0][number]
        return y

    graph = trace(program, torch.ones(3))
    branches, (loop,) = found[-1]
    assert loop.over.name == "gt" and loop.turns == 3
    assert [(branch.condition, branch.when) for branch in branches] == [(loop, 0), (loop, 1), (loop, 2)]
    assert [node.args[1] for node in graph.nodes if "iadd" in node.name] == [1.0, 2.0, 3.0]


def test_loops_of_too_many_turns_are_left() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        for number in (x > 0).nonzero():
            y[number] += 1
        return y

    trace(program, torch.ones(MOST))
    assert len(found[-1][0]) == MOST
    with pytest.raises(dynamo.TorchDynamoException):
        trace(program, torch.ones(MOST + 1))
    assert {code.co_name for code in too_long} == {"program"}


def test_what_is_another_object_behind_it_is_told() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        kept, count, unread, y = [x], 0, 0, x
        if x.sum() > 0:
            kept.append(x)
            count, unread, y = count + 1, 5, x + 1
        unread = 0
        return y * (len(kept) + count + unread)

    trace(program, torch.ones(3))
    (branch,), _ = found[-1]
    assert sorted(branch.changes.split(", ")) == ["a list", "count"]
    assert [(old and old.name, new.name) for old, new in branch.carried] == [("l_x_", "y")]


def test_one_in_another_says_so() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if x.sum() > 0:
            if x.max() > 1:
                y.mul_(2)
            y.add_(1)
        return y

    trace(program, torch.ones(3))
    outer, inner = found[-1][0]
    assert inner.within is outer and set(inner.nodes) < set(outer.nodes)


class OwnError(ValueError):
    """Which is made of more than its words."""

    def __init__(self, words: str) -> None:
        super().__init__(words, 1)


def test_an_error_stands_in_the_graph() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("no")
        return x

    (noted,) = trace(program, torch.ones(3)).find_nodes(op="call_function", target=raises)
    assert noted.args[0].target in ("gt", operator.gt) and noted.args[1:] == (True, "builtins.ValueError", "no")
    assert ERRORS["builtins.ValueError"] is ValueError
    assert found[-1] == ([], []) and not places_taken()


def test_where_no_graph_comes_of_it_the_places_are_known() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise OwnError("no")
        return x

    with pytest.raises(Exception, match="no"):
        trace(program, torch.ones(3))
    assert [code.co_name for code, _ in places_taken()] == ["program"]
    assert not places_taken()


def written(source: str, file: str) -> Any:
    """The function `program` of a source that pytest does not rewrite."""
    space: dict[str, Any] = {}
    exec(compile(source, file, "exec"), space)
    return space["program"]


def test_assertions_are_left_to_dynamo() -> None:
    trace(written("def program(x):\n    assert x.sum() > 0\n    return x", __file__), torch.ones(3))
    assert found[-1] == ([], [])


def test_the_reasons_are_those_of_dynamo() -> None:
    reasons: list[str] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        reasons.append(dynamo.break_reason(gm).reason)
        return gm

    program = written("def program(x):\n    return x + 1 if x.sum() > 0 else x - 1", "elsewhere.py")
    torch.compile(program, backend=backend)(torch.ones(3))
    assert reasons[0].startswith(JUMP_BREAK)
