"""What operators make of fake values is remembered by kind: the same numbers of the same tensors, asked for once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ringopt.ir import fake_cache
from ringopt.ir.fake_cache import Answers, kind_of
from ringopt.ops import operators

aten = torch.ops.aten


@pytest.fixture
def asked(monkeypatch):
    """Calls an operator through Answers; (result, whether torch was asked)."""
    answers, mode = Answers(), FakeTensorMode()
    monkeypatch.setattr(fake_cache, "SHARED", {})

    def ask(target, *args, **kwargs):
        runs = []

        def run():
            runs.append(target)
            return target(*args, **kwargs)

        with mode, torch.no_grad():
            return answers.call(target, args, kwargs, run), bool(runs)

    def fake(*size, **kwargs):
        with mode:
            return torch.empty(size, **kwargs)

    ask.fake, ask.in_another_graph = fake, answers.own.clear
    return ask


def lies_in(x, y):
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_results_have_no_gradient_the_first_time_nor_later(asked):
    """torch says so of a parameter's view, which made files of one program differ."""
    found = [asked(aten.expand.default, asked.fake(1, 4, requires_grad=True), [3, 4]) for _ in range(2)]
    assert [(y.requires_grad, again) for y, again in found] == [(False, True), (False, False)]


@pytest.mark.parametrize(
    "target, args",
    [
        (aten.linear.default, (lambda new: new(2, 3, 4), lambda new: new(5, 4))),
        (aten.transpose.int, (lambda new: new(2, 3, 4), 1, 2)),
        (aten.slice.Tensor, (lambda new: new(2, 3, 4), 1, 1, 3)),
        (aten.split.Tensor, (lambda new: new(2, 6), 2, 1)),
        (aten.native_layer_norm.default, (lambda new: new(2, 4), [4], None, None, 1e-5)),
        (aten.to.dtype, (lambda new: new(2, 4), torch.bfloat16)),
        (aten.to.dtype, (lambda new: new(2, 4), torch.float32)),
        (aten.argmax.default, (lambda new: new(2, 4, device="meta"), -1)),
    ],
    ids=lambda given: str(given) if isinstance(given, torch._ops.OpOverload) else "",
)
def test_the_second_time_it_is_the_same_without_torch(asked, target, args):
    found = []
    for _ in range(2):
        operands = [arg(asked.fake) if callable(arg) else arg for arg in args]
        value, by_torch = asked(target, *operands)
        parts = value if isinstance(value, (tuple, list)) else [value]
        memory = [(part is operands[0], lies_in(part, operands[0]), lies_in(part, parts[0])) for part in parts]
        found.append((type(value), [kind_of(part) for part in parts], memory, by_torch))
    assert found[0][:3] == found[1][:3]
    assert (found[0][3], found[1][3]) == (True, False)


def test_what_differs_is_asked_again(asked):
    x = asked.fake(2, 4, dtype=torch.int64)
    assert asked(aten.add.Scalar, x, 1)[1]
    assert asked(aten.add.Scalar, x, 1.0)[1], "1.0 equals 1, and the result is another"
    assert asked(aten.add.Scalar, x, True)[1]
    assert asked(aten.add.Scalar, asked.fake(4, 2, dtype=torch.int64).t(), 1)[1], "other strides"
    assert asked(aten.mul.Tensor, x, x)[1]
    assert asked(aten.mul.Tensor, x, asked.fake(2, 4, dtype=torch.int64))[1], "two tensors, not one"
    assert not asked(aten.mul.Tensor, asked.fake(2, 4, dtype=torch.int64), asked.fake(2, 4, dtype=torch.int64))[1]


def test_answers_of_torch_hold_for_all_graphs_and_ours_for_one(asked):
    """Ours look at the mesh, of which there may be another by the same name later."""
    x, group = asked.fake(2, 4), "pretend:0/2"
    own = operators.copy_to_group.default
    assert asked(aten.exp.default, x)[1] and asked(own, x, group)[1]
    assert not asked(aten.exp.default, x)[1] and not asked(own, x, group)[1]
    asked.in_another_graph()
    assert not asked(aten.exp.default, x)[1] and asked(own, x, group)[1]


def test_writes_are_never_remembered(asked):
    for _ in range(2):
        assert asked(aten.add_.Scalar, asked.fake(2, 4), 1)[1]


def test_open_sizes_are_never_remembered():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(5, 3), static_shapes=False)
    assert kind_of(x) is None
