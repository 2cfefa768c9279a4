"""Every spelling of a contraction has the same letters; what contracts nothing, or one operand alone, is none."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.dims.contraction import product_of
from tests.harness.capturing import after


def products(call, *shapes):
    class Program(nn.Module):
        def forward(self, *inputs):
            return call(*inputs)

    gm, _ = after([], Program(), *(torch.randn(*shape) for shape in shapes))
    return [product for node in gm.graph.nodes if (product := product_of(node)) is not None]


def spelled(product):
    """b.d,btd->bt: a dot for a dim that is broadcast."""
    order: dict[str, str] = {}
    texts = [
        "".join("." if letter is None else order.setdefault(letter, "abcdefgh"[len(order)]) for letter in letters)
        for letters in (*product.letters, product.out)
    ]
    return f"{texts[0]},{texts[1]}->{texts[2]}"


CASES = {
    "matmul": (torch.matmul, (2, 3, 4), (2, 4, 5), "abc,acd->abd"),
    "matmul, broadcast": (torch.matmul, (2, 1, 3, 4), (6, 4, 5), "a.bc,dce->adbe"),
    "mm": (torch.mm, (3, 4), (4, 5), "ab,bc->ac"),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5), "abc,acd->abd"),
    "linear": (F.linear, (2, 3, 4), (5, 4), "abc,dc->abd"),
    "inner": (torch.inner, (3, 5), (2, 4, 5), "ab,cdb->acd"),
    "einsum": (lambda x, y: torch.einsum("bqhd, bkhd -> bhqk", x, y), (2, 3, 4, 5), (2, 6, 4, 5), "abcd,aecd->acbe"),
    "einsum, dots": (lambda x, y: torch.einsum("...qd,...kd->...qk", x, y), (2, 3, 5), (2, 4, 5), "abc,adc->abd"),
    "multiply and sum": (lambda x, y: (x[:, :, None] * y[:, None]).sum(-1), (2, 3, 5), (2, 4, 5), "ab.c,a.dc->abd"),
}


@pytest.mark.parametrize("name", CASES)
def test_letters(name):
    call, left, right, letters = CASES[name]
    (product,) = products(call, left, right)
    assert spelled(product) == letters


@pytest.mark.parametrize(
    "call, shapes",
    [
        (lambda x, y: torch.einsum("ii,ij->ij", x, y), ((3, 3), (3, 4))),
        (lambda x, y: torch.einsum("ij,jk->k", x, y), ((2, 3), (3, 4))),
        (lambda x, y: (x * y).sum(-1, keepdim=True), ((2, 3), (2, 3))),
        (lambda x, y: (x + y).sum(-1), ((2, 3), (2, 3))),
        (lambda x, y: F.linear(x, y, torch.ones(4)), ((2, 3), (4, 3))),
        (torch.mv, ((2, 3), (3,))),
    ],
    ids=["a diagonal", "a sum of one operand", "a dim that is kept", "a sum of sums", "a bias", "a vector"],
)
def test_no_product(call, shapes):
    assert products(call, *shapes) == []
