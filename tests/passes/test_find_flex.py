"""flex_attention becomes the canonical node: its mods are read as terms, its block tables held against mask_mod; the
program stays the program on two ranks, in every gradient."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import ringopt
from ringopt.ir.printer import changes, short
from ringopt.passes.find_flex import FindFlex
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after
from tests.harness.errors import worst_of
from tests.harness.lengths import run_over
from tests.harness.translation import validate

BATCH, HEADS, ROWS, DEPTH = 2, 3, 13, 8
WIDTH, BLOCK = HEADS * DEPTH, 4


@pytest.fixture(autouse=True)
def backward_on_the_cpu(monkeypatch):
    """torch refuses to trace it there, although the operator has one outside its kernels."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_operands: None)


class Model(nn.Module):
    """`core` computes attention from q, k, v [B, H, S, D], documents m [B, S] and a block mask made outside."""

    def __init__(self, core):
        super().__init__()
        torch.manual_seed(0)
        self.core = core
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature, self.table = nn.Parameter(torch.rand(HEADS) + 0.5), nn.Parameter(torch.randn(HEADS, 2 * ROWS))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]))
        self.register_buffer("reach", torch.tensor([2, 4, 8]))
        self.register_buffer("triangle", torch.ones(ROWS, ROWS, dtype=torch.bool).tril())
        self.register_buffer("blocks", torch.eye(-(-ROWS // BLOCK), dtype=torch.bool))
        self.double()

    def forward(self, x, m, *blocks):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, DEPTH).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.core(self, q, k, v, m, *blocks).transpose(1, 2).reshape(b, -1, WIDTH))


def given():
    torch.manual_seed(1)
    m = (torch.arange(ROWS) // 5).expand(BATCH, -1).clone()
    m[1, :4] = 7
    return torch.randn(BATCH, ROWS, WIDTH, dtype=torch.float64, requires_grad=True), m


def tables(mask_mod, rows=ROWS, keys=ROWS, batch=None, heads=None, **how):
    return create_block_mask(mask_mod, batch, heads, rows, keys, device="cpu", BLOCK_SIZE=BLOCK, **how)


def causal(b, h, q, k):
    return q >= k


# ---- score_mod -------------------------------------------------------------------------------------------------------
# name: (score_mod of the model, the pattern that the report names)
SCORES = {
    "nothing": (lambda s: lambda score, b, h, q, k: score, "full"),
    "a constant": (lambda s: lambda score, b, h, q, k: score * 2, "full"),
    "softcap": (lambda s: lambda score, b, h, q, k: torch.tanh(score / 5) * 5, "softcap(5)"),
    "a learned table": (lambda s: lambda score, b, h, q, k: score + s.table[h, q - k + ROWS], "bias(learned: table)"),
    "alibi": (lambda s: lambda score, b, h, q, k: score + s.slopes[h] * (k - q), "bias(slopes)"),
    "alibi of numbers": (lambda s: lambda score, b, h, q, k: score + torch.exp2(-(h + 1.0)) * (k - q), "bias"),
    "entries of a table": (
        lambda s: lambda score, b, h, q, k: score + s.table[h, 3] + s.table[h, s.reach[0]], "bias(learned: table)",
    ),
    "a temperature of each head": (lambda s: lambda score, b, h, q, k: score * s.temperature[h], "full"),
    "a factor of each key": (lambda s: lambda score, b, h, q, k: score * (1 + k), "score((score * float64(k+1)))"),
    "hidden": (lambda s: lambda score, b, h, q, k: torch.where(q >= k, score, -math.inf), "causal"),
    "hidden by a number": (lambda s: lambda score, b, h, q, k: torch.where(q >= k, score, -1e9), "causal"),
    "a stored triangle": (
        lambda s: lambda score, b, h, q, k: torch.where(s.triangle[q, k], score, -math.inf),
        "causal",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name):
    mod, pattern = SCORES[name]
    verdict = validate(2, Model(lambda s, q, k, v, m: flex_attention(q, k, v, mod(s))), *given())
    (site,) = verdict.report.sites
    assert (site.form, site.pattern, site.refusal) == ("flex", pattern, None)
    assert verdict.wrong == ""


# ---- mask_mod --------------------------------------------------------------------------------------------------------
def documents(s, m):
    return lambda b, h, q, k: (m[b, q] == m[b, k]) & (q >= k)


MASKS = {
    "causal": (lambda s, m: causal, "causal"),
    "a window": (lambda s, m: lambda b, h, q, k: (q >= k) & (q - k < 5), "window(5)"),
    "documents": (documents, "causal & documents(m)"),
    "documents, indexed twice": (lambda s, m: lambda b, h, q, k: m[b][q] == m[b][k], "documents(m)"),
    "a prefix": (lambda s, m: lambda b, h, q, k: (q >= k) | (k < 3), "prefix(3)"),
    "padding": (lambda s, m: lambda b, h, q, k: m[b, k] == 7, "padding(m)"),  # rows of batch 0 see nothing
    "a window of each head": (lambda s, m: lambda b, h, q, k: (q - k).abs() < s.reach[h], "mask(reach)"),
    "blocks": (lambda s, m: lambda b, h, q, k: s.blocks[q // BLOCK, k // BLOCK], "blocks(4x4)"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["documents", "causal", "padding", "blocks"])
def test_block_masks_made_inside(name):
    mod, pattern = MASKS[name]

    def core(s, q, k, v, m):
        return flex_attention(q, k, v, block_mask=tables(mod(s, m), batch=BATCH, heads=HEADS))

    verdict = validate(2, Model(core), *given())
    assert [(site.form, site.pattern, site.refusal) for site in verdict.report.sites] == [("flex", pattern, None)]
    assert verdict.wrong == ""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_made_outside(name):
    x, m = given()
    mod, pattern = MASKS[name]
    model = Model(lambda s, q, k, v, m, blocks: flex_attention(q, k, v, block_mask=blocks))
    verdict = validate(2, model, x, m, tables(mod(model, m), batch=BATCH, heads=HEADS))
    (site,) = verdict.report.sites
    assert (site.form, site.refusal, verdict.wrong) == ("flex", None, "")
    assert re.sub(r"\w+_cell_contents", "m", site.pattern) == pattern  # what Dynamo calls a variable of mask_mod


def test_both_mods_and_a_block_mask_of_the_model():
    def core(s, q, k, v, m):
        return flex_attention(q, k, v, lambda score, b, h, q, k: score + s.table[h, q - k + ROWS], s.listed)

    model = Model(core)
    model.listed = tables(causal)
    verdict = validate(2, model, *given())
    assert [site.pattern for site in verdict.report.sites] == ["causal & bias(learned: table)"] and verdict.wrong == ""


def test_tables_that_list_more_blocks_than_needed_are_no_lie():
    many = -(-ROWS // BLOCK)
    number, places = torch.full((1, 1, many), many), torch.arange(many).expand(1, 1, many, many)
    blocks = BlockMask.from_kv_blocks(
        number.int(), places.int(), BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(ROWS, ROWS)
    )
    model = Model(lambda s, q, k, v, m, blocks: flex_attention(q, k, v, block_mask=blocks))
    verdict = validate(2, model, *given(), blocks)
    assert [site.pattern for site in verdict.report.sites] == ["causal"] and verdict.wrong == ""


# ---- shapes and dtypes -----------------------------------------------------------------------------------------------
SHAPES = {
    "fewer KV heads": lambda s, q, k, v, m: flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "fewer queries": lambda s, q, k, v, m: flex_attention(
        q[:, :, :7], k, v, block_mask=tables(lambda b, h, q, k: q + 6 >= k, 7)
    ),
    "one batch of keys": lambda s, q, k, v, m: flex_attention(q, k[:1], v[:1], block_mask=tables(causal, batch=BATCH)),
    "narrower values": lambda s, q, k, v, m: flex_attention(q, k, v[..., :4]).repeat(1, 1, 1, 2),
    "a scale": lambda s, q, k, v, m: flex_attention(q, k, v, scale=0.5),
    "two calls": lambda s, q, k, v, m: flex_attention(flex_attention(q, k, v), k, v, block_mask=tables(causal)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    verdict = validate(2, Model(SHAPES[name]), *given())
    assert {site.refusal for site in verdict.report.sites} == {None} and verdict.wrong == ""
    assert len(verdict.report.sites) == (2 if name == "two calls" else 1)


def test_autocast_casts_the_operands_only():
    def core(s, q, k, v, m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = flex_attention(
                q.float(), k.float(), v.float(), lambda score, b, h, q, k: score + s.slopes[h] * (k - q)
            )
        assert out.dtype == torch.bfloat16
        return out.double()

    verdict = validate(2, Model(core), *given(), tolerance=2e-2)
    assert [site.refusal for site in verdict.report.sites] == [None] and verdict.wrong == ""


class Alibi(nn.Module):
    """The number of heads is an open integer where sizes are dynamic."""

    def forward(self, q, k, v, heads):
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + (j - i) * torch.exp2(-(h + 1) * 8.0 / heads))


def test_numbers_beside_sizes_that_are_dynamic():
    q, k, v = (torch.randn(1, HEADS, ROWS, DEPTH, dtype=torch.float64) for _ in range(3))
    run = run_over(Alibi(), [(q, k, v, 8), (q[:, :, :7], k, v, 8), (q, k, v, 4)], 2, dynamic=True)
    assert {(report.refusal, *(site.pattern for site in report.sites)) for report in run.reports} == {(None, "bias")}


# ---- refused ---------------------------------------------------------------------------------------------------------
def by_hand(s, q, k, v, m):
    """Each block of queries sees its own block of keys only; its mask_mod says nothing of it."""
    own = torch.arange(4, dtype=torch.int32)[None, None, :, None].expand(1, 1, 4, 4)
    blocks = BlockMask.from_kv_blocks(torch.ones_like(own[..., 0]), own, BLOCK_SIZE=BLOCK, seq_lengths=(ROWS, ROWS))
    return flex_attention(q, k, v, block_mask=blocks)


def called_whole(s, q, k, v, m):
    """Blocks on the diagonal are listed as seen whole, where mask_mod hides half of them."""
    blocks = tables(causal)
    full = BlockMask.from_kv_blocks(
        torch.zeros_like(blocks.kv_num_blocks), blocks.kv_indices, blocks.kv_num_blocks, blocks.kv_indices,
        BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=(ROWS, ROWS),
    )  # fmt: skip
    return flex_attention(q, k, v, block_mask=full)


def of_floats(s, q, k, v, m):
    loud = v.norm(dim=-1) > 1
    return flex_attention(q, k, v, block_mask=tables(lambda b, h, q, k: loud[b, h, k], batch=BATCH, heads=HEADS))


def of_writes(s, q, k, v, m):
    m = m.clone()
    m[:, 3:] += 1
    return flex_attention(q, k, v, block_mask=tables(documents(s, m), batch=BATCH))


def of_chance(s, q, k, v, m):
    kept = torch.rand(ROWS) > 0.5
    return flex_attention(q, k, v, block_mask=tables(lambda b, h, q, k: kept[k]))


def computed_pairs(s, q, k, v, m):
    near = torch.cdist(v, v)
    return flex_attention(q, k, v, lambda score, b, h, q, k: score - near[b, h, q, k])


REFUSED = {
    "tables by hand": (by_hand, "the block tables of flex_attention do not say what mask_mod says"),
    "blocks called whole": (called_whole, "the block tables of flex_attention do not say what mask_mod says"),
    "a mask of activations": (of_floats, "the block mask of flex_attention is computed from parameters"),
    "a mask that is written": (of_writes, "is computed by writes into tensors"),
    "a mask of random numbers": (of_chance, "is computed from random numbers"),
    "a bias over pairs": (computed_pairs, "makes a tensor [2, 3, 13, 13] over queries and keys from data"),
    "scores of nothing": (
        lambda s, q, k, v, m: flex_attention(q, k, v, lambda score, b, h, q, k: s.table[h, q - k + ROWS]),
        "a score is no function of the product of its own query and key",
    ),
    "the sum beside": (
        lambda s, q, k, v, m: (y := flex_attention(q, k, v, return_aux=AuxRequest(lse=True)))[0] + y[1].lse[..., None],
        "flex_attention returns more than its output",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    core, sentence = REFUSED[name]
    torch._dynamo.reset()
    report = ringopt.explain(Model(core), *given(), world_size=2)
    assert not report.sites and sentence in report.refusal


# ---- call after call -------------------------------------------------------------------------------------------------
def batch_after_batch():
    """On this rank: the largest distance from eager, and the refusals of the graphs made, the last after a lie."""
    torch._dynamo.reset()
    model = Model(lambda s, q, k, v, m, blocks: flex_attention(q, k, v, block_mask=blocks))
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "eager", "on_refusal": "ignore"})
    x, m = given()
    words, before, error = m.clone(), len(ringopt.reports()), 0.0
    mod = documents(model, words)
    with torch.no_grad():
        for now in (m, torch.zeros_like(m), m.flip(1)):
            words.copy_(now)
            blocks = tables(mod, batch=BATCH)
            error = worst_of(error, float((compiled(x, words, blocks) - model(x, words, blocks)).abs().max()))
        words.zero_()  # and the tables stay
        error = worst_of(error, float((compiled(x, words, blocks) - model(x, words, blocks)).abs().max()))
    return error, [report.refusal or "" for report in ringopt.reports()[before:]]


def test_tables_may_change_with_every_batch_but_not_lie(ranks):
    for error, refusals in ranks(2, batch_after_batch):
        assert error < 1e-12 and len(refusals) == 2
        assert not refusals[0] and "do not say what mask_mod says" in refusals[1]


@pytest.mark.zoo
def test_one_process_gains_a_backward():
    core = MASKS["documents"][0]
    model = Model(lambda s, q, k, v, m: flex_attention(q, k, v, block_mask=tables(core(s, m), batch=BATCH)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(*given()).square().sum().backward()
        gradients.append(model.qkv.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert [site.form for site in ringopt.reports()[-1].sites] == ["flex"]


@pytest.mark.zoo
def test_the_diff():
    class Program(nn.Module):
        def forward(self, q, k, v):
            blocks = create_block_mask(causal, None, None, ROWS, ROWS, device="cpu")
            return flex_attention(q, k, v, block_mask=blocks)

    inputs = [torch.randn(BATCH, HEADS, ROWS, DEPTH) for _ in range(3)]
    before, _ = after([Normalize()], Program(), *inputs)
    now, _ = after([Normalize(), FindFlex()], Program(), *inputs)
    assert_expected_inline(
        changes(short(before.graph), short(now.graph)),
        """\
  %q = input
  %k = input
  %v = input
+ %attention = attention(%q, %k, %v, None, [], None, None, 'causal', '', 0, 0.353553)
+ return [%attention]
- %m_t = mT(%k)
- %matmul = matmul(%q, %m_t)
- %arange_4 = arange(13, device=device(type='cpu'), pin_memory=False)
- %arange_5 = arange(13, device=device(type='cpu'), pin_memory=False)
- %mul = mul(%matmul, 0.353553)
- %view = view(%arange_4, [13, 1])
- %ge = ge(%view, %arange_5)
- %expand = expand(%ge, [3, 13, 13])
- %expand_1 = expand(%expand, [2, 3, 13, 13])
- %where = where(%expand_1, %mul, -inf)
- %flex = flex(%q, %k, %v, %matmul, %where)
- return [%flex]""",
    )
