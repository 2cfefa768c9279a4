"""Synonyms: one name of each operation, with the arguments that the program gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.dims.op_families import SYNONYMS, TRANSFORMS
from ringopt.frontend.plain_spelling import plain_name, rename_synonyms
from ringopt.ir.nodes import DROPOUTS, op_name, outputs_of
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, assert_same, ops

aten = torch.ops.aten
X, Y = torch.rand(3, 4, 4) / 2 + 0.1, torch.rand(4, 4)

# What an operator is given, by the types of its arguments; of others, two tensors, or as many as it takes.
GIVEN = {
    "clip": (X, 0.2, 0.4), "concat": ([X, X], -1), "concatenate": ([X, X], 1), "swapaxes": (X, 0, -1),
    "swapdims": (X, 1, 0), "moveaxis": (X, [0, 1], [2, 0]), "broadcast_to": (Y, [3, 4, 4]), "special_softmax": (X, 1),
    "special_log_softmax": (X, 0), "special_logsumexp": (X, [0, 2], True), "arccosh": (X + 1,),
}  # fmt: skip


def traced(function, *inputs, pre_dispatch=True):
    return make_fx(function, tracing_mode="fake", pre_dispatch=pre_dispatch)(*inputs)


def given_to(name):
    if name in GIVEN:
        return GIVEN[name]
    first = getattr(aten, name).overloads()[0]
    tensors = [each for each in getattr(getattr(aten, name), first)._schema.arguments if not each.has_default_value()]
    return (X, Y)[: len([each for each in tensors if not each.kwarg_only])]


@pytest.mark.parametrize("name", SYNONYMS)
def test_a_synonym_is_the_same_operator_below_autograd(name):
    """Taken apart by torch itself, both are one graph."""
    given = given_to(name)
    tensors = [x for x in torch.utils._pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]

    def called(packet):
        def function(*values):
            rest = iter(values)
            args = torch.utils._pytree.tree_map_only(torch.Tensor, lambda _: next(rest), given)
            return packet(*args)

        return traced(function, *tensors, pre_dispatch=False).code

    assert called(getattr(aten, name)) == called(getattr(aten, SYNONYMS[name]))


@pytest.mark.parametrize("name", SYNONYMS)
def test_each_overload_has_one_of_the_plain_name(name):
    for each in (name, f"{name}_"):
        for overload in getattr(aten, each).overloads() if hasattr(aten, each) else ():
            plain = plain_name(getattr(getattr(aten, each), overload))
            assert plain._schema.name == f"aten::{SYNONYMS[name]}" + "_" * each.endswith("_")


@pytest.mark.parametrize("p, train", [(0.3, False), (0.0, True)])
@pytest.mark.parametrize("name", DROPOUTS)
def test_what_drops_nothing_is_its_operand(name, p, train):
    assert getattr(torch, name)(X, p, train).data_ptr() == X.data_ptr()

    class Dropping(nn.Module):
        def forward(self, x):
            return getattr(torch, name)(x * 2, p, train) + 1

    gm, _ = after([Normalize()], Dropping(), X)
    assert ops(gm) == ["mul", "add"]


class Several(nn.Module):
    """Also under no_grad, where what is as it was keeps its gradient."""

    def forward(self, x, y):
        (rows,), (a, b) = torch.atleast_1d([x[0, 0]]), torch.atleast_2d(x[0, 0], x[0])
        with torch.no_grad():
            c, d = torch.atleast_3d((x, y))
        return rows + (a + b) * c + d.sum()


def whole_rows(x, y):
    return x[:, 1:] + y[:, :-1]


def written(x, y):
    x = x.clone()
    x[:, 1:] = y[:, 1:]
    return x * 2


def cast_and_expanded(x, y):
    return x.to(torch.float32).expand(-1, -1, 5) + y


IDLE = {whole_rows: ["slice", "slice", "add"], written: ["clone", "slice", "slice_scatter", "mul"],
        cast_and_expanded: ["add"]}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", IDLE)
def test_what_changes_nothing_is_its_operand(program, dynamic):
    """Where the first size is open, torch traces `x[:, 1:]` as `x[:][:, 1:]`."""
    x, y = torch.randn(2, 7, 5), torch.randn(2, 7, 5)
    gm, _ = after([Normalize()], program, x, y, dynamic=dynamic)
    assert ops(gm) == IDLE[program]


def test_an_order_in_memory_is_kept():
    """What is written has another than what it is written to, and views of that are made."""

    def program(y, x):
        return torch.slice_scatter(x, y.mT).view(-1) * 2

    gm, _ = after([Normalize()], program, torch.randn(5, 4), torch.randn(4, 5))
    assert_same(gm, program, gm.meta["inputs"])


def test_atleast_of_several_is_one_call_each():
    given = X.clone().requires_grad_(), Y.clone().requires_grad_()
    captured, _ = after([], Several(), *given)
    gm, _ = after([Normalize()], Several(), *given)
    assert "atleast_2d" in ops(captured) and not [name for name in ops(gm) if name.startswith("atleast")]
    assert_same(gm, captured, gm.meta["inputs"])


SEVERAL_DIMS = {
    "all dims": lambda x: torch.fft.fftn(x),
    "as many as sizes": lambda x: torch.fft.ifftn(x, s=(-1, 6), norm="ortho"),
    "of real numbers": lambda x: torch.fft.rfftn(x, dim=(0, 2), norm="forward"),
    "to real numbers": lambda x: torch.fft.irfft2(torch.complex(x, x), dim=(0, 1), s=(5, 7)),
    "transposed": lambda x: torch.fft.fft2(x.mT, dim=(-1, 0)),
}


@pytest.mark.parametrize("name", SEVERAL_DIMS)
def test_a_transform_of_several_dims_is_one_of_each(name):
    module, x = SEVERAL_DIMS[name], X.double()
    captured, _ = after([], module, x)
    if outputs_of(captured.graph)[0].meta["val"].stride() != module(x).stride():
        pytest.skip("torch 2.11 has other strides for it in a trace")
    gm, _ = after([Normalize()], module, x)
    transforms = [op for op in ops(gm) if op.startswith("fft_")]
    assert len(transforms) > 1 and set(transforms) <= set(TRANSFORMS)
    (found,), expected = gm(*gm.meta["inputs"]), module(x)
    assert found.stride() == expected.stride() and torch.allclose(found, expected)


def test_the_inverse_of_real_numbers_is_not_marked_as_to_be_conjugated():
    """As that of one dim is, which has no view as real numbers."""
    gm, _ = after([Normalize()], lambda x: torch.view_as_real(torch.fft.ifftn(x, dim=1)), X.double())
    (found,) = gm(*gm.meta["inputs"])
    torch.testing.assert_close(found, torch.view_as_real(torch.fft.ifftn(X.double(), dim=1)))


LONE = {
    "nd,md->n": "nd,d->n", "b h n d, b h m d -> b h n": "bhnd,bhd->bhn", "...nd,...md->...n": "...nd,...d->...n",
    "nd,dm->n": "nd,d->n", "ndk,m,mj->nk": "nk,m,m->nk",
}  # fmt: skip


@pytest.mark.parametrize("equation", LONE)
def test_what_one_operand_sums_is_summed_before_the_product(equation):
    sizes = dict(zip("bhndmkj", (2, 3, 4, 5, 6, 2, 3), strict=True))
    texts = equation.replace(" ", "").replace("...", "bh").partition("->")[0].split(",")
    given = [torch.randn([sizes[c] for c in text]).double() for text in texts]
    gm, _ = after([Normalize()], lambda *x: torch.einsum(equation, *x), *given)
    assert ops(gm)[0] == "sum" and ops(gm)[-1] == "einsum"
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.einsum.default)
    assert node.args[0] == LONE[equation]
    assert torch.allclose(gm(*gm.meta["inputs"])[0], torch.einsum(equation, *given))


def test_one_tensor_joined_with_none_is_a_copy():
    given = X.clone().requires_grad_()
    captured, _ = after([], lambda x: torch.cat([x.mT], -1) + 1, given)
    gm, _ = after([Normalize()], lambda x: torch.cat([x.mT], -1) + 1, given)
    assert ops(gm) == ["mT", "clone", "add"]
    assert_same(gm, captured, gm.meta["inputs"])


def test_arguments_keep_their_meaning():
    def function(x, y):
        x = torch.subtract(x, y, alpha=3).divide(2, rounding_mode="floor").clone()
        x.multiply_(y).swapaxes_(0, 1)
        return torch.special.log_softmax(x.moveaxis(0, 2), 1, dtype=torch.float64).broadcast_to(2, 3, 4, 4)

    gm = traced(function, X, Y)
    expected = gm(X, Y)
    rename_synonyms(gm.graph)
    gm.recompile()
    assert torch.equal(gm(X, Y), expected)
    names = [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]
    assert names == ["sub", "div", "clone", "mul_", "transpose_", "movedim", "log_softmax", "expand"]
    assert plain_name(aten.mul.Tensor) is None
