"""Operators that torch defines by others, taken apart where the parts have its gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from ringopt.ir.nodes import op_name
from ringopt.sharding.composite import parts_of
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from tests.harness.translation import validate_function

REAL, COMPLEX = torch.float64, torch.complex128


def call(target: object, *inputs: Tensor) -> fx.Node:
    """A call of `target` in a graph of its own, with the values that a capture would have."""
    mode, graph = FakeTensorMode(), fx.Graph()
    args = [graph.placeholder(f"x{number}") for number in range(len(inputs))]
    for arg, value in zip(args, inputs, strict=True):
        arg.meta["val"] = mode.from_tensor(value)
    node = graph.call_function(target, tuple(args))
    with mode:
        node.meta["val"] = target(*(arg.meta["val"] for arg in args))
    return node


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_an_outer_product_is_a_product(dtype: torch.dtype) -> None:
    parts = parts_of(
        call(torch.ops.aten.outer.default, torch.ones(3, dtype=dtype), torch.ones(2, dtype=dtype)), frozenset()
    )
    assert parts is not None
    assert {op_name(node) for node in parts.nodes if node.op == "call_function"} <= {"view", "unsqueeze", "mul"}


@pytest.fixture(scope="module")
def scaled() -> Iterator[object]:
    library = torch.library.Library("ringopt_test_composite", "DEF")
    library.define("scaled(Tensor x) -> Tensor")

    def hides(x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.abs().sum()
        return x * size

    library.impl("scaled", hides, "CompositeImplicitAutograd")
    yield torch.ops.ringopt_test_composite.scaled.default
    library._destroy()


@pytest.mark.parametrize("dtype", [REAL, COMPLEX])
def test_what_it_hides_from_autograd_no_part_of_it_would(scaled: object, dtype: torch.dtype) -> None:
    assert parts_of(call(scaled, torch.ones(3, dtype=dtype)), frozenset()) is None
    assert parts_of(call(scaled, torch.ones(3, dtype=torch.int64)), frozenset()) is not None  # it has no gradient


def test_what_is_known_is_left_as_it_is() -> None:
    x = torch.ones(2, 2)
    assert parts_of(call(torch.ops.aten.add.Tensor, x, x), frozenset()) is None
    assert parts_of(call(torch.ops.aten.outer.default, x[0], x[0]), frozenset({"outer"})) is None


@pytest.fixture(scope="module")
def of_a_stranger() -> Iterator[object]:
    """What torch defines by a product and an operator that nothing here knows."""
    library = torch.library.Library("ringopt_test_stranger", "DEF")
    library.define("stranger(Tensor x) -> Tensor")
    library.impl("stranger", torch.cos, "CompositeExplicitAutograd")
    library.define("twice(Tensor x) -> Tensor")
    ops = torch.ops.ringopt_test_stranger
    library.impl("twice", lambda x: ops.stranger(x) * 2, "CompositeImplicitAutograd")
    yield ops.twice.default
    library._destroy()


def test_what_has_a_part_that_nothing_knows_is_not_taken_apart(of_a_stranger: object) -> None:
    node = call(of_a_stranger, torch.ones(3, dtype=torch.int64))
    assert parts_of(node, frozenset()) is None
    assert parts_of(node, frozenset({"ringopt_test_stranger::stranger"})) is not None


def test_of_several_results_each_is_that_of_its_own_part() -> None:
    """dsplit consists of slices."""

    def program(x: Tensor) -> tuple[Tensor]:
        one, other = torch.dsplit(F.scaled_dot_product_attention(x, x, x, is_causal=True), 2)
        return (one - 2 * other,)

    verdict = validate_function(2, program, [torch.randn(2, 7, 4, dtype=REAL, requires_grad=True)])
    assert verdict.wrong == "" and [gather.op for gather in verdict.report.gathers] == ["output"]
