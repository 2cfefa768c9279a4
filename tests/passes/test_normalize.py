"""After normalize the graph has no writes and no regions, and gives the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.ir.refusal import GraphRefused
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, assert_same, ops


class Body(nn.Module):
    """A module whose forward is the function under test; its parameters make gradients."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        return self.function(self, x)


def write_row(m, x):
    y = m.linear(x).clone()
    y[:, 0] = 0
    return y * 2


def write_through_a_view(m, x):
    y = m.linear(x).clone()
    rows = y.view(-1, 8)
    y[:, 1:] += 1
    return rows.sin() + y.view(-1, 8)


def write_after_use(m, x):
    y = m.linear(x) * 1
    z = y + 1
    y.mul_(2)
    return y + z


def write_twice(m, x):
    y = m.linear(x).clone()
    y[:, 0].fill_(3)
    y[:, 1].copy_(y[:, 0])
    y.transpose(0, 1)[0].add_(1)
    return y


def write_chain(m, x):
    y = m.linear(x).clone()
    return y.add_(1).mul_(2).masked_fill_(y > 0, 0.5)


def write_other_dtype(m, x):
    y = torch.zeros(x.shape, dtype=torch.float16)
    y += m.linear(x)
    return y.float()


def write_whole_then_part(m, x):
    y = m.linear(x).clone()
    y.copy_(y.flip(0))
    y[:, 0] = 1
    y.add_(y)
    y.transpose(0, 1)[2] += 3
    return y


def change_a_buffer(m, x):
    m.count += 1
    return m.linear(x) + m.count


def no_grad_region(m, x):
    with torch.no_grad():
        y = m.linear(x)
    return m.linear(x + y)


def written_then_read_in_no_grad(m, x):
    y, z = torch.zeros(x.shape), torch.zeros(x.shape)
    rows = z[:, 1:]
    y[:, 1:] = m.linear(x)[:, :-1]
    z.copy_(y)
    with torch.no_grad():
        factor = y.sum() + rows.sum()
    return factor * m.linear(x) + y


def written_in_no_grad(m, x):
    y = torch.zeros_like(m.linear(x))
    with torch.no_grad():
        y.copy_(m.linear(x)).mul_(2)
        y[:, 0] = m.linear(x)[:, 1]
    return y * m.linear(x)


def buffers_updated_in_no_grad(m, x):
    with torch.no_grad():
        m.count.lerp_(m.linear(x).mean((0, 1)), 0.1)
        m.count.data.mul_(2).add_(m.linear(x).sum((0, 1)))
        m.count = F.normalize(m.count + m.linear(x)[0, 0], dim=0, out=m.count)
    return m.linear(x) * m.count


def data_is_no_constant(m, x):
    y = m.linear(x)
    return y * y.data.mean()


def views_in_place(m, x):
    y = m.linear(x).clone()
    row = y[:, 0]
    row.unsqueeze_(1).mul_(2)
    y.transpose_(1, 2).add_(1)
    return y.transpose(1, 2) * (m.linear(x) * 1).detach_() + row


def write_into_a_diagonal(m, x):
    y = m.linear(x).clone()
    y.diagonal(dim1=1, dim2=2).mul_(3)
    return y


def written_over(m, x):
    """Nothing of a layer is left but that its gradient is zeros, and not none."""
    y, z = m.linear(x) * 1, x * 1
    y.view(-1).zero_()
    y.add_(1).fill_(2).copy_(z).uniform_(3, 3)
    return y * z


def as_strided_in_place(m, x):
    y = m.linear(x)[:, :, :5].clone()
    before = y[:, 0]
    y.as_strided_((2, 5, 5), (25, 1, 5))
    return y + before.unsqueeze(1)


def given_back_in_no_grad(m, x):
    y = m.linear(x)
    with torch.no_grad():
        mean, z = y.contiguous().mean(), F.dropout(y.float(), 0.5, False)
    return y * mean + z


def given_back_by_rarer_operators(m, x):
    y = m.linear(x)
    with torch.no_grad():
        same, wide = torch.broadcast_tensors(y, y[:, :1])
        a, b = torch.conj_physical(y), y.sum_to_size(y.shape)
    return y + same * 2 + wide * 3 + a * 5 + b * 7


def compared_in_place(m, x):
    y = m.linear(x) * 1
    return y.gt_(0)


def inference_region(m, x):
    with torch.inference_mode():
        y = m.linear(x).mean()
        with torch.inference_mode(False):
            z = m.linear(x)
    return m.linear(x) + y + z


def copy_of_another_order(m, x):
    y = x.new_zeros(2, 8, 5)
    y.copy_(m.linear(x).transpose(1, 2))
    return y.view(2, -1) * 2, y.as_strided((2, 3), (40, 1)) * 2


def powers_in_place(m, x):
    return (m.linear(x) * 1).pow_(2) + x.abs().pow_(x.abs())


def grad_in_no_grad(m, x):
    with torch.no_grad():
        y = m.linear(x)
        with torch.enable_grad():
            z = m.linear(x)
    return y + z


def autocast_region(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.linear(x)
        y = F.layer_norm(y + 1, (8,)).softmax(-1) @ m.linear.weight
    return m.linear(y.float())


def autocast_attention(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = m.linear(x).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return y.float()


def masks_in_place(m, x):
    mask = torch.ones(5, 8, dtype=torch.bool).tril()
    mask |= x[0] > 0
    mask &= x[1] > 0
    mask ^= True
    mask.fill_diagonal_(True)
    return m.linear(x).masked_fill(mask, 2)


def integers_in_place(m, x):
    places = torch.arange(8) + 1
    places <<= 2
    places >>= torch.ones_like(places)
    places |= 1
    places &= torch.tensor(62)
    places[2:] ^= 3
    return m.linear(x) * places


FUNCTIONS = [
    write_row, write_through_a_view, write_after_use, write_twice, write_chain, write_other_dtype,
    write_whole_then_part, change_a_buffer, no_grad_region, grad_in_no_grad, autocast_region,
    autocast_attention, written_then_read_in_no_grad, written_in_no_grad, buffers_updated_in_no_grad,
    data_is_no_constant, write_into_a_diagonal, views_in_place, written_over,
    as_strided_in_place, given_back_in_no_grad, given_back_by_rarer_operators, compared_in_place, inference_region,
    copy_of_another_order, powers_in_place, masks_in_place, integers_in_place,
]  # fmt: skip


LOGIC = ("__and__", "__or__", "__xor__", "__lshift__", "__rshift__")


@pytest.mark.sample(4)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_same_bits_without_writes_or_regions(function):
    captured, _ = after([], Body(function), torch.randn(2, 5, 8))
    gm, _ = after([Normalize()], Body(function), torch.randn(2, 5, 8))
    left = ops(gm)
    assert not [name for name in left if name.endswith("_") and name not in ("copy_", *LOGIC)]
    assert left.count("copy_") == (function in (change_a_buffer, buffers_updated_in_no_grad))
    assert not {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"} & set(left)
    assert_same(gm, captured, gm.meta["inputs"])


def grad_for_a_part(m, x):
    y = m.linear(x).sin()
    with torch.enable_grad():
        z = m.linear(x).sin()
        return y.exp(), y * z


def test_gradients_are_enabled_for_a_part():
    """The program is called under no_grad."""
    module, x = Body(grad_for_a_part), torch.randn(2, 5, 8)
    with torch.no_grad():
        gm, _ = after([Normalize()], module, x)
        _, expected = module(x)
    still, found = gm(*gm.meta["inputs"])
    assert "_set_grad_enabled" not in ops(gm) and not still.requires_grad
    assert torch.equal(*(torch.autograd.grad(out.sum(), module.linear.weight)[0] for out in (found, expected)))


VIEWS = {
    "type_as": lambda y: y.type_as(y.new_zeros(1)),
    "expand": lambda y: y.expand(2, 5, 8),
    "expand_as": lambda y: y.expand_as(y),
    "broadcast_to": lambda y: y.broadcast_to(2, 5, 8),
    "positive": lambda y: y.positive(),
    "resolve_conj": lambda y: y.resolve_conj(),
    "sum_to_size": lambda y: y.sum_to_size(2, 5, 8),
    "atleast_3d": lambda y: torch.atleast_3d(y[0]),
    "real": lambda y: y.real,
    "atleast_2d of several": lambda y: torch.atleast_2d(y[0, 0], y[1])[1],
    "atleast_3d of one that is as it was": lambda y: torch.atleast_3d(y[0, 0], y)[1],
    "ravel": lambda y: y.ravel(),
    "reshape_as": lambda y: y.reshape_as(y.flatten(1)),
    "adjoint": lambda y: y.adjoint(),
    "T": lambda y: y[0].T,
    "H": lambda y: y[1].H,
    "as_strided": lambda y: y.as_strided((2, 5, 8), (40, 8, 1)),
    "dropout": lambda y: F.dropout(y, 0.1, False),
    "torch.dropout": lambda y: torch.dropout(y, 0.0, True),
    "alpha_dropout": lambda y: F.alpha_dropout(y, 0.1, False),
    "a view of dropout": lambda y: F.dropout(y, 0.1, False).view(2, -1)[:, 3:],
    "linalg.diagonal": lambda y: torch.linalg.diagonal(y, offset=1),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_was_handed_back_is_written(view):
    """Operators that return their operand itself where there is nothing to do, and rarer views."""

    def function(m, x):
        y = m.linear(x) * 1
        view(y).mul_(3)
        return y * x, view(y)

    captured, _ = after([], Body(function), torch.randn(2, 5, 8))
    gm, _ = after([Normalize()], Body(function), torch.randn(2, 5, 8))
    assert not [name for name in ops(gm) if name.endswith("_")]
    assert_same(gm, captured, gm.meta["inputs"])
    module, (x, *_) = Body(function), [x for x in gm.meta["inputs"] if not isinstance(x, nn.Parameter)]
    for found, expected in zip(gm(*gm.meta["inputs"]), module(x), strict=True):
        assert torch.equal(found, expected)  # eager's, too: torch.compile has a copy of what dropout returns


def type_of_another(m, x):
    return m.linear(x) + torch.arange(8).type_as(x)


def test_the_value_that_gives_a_type_is_not_needed():
    captured, _ = after([], Body(type_of_another), torch.randn(2, 5, 8))
    gm, _ = after([Normalize()], Body(type_of_another), torch.randn(2, 5, 8))
    (cast,) = [node for node in gm.graph.nodes if node.target is torch.ops.aten.to.dtype]
    assert "type_as" in ops(captured) and cast.args[1] == torch.float32
    assert_same(gm, captured, gm.meta["inputs"])


def test_autocast_around_the_call_counts_too():
    function = lambda m, x: F.scaled_dot_product_attention(m.linear(x), x * 2, m.linear(x))  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured, _ = after([], Body(function), torch.randn(2, 5, 8))
        gm, _ = after([Normalize()], Body(function), torch.randn(2, 5, 8))

    def under_autocast(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return captured(*inputs)

    assert ops(gm).count("to") == 5  # the weight and bias once, x for each linear, x * 2 for the attention
    assert_same(gm, under_autocast, gm.meta["inputs"])


library = torch.library.Library("normalize_test", "DEF")  # an operator named as one of ATen's need not be it
library.define("relu_(Tensor(a!) x) -> Tensor(a!)")
library.impl("relu_", lambda x: x.mul_(3), "CPU")
torch.library.register_fake("normalize_test::relu_", lambda x: x)
OF_ANOTHER = torch.ops.normalize_test


def write_in_no_grad(x):
    with torch.no_grad():
        x[:, 1:].mul_(2)
    return x.sin()


def write_to_an_alias(x):
    x.data[:, 0] = 0
    return x.sin()


def teach_an_alias(x):
    y = torch.zeros(x.shape)
    y.detach().copy_(x)
    return x + y


@pytest.mark.parametrize(
    "joined, op",
    [
        (lambda y: torch.cat([torch.tensor([]), y.unsqueeze(1).transpose(1, 2)], dim=-2), "clone"),
        (lambda y: torch.cat([y, torch.tensor([], dtype=torch.float64), y * 2], 1), "cat"),
        (lambda y: torch.cat([torch.tensor([]), torch.cat([torch.tensor([]), y], 1)], -2), "clone"),
        (lambda y: torch.concat([torch.tensor([]), y.argmax(-1)], dim=1), "clone"),
    ],
)
def test_what_has_no_entries_is_not_joined(joined, op):
    body = Body(lambda m, x: joined(m.linear(x)) + 1)
    captured, _ = after([], body, torch.randn(2, 5, 8))
    gm, _ = after([Normalize()], body, torch.randn(2, 5, 8))
    assert {"cat", "clone"} & set(ops(gm)) == {op}
    assert_same(gm, captured, gm.meta["inputs"])


@pytest.mark.parametrize(
    "function, sentence",
    [
        (lambda m, x: write_in_no_grad(m.linear(x)), "writes under no_grad to a value with a gradient"),
        (lambda m, x: write_to_an_alias(m.linear(x)), "writes through detach to a value with a gradient"),
        (lambda m, x: teach_an_alias(m.linear(x)), "writes through detach to a value with a gradient"),
        (lambda m, x: (m.linear(x) * 1).logical_not_(), "and autograd does not see it"),
        (lambda m, x: torch.fft.rfft(m.linear(x)).diagonal().zero_(), "to a part of complex numbers, through which no"),
        (lambda m, x: x.clone().view(torch.int32).bitwise_and_(-4096), "no view that can be undone"),
        (lambda m, x: torch.aminmax(x, out=(x.new_empty(()), x.new_empty(()))), "writes to several tensors"),
        (lambda m, x: torch._foreach_add_([m.linear(x) * 1], 1.0), "writes to a list of tensors"),
        (lambda m, x: OF_ANOTHER.relu_(x * 1), "relu_.default is no ATen operator: what it writes is not known"),
        (lambda m, x: m.linear(x).view(torch.float32).mul_(2), "writes through detach to a value with a gradient"),
        (lambda m, x: x.clone().as_strided((2, 2), (8, 1)).add_(1), "no view that can be undone"),
    ],
)
def test_what_cannot_be_undone_is_refused(function, sentence):
    with pytest.raises(Exception, match=sentence) as raised:
        after([Normalize()], Body(function), torch.randn(2, 8))
    assert isinstance(raised.value.__cause__ or raised.value, (GraphRefused, torch._dynamo.exc.BackendCompilerFailed))
