"""Where the transforms of torch.func begin and end, and what an error in them leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._functorch import get_dynamic_layer_stack_depth

from ringopt.torch_compat.schema import is_functorch
from ringopt.torch_compat.transforms import (
    OF_VMAP,
    depth_after,
    is_forward_mode,
    is_unwrapped,
    load_tables,
    undone_after_an_error,
)


def targets_of(function: Any) -> list[Any]:
    found = list[Any]()

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.ones(2, 3))
    return found


def test_what_begins_ends() -> None:
    depth, seen = 0, set[int]()
    for target in targets_of(torch.vmap(torch.func.grad(lambda x: x.sin().sum()))):
        seen.add(depth := depth_after(target, depth))
        assert not is_forward_mode(target)
    assert depth == 0 and seen == {0, 1, 2, 3}  # vmap, hooks forbidden, grad


def test_functions_of_vmap_are_told_from_those_of_gradients() -> None:
    def others(function: Any) -> set[str]:
        names = {target.__name__ for target in targets_of(function) if is_functorch(target)}
        return names - {*OF_VMAP, "lazy_load_decompositions"}

    assert others(torch.vmap(torch.sin)) == set() and others(torch.func.grad(lambda x: x.sin().sum()))


def test_forward_mode_is_told() -> None:
    assert any(map(is_forward_mode, targets_of(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1])))


def test_tensors_of_a_transform_are_not_plain() -> None:
    kept = list[Any]()
    torch.vmap(lambda x: kept.append(is_unwrapped(x)) or x * 1)(torch.ones(2))
    assert kept == [False] and is_unwrapped(torch.ones(2)) and is_unwrapped(2) and not is_unwrapped((torch.ones(2),))


def test_an_error_leaves_no_transform_open() -> None:
    def within(x: torch.Tensor) -> torch.Tensor:
        torch._C._functorch._grad_increment_nesting()
        torch._C._autograd._saved_tensors_hooks_disable("no")
        raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"), undone_after_an_error():
        within(torch.ones(2))
    assert get_dynamic_layer_stack_depth() == 0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        pass


def test_tables_are_filled_again_and_again() -> None:
    load_tables()
    load_tables()
