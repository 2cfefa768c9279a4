"""Operators as objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from ringopt.torch_compat import schema
from ringopt.torch_compat.schema import (
    HigherOrderOperator,
    OpNamespace,
    OpOverload,
    OpOverloadPacket,
    can_decompose,
    is_functorch,
    is_pointwise_name,
    names_of_all_operators,
    operator_behind,
    overload_name,
    packet_name,
    schema_of,
    schema_or_none,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("thing", "kind"),
    [
        (torch.ops.aten, OpNamespace),
        (aten.add, OpOverloadPacket),
        (aten.add.Tensor, OpOverload),
        (torch.ops.higher_order.flex_attention, HigherOrderOperator),
    ],
)
def test_the_classes_of_operators(thing: Any, kind: type) -> None:
    assert isinstance(thing, kind)
    others = {OpNamespace, OpOverloadPacket, OpOverload, HigherOrderOperator} - {kind}
    assert not isinstance(thing, tuple(others))


def test_a_schema_says_names_defaults_aliases_and_writes() -> None:
    said = schema_of(aten.add_.Tensor)
    assert said.name == "aten::add_" and said.is_mutable and not schema_of(aten.add.Tensor).is_mutable
    assert [arg.name for arg in said.arguments] == ["self", "other", "alpha"]
    first, _, alpha = said.arguments
    assert first.alias_info is not None and first.alias_info.is_write and not first.kwarg_only
    assert alpha.kwarg_only and alpha.has_default_value() and alpha.default_value == 1
    assert str(first.type) == "Tensor"
    (made,) = schema_of(aten.view.default).returns
    assert made.alias_info is not None and not made.alias_info.is_write
    assert schema_of(aten.add.Tensor).returns[0].alias_info is None


def test_what_is_no_operator_has_no_schema() -> None:
    assert schema_or_none(torch.add) is None and schema_or_none("view") is None
    assert schema_or_none(aten.add.Tensor) is not None


def test_the_names_of_overloads() -> None:
    assert overload_name(aten.add.Tensor) == "Tensor" and overload_name(aten.view.default) == "default"
    assert all(isinstance(getattr(aten.add, name), OpOverload) for name in aten.add.overloads())


def test_what_torch_defines_by_others_decomposes() -> None:
    assert can_decompose(aten.matmul.default) and not can_decompose(aten.mm.default)
    x = torch.ones(2, 2)
    assert torch.equal(aten.matmul.default.decompose(x, x), x @ x)


def test_what_begins_a_vmap_is_functorchs() -> None:
    targets = list[Any]()

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm

    torch.compile(torch.vmap(torch.sin), backend=backend)(torch.ones(2, 3))
    names = {target.__name__ for target in targets if schema.is_functorch(target)}
    assert {"_vmap_increment_nesting", "_add_batch_dim", "_remove_batch_dim"} <= names
    assert not is_functorch(torch.sin) and not is_functorch(flex_attention)


def test_all_operators_are_listed_by_name_and_overload() -> None:
    assert {"aten::add.Tensor", "aten::linear"} <= set(names_of_all_operators())


def test_an_operator_is_found_behind_what_defines_it() -> None:
    made = torch.library.custom_op(
        "ringopt_test_schema::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    assert operator_behind(made) is torch.ops.ringopt_test_schema.twice.default
    assert operator_behind(aten.add.Tensor) is aten.add.Tensor
    assert (packet_name(aten.add), packet_name(3)) == ("aten::add", "")


def test_a_name_says_whether_elements_are_computed_one_by_one() -> None:
    assert all(map(is_pointwise_name, ("mul", "__and__", "truediv", "invert", "masked_fill", "nan_to_num", "isnan")))
    assert not any(map(is_pointwise_name, ("softmax", "matmul", "sum", "bernoulli", "dropout", "no_operator", "name")))
