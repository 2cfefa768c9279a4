"""What is remembered of code between traces: apart for each number of processes, and nothing of a dry run."""

from __future__ import annotations

from types import CodeType
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor, fx

from ringopt.torch_compat import dynamo_memory
from ringopt.torch_compat.dynamo_memory import Remembered, processes, traced_apart
from ringopt.torch_compat.tracing import compilation_of_frame


def program(x: Tensor) -> Tensor:
    return x.sin() + 1


def test_it_is_that_of_as_many_processes() -> None:
    left, code = Remembered(WeakSet[CodeType]), program.__code__
    with patch.object(dynamo_memory, "_memories", {}):
        left().add(code)
        assert code in left() and processes() == 1
        with traced_apart(8):
            assert processes() == 8 and code not in left()
            left().add(code)
        with traced_apart(8):
            assert code not in left()
        with patch.object(dynamo_memory, "processes", lambda: 2):
            assert code not in left()
        assert code in left()


def compiled_for(lengths: list[int], seen: list[Any]) -> None:
    """`seen`: of each compilation its number and the sizes of its input."""

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        (x,) = (
            node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta["example_value"], Tensor)
        )
        seen.append((compilation_of_frame(), str(x.meta["example_value"].shape[0])))
        return gm

    run = torch.compile(program, backend=backend)
    for n in lengths:
        assert torch.equal(run(torch.ones(n)), program(torch.ones(n)))


def test_dynamo_forgets_what_it_traced_apart() -> None:
    """Sizes that changed, the number of compilations, and their code."""
    torch._dynamo.reset()
    apart_from_it, seen = list[Any](), list[Any]()
    with traced_apart(2):
        compiled_for([3, 4, 5], apart_from_it)
    assert [number for number, _ in apart_from_it] == [0, 1] and apart_from_it[1][1].startswith("s")
    compiled_for([6], seen)
    assert seen == [(0, "6")]
    with traced_apart(2):
        compiled_for([7], apart_from_it)
    compiled_for([6], seen)  # by another backend, of the same size
    assert seen == [(0, "6"), (1, "6")]
