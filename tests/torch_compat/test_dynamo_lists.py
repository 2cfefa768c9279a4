"""Rows that stand in a list are one tensor for Dynamo, until the program joins them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ringopt.torch_compat import dynamo_lists
from ringopt.torch_compat.dynamo import TraceOtherwise
from ringopt.torch_compat.dynamo_lists import RowsOfAList, is_open_list, put_behind


def program(x: Tensor, join: Callable[[list[Tensor]], Tensor], n: int, kept: list[Tensor]) -> Tensor:
    rows = [x[0] * 3]
    for t in range(n):
        rows.append(x[t] * 2)
    return join(rows)


def joined(stacked: bool, before: Any, rows: Tensor, dim: int) -> Tensor:
    whole = rows.movedim(0, dim) if stacked else rows.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([torch.stack(before, dim) if stacked else torch.cat(before, dim), whole], dim)


def traced(join: Callable[[list[Tensor]], Tensor]) -> tuple[int, list[str]]:
    """How many nodes its graph has where the loop is done at once, and what was said. The numbers are the program's."""
    kind: Any = BuiltinVariable
    call, said, nodes = kind.call_range, list[str](), list[int]()

    def ranged(self: Any, tx: Any, *args: Any) -> Any:
        if said:
            return call(self, tx, *args)
        rows, x = tx.symbolic_locals["rows"], tx.symbolic_locals["x"].realize()
        assert is_open_list(rows) and not is_open_list(TupleVariable([])) and not is_open_list(ListVariable([]))
        assert not is_open_list(tx.symbolic_locals["kept"].realize())  # the caller has it too
        twice = x.call_method(tx, "mul", [tx.symbolic_locals["n"].clone(value=2)], {})
        put_behind(tx, rows, twice, [x.as_proxy().node.meta["example_value"]], lambda: said.append("left"))
        return call(self, tx, tx.symbolic_locals["n"].clone(value=0))

    def backend(gm: Any, _inputs: Any) -> Any:
        nodes.append(len(gm.graph.nodes))
        return gm

    x = torch.randn(9, 2, 3)
    with (
        patch.object(kind, "call_range", ranged),
        patch.object(TorchInGraphFunctionVariable, "call_function", TorchInGraphFunctionVariable.call_function),
    ):
        kind.call_function_handler_cache.clear()
        dynamo_lists.joined_at_once(joined)
        torch._dynamo.reset()
        found = torch.compile(program, backend=backend, dynamic=False)(x.clone(), join, 9, [])
    kind.call_function_handler_cache.clear()
    torch._dynamo.reset()
    assert torch.equal(found, program(x.clone(), join, 9, []))
    return nodes[-1], said


JOINS: list[Any] = [
    torch.stack,
    lambda rows: torch.stack(rows, dim=2),
    lambda rows: torch.cat(rows, 1),
    lambda rows: torch.concat(tensors=rows, dim=0),
]


@pytest.mark.parametrize("join", JOINS)
def test_a_list_that_is_joined_is_no_longer_for_more_rows(join: Any) -> None:
    nodes, said = traced(join)
    assert nodes < 15 and said == []


def written(rows: list[Tensor]) -> Tensor:
    rows[-1].mul_(2)
    return torch.stack(rows)


def backwards(rows: list[Tensor]) -> Tensor:
    return torch.stack(list(reversed(rows)))


READS: list[Any] = [
    written,
    backwards,
    sum,
    lambda rows: torch.stack(rows[1:]),
    lambda rows: torch.stack([*rows, rows[0]]),
]


@pytest.mark.parametrize("join", READS)
def test_a_list_that_is_read_otherwise_is_traced_again(join: Any) -> None:
    nodes, said = traced(join)
    assert nodes > 15 and said == ["left"]


def test_it_has_no_items() -> None:
    said: list[str] = []
    rows: Any = RowsOfAList([], None, [], lambda: said.append("left"))
    for ask in (len, list, tuple, bool, lambda x: x[0], lambda x: [*x], lambda x: x.append(1)):
        with pytest.raises(TraceOtherwise):
            ask(rows)
    assert len(said) == 7


def test_it_knows_of_writes_since() -> None:
    x = torch.ones(2)
    rows = RowsOfAList([], None, [x], lambda: None)
    assert rows.is_as_it_was()
    x[:1].add_(1)
    assert not rows.is_as_it_was()
