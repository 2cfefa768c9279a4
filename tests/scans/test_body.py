"""The text of a body: the same for the same step, read without running it, and refused where it is none."""

from __future__ import annotations

import json

import pytest
import torch

from ringopt.scans.body import NoBody, from_text, to_text
from ringopt.torch_compat.fx import make_fx
from tests.scans.bodies import delta_rule, diagonal, stabilised


@pytest.mark.parametrize("scan", [delta_rule(2), diagonal(2), stabilised(2)])
def test_a_body_that_went_through_text_is_the_same(scan):
    body = from_text(scan.text)
    given = [*scan.init, *(x[0] for x in scan.xs), *scan.consts]
    for found, expected in zip(body.module(*given), scan.step(*given), strict=True):
        assert torch.equal(found, expected)
    assert to_text(body.module, body.carries, body.xs, body.consts) == scan.text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_device_is_that_of_what_a_body_makes(device):
    given = [torch.ones(2, device=device) for _ in range(2)]
    makes, adds = (
        from_text(to_text(make_fx(f)(*given), 1, 1, 0)).device
        for f in (lambda s, x: (s * x + torch.ones(2, device=device),), lambda s, x: (s + x,))
    )
    assert (makes, adds) == (device, "cpu")


def test_names_and_the_order_of_independent_nodes_are_no_part_of_it():
    graphs = [lambda s, x: (s * 2 + x.exp(),), lambda s, x: ((e := x.exp(), s * 2 + e)[1],)]
    first, second = (to_text(make_fx(f)(torch.ones(2), torch.ones(2)), 1, 1, 0) for f in graphs)
    assert first == second


@pytest.mark.parametrize(
    "step, why",
    [
        (lambda s, x: (torch.bernoulli(s) + x,), "draws random numbers"),
        (lambda s, x: (s.clone().add_(x),), "writes into an operand"),
        (lambda s, x: (s + x + torch.tensor([1.0, 2.0]),), "holds _tensor_constant0"),
    ],
)
def test_what_is_more_than_a_value_of_its_operands_is_refused(step, why):
    with pytest.raises(NoBody, match=why):
        to_text(make_fx(step)(torch.ones(2), torch.ones(2)), 1, 1, 0)


@pytest.mark.parametrize(
    "nodes",
    [
        [["from_file.default", ["/etc/passwd"]]],
        [["add_.Tensor", [{"%": 0}, {"%": 1}]]],
        [["bernoulli.default", [{"%": 0}]]],
        [["no_such_operator.default", [{"%": 0}]]],
        [["__class__.__init__", [{"%": 0}]]],
        [["exp.default", [{"%": 7}]]],
        [["zeros.default", [[2]], {"dtype": {"dtype": "save"}}]],
        [["getitem", [{"%": 0}, "__class__"]]],
    ],
)
def test_a_text_runs_nothing_but_operators_of_aten(nodes):
    text = json.dumps({"carries": 1, "xs": 1, "consts": 0, "nodes": nodes, "out": [0]})
    with pytest.raises(NoBody):
        from_text(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"carries":1,"xs":0,"consts":0,"nodes":[],"out":[0]}'])
def test_what_is_no_text_of_a_body_is_refused(text):
    with pytest.raises(NoBody, match="is no body of a scan"):
        from_text(text)
