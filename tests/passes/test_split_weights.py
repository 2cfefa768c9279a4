"""Weights that are a sum or difference of softmaxes: as many attentions, on one rank and on several, in every
gradient."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline

from ringopt.ir.nodes import value_of
from ringopt.ir.printer import changes, short
from ringopt.passes import UNDERSTAND
from ringopt.passes.find_softmax import FindSoftmax
from ringopt.passes.normalize import Normalize
from ringopt.passes.split_weights import SplitWeights
from tests.harness.capturing import after, ops
from tests.harness.translation import validate
from tests.passes.test_find_unfused import BATCH, ROWS, Model, given


def two(s, q, k, v, m):
    first, second = ((q @ other.mT).softmax(-1) for other in (k, k * 0.5 + v))
    return (first - s.temperature[0, 0, 0].exp() * second) @ v


def causal(scores):
    return scores.masked_fill(torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1), -math.inf)


def pairs(s, q, k, v, m):
    """Each head of values has two of queries and keys (Microsoft's multihead_diffattn.py)."""
    wide = [torch.stack([x, x.roll(1, 1)], 2).flatten(1, 2) for x in (q, k)]
    weights = causal(wide[0] @ wide[1].mT).softmax(-1).view(BATCH, -1, 2, ROWS, ROWS)
    return torch.matmul(weights[:, :, 0] - s.temperature * weights[:, :, 1], v)


def by_bmm(s, q, k, v, m):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    factor = s.temperature.expand(-1, BATCH, 1).reshape(-1, 1, 1)
    weights = torch.bmm(q, k.mT).softmax(-1) - factor * torch.bmm(q, v.mT).softmax(-1)
    return torch.bmm(weights, v).unflatten(0, (BATCH, -1))


def by_einsum(s, q, k, v, m):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    first, second = (causal(torch.einsum("bqhd,bkhd->bhqk", q, other)).softmax(-1) for other in (k, v))
    return torch.einsum("bhqk,bkhd->bqhd", first - s.temperature * second, v).transpose(1, 2)


def pairs_by_einsum(s, q, k, v, m):
    """The factor is one of each head, which another dim of the output has."""
    q, k = (x.unflatten(-1, (2, -1)) for x in (q, k))
    weights = torch.einsum("bhqcd,bhkcd->bhcqk", q, k).softmax(-1)
    both = weights[:, :, 0] - s.temperature * weights[:, :, 1]
    return torch.einsum("bhqk,bhkd->qbhd", both, v).permute(1, 2, 0, 3)


def turned(s, q, k, v, m):
    first, second = ((q @ other.mT).softmax(-1) for other in (k, v))
    return (v.mT @ (first + s.temperature * second).mT).mT


def by_numbers(s, q, k, v, m):
    first, second = (causal(q @ other.mT).softmax(-1) for other in (k, v))
    return (0.7 * first - second / 3) @ v


SPELLED = [(by_bmm, 2), (by_einsum, 2), (pairs_by_einsum, 1), (turned, 2), (by_numbers, 2)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("core", "sites", "p"), [(two, 2, 2), (two, 2, 3), (pairs, 1, 2), (pairs, 1, 3), *((*each, 2) for each in SPELLED)]
)
def test_numbers(core, sites, p):
    verdict = validate(p, Model(core), *given())
    assert verdict.wrong == "" and [site.refusal for site in verdict.report.sites] == [None] * sites


def test_the_difference_is_taken_of_the_outputs():
    model = Model(two)
    before, _ = after([Normalize(), FindSoftmax()], model, *given())
    gm, _ = after([Normalize(), FindSoftmax(), SplitWeights()], model, *given())
    assert_expected_inline(
        changes(short(before.graph), short(gm.graph)),
        """\
  %x = input
  %qkv_weight = input
  %qkv_bias = input
  %temperature = input
  %out_weight = input
  %out_bias = input
  %linear = linear(%x, %qkv_weight, %qkv_bias)
  %chunk = chunk(%linear, 3, -1)
  %getitem = getitem(%chunk, 0)
  %getitem_1 = getitem(%chunk, 1)
  %getitem_2 = getitem(%chunk, 2)
  %view = view(%getitem, [2, 13, 3, 8])
  %transpose = transpose(%view, 1, 2)
  %view_1 = view(%getitem_1, [2, 13, 3, 8])
  %transpose_1 = transpose(%view_1, 1, 2)
  %view_2 = view(%getitem_2, [2, 13, 3, 8])
  %transpose_2 = transpose(%view_2, 1, 2)
  %mul = mul(%transpose_1, 0.5)
  %add = add(%mul, %transpose_2)
  %m_t = mT(%transpose_1)
  %matmul = matmul(%transpose, %m_t)
  %softmax = softmax(%matmul, -1)
  %m_t_1 = mT(%add)
  %matmul_1 = matmul(%transpose, %m_t_1)
  %softmax_1 = softmax(%matmul_1, -1)
  %select = select(%temperature, 0, 0)
  %select_1 = select(%select, 0, 0)
  %select_2 = select(%select_1, 0, 0)
  %exp = exp(%select_2)
- %mul_1 = mul(%exp, %softmax_1)
- %sub = sub(%softmax, %mul_1)
- %matmul_2 = matmul(%sub, %transpose_2)
+ %matmul_3 = matmul(%softmax, %transpose_2)
+ %matmul_4 = matmul(%softmax_1, %transpose_2)
+ %mul_2 = mul(%exp, %matmul_4)
+ %sub_1 = sub(%matmul_3, %mul_2)
- %transpose_3 = transpose(%matmul_2, 1, 2)
+ %transpose_3 = transpose(%sub_1, 1, 2)
  %reshape = reshape(%transpose_3, [2, -1, 24])
  %linear_1 = linear(%reshape, %out_weight, %out_bias)
  return [%linear_1]""",
    )


def of_a_vector(s, q, k, v, m):
    """A factor of each query, and one value of each key."""
    first, second = ((q[0, 0] @ other[0, 0].mT).softmax(-1) for other in (k, v))
    return ((first - q[0, 0, :, :1] * second) @ v[0, 0, :, 0])[None, None, :, None].expand_as(q)


def of_another_dtype(s, q, k, v, m):
    first, second = ((q @ other.mT).softmax(-1) for other in (k, v))
    return (first - s.temperature * second.float()) @ v


@pytest.mark.parametrize("core", [of_a_vector, of_another_dtype])
def test_a_product_that_could_not_be_parted_stays_right(core):
    model, (x, m) = Model(core), given()
    gm, _ = after([Normalize(), FindSoftmax(), SplitWeights()], model, x, m)
    assert validate(2, model, x, m).wrong == ""
    assert sum(op == "matmul" for op in ops(gm)) == 3, "two of scores, one of values"


def squared(s, q, k, v, m):
    """Not linear in the weights: both of its operands are them."""
    w = two_weights(q, k)
    return (w @ w) @ v


def by_columns(s, q, k, v, m):
    """A factor of each query, where it is the queries that are summed away."""
    first, second = ((q @ other.mT).softmax(-1) for other in (k, v))
    return torch.einsum("bhqk,bhqd->bhkd", first - q[..., :1] * second, v)


def pairs_by_dots(s, q, k, v, m):
    """Which dims the dots stand for, no letter says."""
    q, k = (x.unflatten(-1, (2, -1)) for x in (q, k))
    weights = torch.einsum("bhqcd,bhkcd->bhcqk", q, k).softmax(-1)
    return torch.einsum("...qk,...kd->...qd", weights[:, :, 0] - s.temperature * weights[:, :, 1], v)


def spread(product):
    """Weights of one head for all heads, as many as their factors."""

    def core(s, q, k, v, m):
        first, second = (q[0] @ k[0].mT).softmax(-1), (k[0, :1] @ q[0, :1].mT).softmax(-1)
        return product(first - s.temperature * second, v[0])[None].expand_as(v)

    return core


def of_one_wider_number(s, q, k, v, m):
    """Which leaves the dtype of the weights what it is."""
    q, k, v = (x.float() for x in (q, k, v))
    first, second = ((q @ other.mT).softmax(-1) for other in (k, v))
    return torch.einsum("bhqk,bhkd->bhqd", first - s.temperature[0, 0, 0] * second, v).double()


def test_one_wider_number_leaves_the_dtype():
    gm, _ = after([Normalize(), FindSoftmax(), SplitWeights()], Model(of_one_wider_number), *given())
    (last,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
    assert value_of(last).dtype == torch.float32


SPREAD = [spread(torch.bmm), spread(lambda w, v: torch.einsum("hqk,hkd->hqd", w, v))]


@pytest.mark.parametrize("core", [squared, by_columns, pairs_by_dots, *SPREAD])
def test_what_cannot_be_taken_out_of_the_product_stays_in_it(core):
    assert validate(2, Model(core), *given()).wrong == ""


LEFT = {
    "weights after dropout": lambda s, q, k, v, m: torch.dropout(two_weights(q, k), 0.5, True) @ v,
    "weights used elsewhere": lambda s, q, k, v, m: (w := two_weights(q, k)) @ v + w.mean(),
    "no softmax": lambda s, q, k, v, m: ((q @ k.mT).softmax(-1) - (q @ k.mT).sigmoid()) @ v,
}


def two_weights(q, k):
    return (q @ k.mT).softmax(-1) - (k @ q.mT).softmax(-1)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_linear_in_two_softmaxes_stays(name):
    _, context = after(UNDERSTAND, Model(LEFT[name]), *given())
    refusals = [info.refusal for info in context.sites.values()]
    assert all(refusals) and (refusals or context.left_alone)
