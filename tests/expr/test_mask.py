"""A mask as text: its blocks are the blocks of the whole, its verdicts are true."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from ringopt.expr.bands import pattern_around
from ringopt.expr.mask import Mask, ScoreBlock
from ringopt.expr.simplify import apply, cast, where
from ringopt.expr.terms import affine, axis, load, score

B, H, Q, K = 2, 3, 11, 13
INT, FLOAT = torch.int64, torch.float32
PADDING = torch.ones(B, K, dtype=INT)
PADDING[1, 8:] = 0
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3]).expand(B, K)
TABLE = torch.randn(H, Q + K - 1, generator=torch.Generator().manual_seed(0))


def compare(op, *args):
    return apply(op, args, torch.bool)


def both(*conditions):
    total = conditions[0]
    for condition in conditions[1:]:
        total = apply("logical_and", [total, condition], torch.bool)
    return total


CAUSAL = compare("le", axis("k"), axis("q"))
PADDED = compare("ne", load(0, [axis("b"), axis("k")], INT), 0)
SAME = compare("eq", load(0, [axis("b"), axis("q")], INT), load(0, [axis("b"), axis("k")], INT))
RELATIVE = load(0, [axis("h"), affine({"k": 1, "q": -1}, Q - 1)], FLOAT)
SLOPES = apply("mul", [cast(affine({"k": 1, "q": -1}, 0), FLOAT), load(0, [axis("h")], FLOAT)], FLOAT)

q, k = torch.arange(Q)[:, None], torch.arange(K)[None]
MASKS = {
    "causal": (Mask(visible=CAUSAL), [], (k <= q)[None, None]),
    "padding": (Mask(visible=PADDED), [PADDING], (PADDING != 0)[:, None, None].expand(B, 1, Q, K)),
    "causal and padding": (Mask(visible=both(CAUSAL, PADDED)), [PADDING], (k <= q) & (PADDING != 0)[:, None, None]),
    "documents": (Mask(visible=SAME), [DOCUMENTS], DOCUMENTS[:, None, :Q, None] == DOCUMENTS[:, None, None]),
    "learned": (Mask(bias=RELATIVE), [TABLE], TABLE[:, k - q + Q - 1][None]),
    "slopes": (Mask(CAUSAL, SLOPES), [TABLE[:, 0]],
               ((k - q).float() * TABLE[:, :1, None]).masked_fill(k > q, -math.inf)[None]),
    "nothing": (Mask(), [], torch.ones(1, 1, Q, K, dtype=torch.bool)),
}  # fmt: skip


def additive(whole: torch.Tensor) -> torch.Tensor:
    return torch.zeros(()).masked_fill(~whole, -math.inf) if whole.dtype == torch.bool else whole


def blocks(size, step):
    return [range(start, min(start + step, size)) for start in range(0, size, step)]


@pytest.mark.parametrize("name", MASKS)
def test_blocks_have_the_bits_of_the_whole_and_verdicts_are_true(name):
    mask, sources, whole = MASKS[name]
    expected = additive(whole)
    verdicts = set()
    for rows, keys in product(blocks(Q, 3), blocks(K, 4)):
        found = mask.additive(ScoreBlock(B, H, rows, keys), sources, FLOAT)
        assert found.shape == (*expected.shape[:2], len(rows), len(keys))
        assert torch.equal(found, expected[:, :, rows.start : rows.stop, keys.start : keys.stop])
        kind = mask.kind({"b": range(B), "h": range(H), "q": rows, "k": keys}, sources)
        hidden = found == -math.inf
        assert kind != "empty" or hidden.all()
        assert kind != "full" or (found == 0).all()
        assert kind == "partial" or not mask.bias or hidden.all()
        verdicts.add(kind)
    if name in ("causal", "causal and padding", "documents"):
        assert verdicts == {"empty", "full", "partial"}


@pytest.mark.parametrize("name", MASKS)
def test_text_gives_the_mask_back(name):
    mask, sources, _whole = MASKS[name]
    assert Mask.parse(mask.text) == mask
    assert Mask.parse(mask.text) is Mask.parse(mask.text)
    assert mask.sources == tuple(range(len(sources)))
    assert (mask.text == "") == (name == "nothing")


def test_a_mask_is_as_large_as_the_scores_where_it_is_broadcast_along_nothing():
    of_heads = Mask(bias=load(0, [axis("h"), axis("q"), axis("k")], FLOAT))
    assert of_heads.is_as_large_as_scores(1, H) and not of_heads.is_as_large_as_scores(B, H)
    assert not MASKS["learned"][0].is_as_large_as_scores(B, H)  # read at k - q: it has no batch


def test_rows_may_be_any_rows_in_any_order():
    mask, sources, whole = MASKS["causal and padding"]
    rows, keys = torch.tensor([10, 0, 4, 5]), torch.tensor([12, 3, 0])
    found = mask.additive(ScoreBlock(B, H, rows, keys), sources, FLOAT)
    assert torch.equal(found, additive(whole)[:, :, rows][..., keys])


def test_a_padded_row_of_the_batch_alone_does_not_make_a_block_empty():
    mask, sources, _whole = MASKS["padding"]
    spans = {"b": range(B), "h": range(H), "q": range(Q), "k": range(8, K)}
    assert mask.kind(spans, sources) == "partial"
    assert mask.kind(spans | {"b": range(1, 2)}, sources) == "empty"


@pytest.mark.parametrize("step", [3, 5])
def test_gradients_of_blocks_sum_to_the_gradient_of_the_whole(step):
    mask, _sources, _whole = MASKS["learned"]
    table, upstream = TABLE.double().requires_grad_(), torch.randn(1, H, Q, K, dtype=torch.float64)
    whole = mask.additive(ScoreBlock(B, H, range(Q), range(K)), [table], torch.float64)
    (expected,) = torch.autograd.grad((whole * upstream).sum(), table)
    total = torch.zeros_like(table)
    for rows, keys in product(blocks(Q, step), blocks(K, step)):
        part = upstream[:, :, rows.start : rows.stop, keys.start : keys.stop]
        block = mask.additive(ScoreBlock(B, H, rows, keys), [table], torch.float64)
        total += torch.autograd.grad((block * part).sum(), table)[0]
    assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)


def test_gradients_reach_what_is_added_and_not_what_decides():
    vector = load(0, [axis("k")], FLOAT)
    bias = apply("where", [compare("le", vector, 0.0), load(1, [axis("h")], FLOAT), load(2, [axis("h")], FLOAT)], FLOAT)
    stopped = apply("add", [bias, apply("detach", [load(3, [axis("k")], FLOAT)], FLOAT)], FLOAT)
    assert Mask(bias=stopped).sources == (0, 1, 2, 3)
    assert Mask(bias=stopped).differentiable == (1, 2)
    assert Mask(visible=compare("le", vector, 0.0)).differentiable == ()


def test_gradients_reach_what_changes_the_score():
    scaled = apply("mul", [score(FLOAT), load(0, [axis("h")], FLOAT)], FLOAT)
    mask = Mask(score=apply("where", [PADDED, scaled, 0.0], FLOAT))
    assert mask.sources == (0,) and mask.differentiable == (0,)


def test_a_choice_that_a_block_decides_is_no_change():
    zero = apply("mul", [cast(axis("k"), FLOAT), 0.0], FLOAT)
    spans = {"b": range(B), "h": range(H), "q": range(5, 8)}
    fill = Mask(score=where(CAUSAL, score(FLOAT), 0.0, FLOAT), bias=where(CAUSAL, 0.0, -1e9, FLOAT))
    before, across, after = ({**spans, "k": keys} for keys in (range(0, 6), range(4, 7), range(8, 13)))
    assert [fill.kind(block, []) for block in (before, across, after)] == ["full", "partial", "partial"]
    assert [fill.modifies(block, []) for block in (before, across, after)] == [False, True, True]
    assert Mask(bias=where(CAUSAL, zero, -1e9, FLOAT)).kind(before, []) == "partial"  # 0 is not proven from a sample
    assert Mask(score=apply("tanh", [score(FLOAT)], FLOAT)).modifies(before, [])
    assert not Mask().modifies(before, [])


def test_the_score_is_changed_in_its_dtype_and_shape():
    scores = torch.randn(B, H, 2, 3, dtype=torch.float64, requires_grad=True)
    mask = Mask(score=apply("mul", [score(torch.float64), load(0, [axis("q")], torch.float64)], torch.float64))
    factor = torch.randn(Q, dtype=torch.float64, requires_grad=True)
    found = mask.modified(scores, ScoreBlock(B, H, range(4, 6), range(3)), [factor])
    assert torch.equal(found, scores * factor[4:6, None])
    grads = torch.autograd.grad(found.sum(), (scores, factor))
    assert torch.equal(grads[1][4:6], scores.sum((0, 1, 3)))
    assert (
        Mask(score=apply("abs", [load(0, [], FLOAT)], FLOAT))
        .modified(scores, ScoreBlock(B, H, range(2), range(3)), [-torch.ones(())])
        .eq(1)
        .all()
    )
    assert Mask().modified(scores, ScoreBlock(B, H, range(2), range(3)), []) is scores


def test_numbers_far_from_0_in_the_score():
    filled = where(CAUSAL, score(FLOAT), -1e9, FLOAT)
    assert Mask(score=filled).far == -1e9
    assert Mask(score=apply("mul", [apply("tanh", [filled], FLOAT), 2e4], FLOAT)).far in (-1e9, 2e4)
    hidden = where(CAUSAL, score(FLOAT), -math.inf, FLOAT)
    assert Mask(score=hidden).far is Mask(bias=where(CAUSAL, 0.0, -1e9, FLOAT)).far is None


def test_rows_of_a_rank():
    whole = torch.randn(1, H, Q, K, generator=torch.Generator().manual_seed(3))
    mask = Mask(bias=load(0, [axis("b"), axis("h"), axis("r"), axis("k")], FLOAT))
    assert mask.row_dims == {0: 2} and MASKS["learned"][0].row_dims == {}
    held = whole[:, :, [0, 1, 8, 9, 10]]  # rows 0, 1 and 8 to 10 of the sequence
    found = mask.additive(ScoreBlock(1, H, range(8, 10), range(2, 7), range(2, 4)), [held], FLOAT)
    assert torch.equal(found, whole[:, :, 8:10, 2:7])
    found = mask.additive(ScoreBlock(1, H, range(8, 10), range(2, 7)), [whole], FLOAT)  # r is q
    assert torch.equal(found, whole[:, :, 8:10, 2:7])
    low = Mask(visible=compare("gt", load(0, [axis("r")], FLOAT), 0.0))
    spans = {"b": range(1), "h": range(1), "q": range(8, 10), "k": range(3)}
    assert low.kind({**spans, "r": range(0, 2)}, [torch.tensor([1.0, 2.0, -1.0])]) == "full"
    assert low.kind({**spans, "r": range(2, 3)}, [torch.tensor([1.0, 2.0, -1.0])]) == "empty"


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ([affine({"r": 1}, 1)], "source 0 holds the rows of a rank and is not read at r in one dim"),
        ([axis("r"), axis("r")], "source 0 holds the rows of a rank and is not read at r in one dim"),
    ],
)
def test_rows_of_a_rank_are_read_at_its_queries_only(index, told):
    with pytest.raises(ValueError, match=told):
        _ = Mask(bias=load(0, index, FLOAT)).row_dims


def test_a_source_is_cut_in_one_way():
    rows, keys = load(0, [axis("r"), axis("k")], FLOAT), load(0, [axis("q"), axis("k")], FLOAT)
    with pytest.raises(ValueError, match="source 0 holds the rows of a rank and is read at other rows as well"):
        _ = Mask(bias=apply("add", [rows, keys], FLOAT)).row_dims
    with pytest.raises(ValueError, match="source 0 holds the rows of a rank in dim 0 and 1"):
        _ = Mask(bias=apply("add", [rows, load(0, [axis("k"), axis("r")], FLOAT)], FLOAT)).row_dims


def test_hidden_rows_are_minus_infinity_never_nan():
    mask = Mask(visible=compare("lt", axis("q"), 0), bias=load(0, [axis("k")], FLOAT))
    found = mask.additive(ScoreBlock(1, 1, range(2), range(3)), [torch.tensor([math.inf, math.nan, 1.0])], FLOAT)
    assert (found == -math.inf).all()


def test_a_mask_traces_without_leaving_constants_in_the_graph():
    mask, _sources, _whole = MASKS["causal and padding"]

    def function(padding):
        return Mask.parse(mask.text).additive(ScoreBlock(B, H, range(Q), range(K)), [padding], FLOAT)

    gm = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(PADDING)
    assert not gm.graph.find_nodes(op="get_attr")
    assert torch.equal(gm(PADDING), function(PADDING))


def test_a_million_rows_cost_a_block():
    n = 1 << 20
    documents = (torch.arange(n) // 3000).expand(1, n)
    spans = {"b": range(1), "h": range(1), "q": range(n // 2, n // 2 + 512)}
    mask = Mask(visible=both(CAUSAL, SAME))
    kinds = [mask.kind(spans | {"k": range(i, i + 4096)}, [documents]) for i in range(0, n, 4096)]
    assert kinds.count("empty") == len(kinds) - 2
    assert kinds[126:130] == ["empty", "partial", "partial", "empty"]  # a document of 3000 rows begins in block 127


# ---- bands -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("low", "high", "pattern"),
    [
        (-math.inf, math.inf, ("full", True)),
        (-math.inf, 0, ("causal", True)),
        (-math.inf, -1, ("causal", False)),
        (-math.inf, 2, ("full", False)),
        (-3, 0, ("window(4)", True)),
        (-3, -1, ("window(4)", False)),
        (-3, 3, ("window(4,both)", True)),
        (-3, 1, ("window(4,both)", False)),
        (1, 3, ("window(4,both)", False)),
        (0, math.inf, ("full", False)),
    ],
)
def test_pattern_around_a_band(low, high, pattern):
    assert pattern_around(low, high) == pattern
