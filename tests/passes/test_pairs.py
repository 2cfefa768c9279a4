"""Weights of pairs that are no attention site: each rank computes the rows of its own queries, in every gradient."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import export

import ringopt
from ringopt.ir.nodes import is_tensor, shape_of
from tests.harness.errors import worst_of
from tests.harness.lengths import run_over
from tests.harness.translation import validate, validate_function

HEADS, ROWS, DEPTH = 2, 13, 4
WIDTH = HEADS * DEPTH


class Layers(nn.Module):
    """Layers of `mix(self, q, k, v)`, q, k and v [B, H, S, D]."""

    def __init__(self, mix, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.depth, self.qkv, self.out = mix, depth, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.talk, self.memory = nn.Linear(HEADS, HEADS), nn.Parameter(torch.randn(5, DEPTH))
        self.double()

    def forward(self, x):
        for _ in range(self.depth):
            q, k, v = (t.unflatten(-1, (HEADS, DEPTH)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + self.out(self.mix(self, q, k, v).transpose(1, 2).flatten(2))
        return x


def given(rows=ROWS):
    torch.manual_seed(rows)
    return torch.randn(2, rows, WIDTH, dtype=torch.float64, requires_grad=True)


def largest(s, q, k, v):
    scores = q @ k.mT
    return scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], -math.inf).softmax(-1) @ v


def talking(s, q, k, v):
    """CaiT (Touvron et al. 2021): heads are mixed by a layer before and after the softmax."""
    weights = s.talk((q @ k.mT).permute(0, 2, 3, 1)).softmax(2)
    return s.talk(weights).permute(0, 3, 1, 2) @ v


def decayed(s, q, k, v):
    """Retention (Sun et al. 2023): no softmax."""
    i = torch.arange(q.shape[2])
    return (q @ k.mT * torch.where(i[:, None] >= i, 0.9 ** (i[:, None] - i), 0.0)) @ v


def sparse(s, q, k, v):
    """Sparsemax (Martins and Astudillo 2016)."""
    scores = q @ k.mT
    ordered, place = scores.sort(-1, descending=True).values, torch.arange(1, scores.shape[-1] + 1)
    above = ordered.cumsum(-1) - 1
    count = (place * ordered > above).sum(-1, True)
    return (scores - above.gather(-1, count - 1) / count).clamp(min=0) @ v


PAIRS = {
    "the largest only": largest,
    "talking heads": talking,
    "decay": decayed,
    "sparsemax": sparse,
    "no softmax": lambda s, q, k, v: torch.relu(q @ k.mT).square() @ v,
    "weights used elsewhere": lambda s, q, k, v: (w := (q @ k.mT).softmax(-1)) @ v + (w * w.log()).sum(-1).mean(),
    "a score beside those of keys": lambda s, q, k, v: torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1] @ v,
    "padded": lambda s, q, k, v: F.pad(q @ k.mT, (1, 0)).sigmoid()[..., 1:] @ v,
    "the other way round": lambda s, q, k, v: (v.mT @ torch.sigmoid(k @ q.mT)).mT,
    "a triangle": lambda s, q, k, v: torch.tanh(q @ k.mT).tril() @ v,
    "a triangle, the other way round": lambda s, q, k, v: (v.mT @ torch.tanh(k @ q.mT).triu(-2)).mT,
    "grouped": lambda s, q, k, v: torch.einsum(
        "bgqk,bkd->bgqd", torch.sigmoid(torch.einsum("bgqd,bkd->bgqk", q, k[:, 0])), v[:, 0]
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, p", [(name, 2 + i % 2) for i, name in enumerate(PAIRS)])
def test_rows_of_the_queries(name, p):
    verdict = validate(p, Layers(PAIRS[name]), given())
    assert verdict.wrong == ""
    # Keys and values of the first layer are computed whole; those of the second are gathered, nothing else is.
    assert verdict.report.sharded_fraction > 0.7
    assert {gather.op for gather in verdict.report.gathers} <= {"matmul", "einsum", "output"}
    assert any("are no site: each rank computes the rows of its own queries" in note for note in verdict.report.notes)
    whole = [node for node in verdict.graph.graph.nodes if node.op == "call_function" and is_tensor(node)]
    assert [node for node in whole if shape_of(node)[-2:] == (ROWS, ROWS) and len(shape_of(node)) > 2] == []


@pytest.mark.parametrize("p", [pytest.param(2, marks=pytest.mark.zoo), 3])
def test_lengths_that_are_open(p, caplog):
    """With at least two tokens a rank; fewer compile anew."""
    model = Layers(PAIRS["the largest only"])
    found = run_over(model, [(given(rows),) for rows in (20, 13, 2 * p, 5)], p, dynamic=True)
    assert [report.sharded_fraction > 0.7 for report in found.reports] == [True] * (p - 1)
    assert "is not drawn" not in caplog.text


def beside_attention(s, q, k, v):
    """Linear attention without a mask (Katharopoulos et al. 2020), and channels that attend to channels (El-Nouby et
    al. 2021), of which values are kept for the backward that are transposed in memory."""
    channels, others = (F.normalize(x.mT, dim=-1) for x in (q, k))
    mixed = ((channels @ others.mT).softmax(-1) @ v.mT).mT
    return F.scaled_dot_product_attention(q, k, v) + q @ (k.mT @ v) + mixed


def through_inductor(name, layout):
    """The largest difference from eager at each length, and the share on shards of each graph."""
    torch._dynamo.reset()
    before, model = len(ringopt.reports()), Layers({**PAIRS, "a state beside attention": beside_attention}[name], 1)
    compiled, errors = torch.compile(model, backend="ring", dynamic=True, options={"layout": layout}), []
    for rows in (12, 17):
        x = given(rows)
        (found,), (expected,) = (torch.autograd.grad(run(x).square().sum(), x) for run in (compiled, model))
        errors.append(float((found - expected).abs().max() / expected.abs().max()))
    return worst_of(*errors), [report.sharded_fraction for report in ringopt.reports()[before:]]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("no softmax", "contiguous", marks=pytest.mark.zoo),
        pytest.param("no softmax", "zigzag", marks=pytest.mark.zoo),
        ("a state beside attention", "contiguous"),
    ],
)
def test_inductor_lowers_products_of_rows_of_any_number(ranks, name, layout):
    for error, shares in ranks(2, through_inductor, name, layout, timeout=240):
        assert error < 1e-10 and len(shares) == 1 and shares[0] > 0.7


NONE = {
    "a memory": lambda s, q, k, v: (q @ s.memory.T).softmax(-1) @ s.memory,
    "sums of features": lambda s, q, k, v: q * (k @ k.new_ones(DEPTH, 1)),
}


@pytest.mark.parametrize("name", NONE)
def test_what_has_no_pairs_of_rows(name):
    """What is sharded is sharded by the layers."""
    verdict = validate(2, Layers(NONE[name]), given())
    (note,) = verdict.report.notes
    assert verdict.wrong == "" and note.startswith("no attention and no recurrence was found") and "layers run" in note


# Of keys and values that come from elsewhere, and of what little a program does beside products of its weights.
SIDES = {
    "made by a layer": (lambda x, y, w: torch.relu(x @ w[0] @ (y @ w[1]).mT) @ (y @ w[2]), ["matmul", "matmul"]),
    "as they are given": (lambda x, y, w: torch.relu(x @ w[0] @ y.mT) @ y.sin(), []),
}


@pytest.mark.parametrize("name", SIDES)
def test_keys_are_gathered_where_a_layer_makes_them_of_rows(name):
    """What every rank has is not sent."""
    program, gathered = SIDES[name]
    inputs = [torch.randn(*sizes, dtype=torch.float64) for sizes in ((2, 7, 4), (2, 9, 4), (3, 4, 4), (64, 64))]
    for each in inputs[:3]:
        each.requires_grad_()
    verdict = validate_function(2, lambda x, y, w, large: (program(x, y, w) + (large @ large).sum(),), inputs)
    assert verdict.wrong == ""
    assert [gather.op for gather in verdict.report.gathers] == [*gathered, "output"]


class Patches(nn.Module):
    """Patches of a picture behind a class token and two registers; the weights of all heads are mixed after the
    softmax."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.talk = nn.Parameter(torch.randn(1, 3, 12)), nn.Parameter(torch.randn(3, 3))
        self.embed, self.qkv = nn.Linear(12, 12), nn.Linear(12, 36)

    def forward(self, image):
        patches = image.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x = torch.cat([self.tokens.expand(len(image), -1, -1), self.embed(patches)], 1)
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.einsum("bhij,hg->bgij", (q @ k.mT).softmax(-1), self.talk)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_patches_of_a_picture_are_rows():
    verdict = validate(2, Patches().double(), torch.randn(2, 3, 8, 10, dtype=torch.float64))
    assert verdict.wrong == "" and verdict.report.sharded_fraction > 0.7
    assert len(verdict.report.notes) == 1 and "pairs of matmul" in verdict.report.notes[0]


def test_a_file_without_a_site_is_converted_for_its_pairs():
    model, x = Layers(PAIRS["no softmax"]), given().detach()
    made = ringopt.convert(export(model, (x,)))
    assert torch.ops.ringopt.gather.default in {node.target for node in made.graph.nodes}
    torch.testing.assert_close(made.module()(x), model(x))
