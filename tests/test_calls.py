"""Calls of attention operators by the names of their arguments: what is read is what the schema says, and what is
written is read again as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, Call, DilatedCall, FlexOpCall, OpCall, RingCall
from ringopt.ops import operators

FORMS = {
    AttentionCall: ("attention",),
    FlexOpCall: ("flex",),
    RingCall: ("ring_attention", "ring_attention_backward", "ring_backward_begin"),
    DilatedCall: ("dilated_attention", "dilated_attention_backward"),
}
ALL = [(call, name) for call, names in FORMS.items() for name in names]


def given(name: str) -> dict[str, object]:
    """A different value for each argument."""
    schema = getattr(operators, name).default._schema.arguments
    return {argument.name: f"{argument.name} of {name}" for argument in schema}


@pytest.mark.parametrize(("call", "name"), ALL)
@pytest.mark.parametrize("positional", [0, 3, 99])
def test_arguments_are_found_by_name(call: type[Call], name: str, positional: int) -> None:
    values = given(name)
    names = list(values)
    graph = fx.Graph()
    node = graph.call_function(
        getattr(operators, name).default,
        tuple(values[each] for each in names[:positional]),
        {each: values[each] for each in names[positional:]},
    )
    found = call.of(node)
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == values[field.name]


@pytest.mark.parametrize("call", FORMS)
def test_fields_are_the_schema_of_the_forward(call: type[Call]) -> None:
    schema = getattr(operators, FORMS[call][0]).default._schema.arguments
    assert [field.name for field in dataclasses.fields(call)] == [argument.name for argument in schema]


def test_what_is_written_is_read_again_and_defaults_are_left_out() -> None:
    graph = fx.Graph()
    node = graph.call_function(operators.ring_attention.default, tuple(given("ring_attention").values()))
    plain = RingCall.of(node).replace(early="", ticket=None, expand="", site="", facts=None, mask="")
    plain.write(node)
    assert RingCall.of(node) == plain
    assert len(node.args) == len(dataclasses.fields(RingCall)) - 5 and not node.kwargs
    plain.replace(ticket="t").write(node)
    assert node.args[-2:] == ("", "t")


def test_an_operator_that_has_other_arguments_is_an_error() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(KeyError):
        AttentionCall.of(graph.call_function(torch.ops.aten.relu.default, (x,)))


def test_a_half_has_the_arguments_that_it_shares_and_those_that_are_its_own() -> None:
    graph = fx.Graph()
    values = tuple(given("ring_attention_backward").values())
    body = graph.call_function(operators.ring_attention_backward.default, values)
    finish = OpCall.of(body).of_half(operators.ring_backward_finish.default, ticket="other")
    assert finish.args == ("other", *(f"{name} of ring_attention_backward" for name in ("k", "v", "group")))
    assert OpCall.of(finish.insert(graph)) == finish


def test_a_call_of_any_operator_is_written_as_it_is_read() -> None:
    """Whatever was positional; defaults at the end are left out."""
    graph = fx.Graph()
    node = graph.call_function(operators.ring_attention.default, tuple(given("ring_attention").values()))
    call = OpCall.of(node).replace(early="", ticket=None, expand="", site="", facts=None)
    call.write(node)
    assert OpCall.of(node) == call and RingCall.of(node).strategy == call["strategy"]
    assert len(node.args) == len(dataclasses.fields(RingCall)) - 5 and not node.kwargs


@pytest.mark.parametrize("arguments", [{"x": 1}, {"x": 1, "group": "all", "dim": 0}])
def test_an_argument_too_few_or_too_many_is_an_error_that_names_all(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"copy_to_group\.default takes x, group"):
        OpCall.to(operators.copy_to_group.default, **arguments)


def test_a_backward_is_not_written_as_if_it_were_the_forward() -> None:
    node = fx.Graph().call_function(
        operators.ring_attention_backward.default, tuple(given("ring_attention_backward").values())
    )
    before = node.args
    with pytest.raises(TypeError, match="ring_attention_backward"):
        RingCall.of(node).write(node)
    assert node.args == before
