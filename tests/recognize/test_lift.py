"""The table of element rules, held against the ops themselves.

The law: the term of one element of a graph's output, evaluated at all places, is the output. Bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.expr.evaluate import evaluate, show
from ringopt.expr.terms import affine, axis, loads
from ringopt.frontend.plain_spelling import rename_synonyms
from ringopt.ir.constants import LARGEST, Constants
from ringopt.ir.nodes import shape_of
from ringopt.recognize.lift import Cone, Unreadable, coordinates, pairs

torch.manual_seed(0)
X, Y, V = torch.randn(3, 4, 6), torch.randn(4, 6), torch.randn(6)
N = torch.randint(-4, 5, (3, 4))
PLACES, J = torch.tensor([2, 0, 3, 1]), torch.tensor([[0, 2], [1, 1]])
M = torch.rand(3, 4, 6) > 0.5


def in_boxes(x, many):
    """`x[i : i + 2, 1:3] = i`, as it is without writes in place."""
    for i in range(many):
        first = i % 2
        part = x[first : first + 2]
        inner = part.slice_scatter(torch.full_like(part[:, 1:3], i), 1, 1, 3)
        x = x.slice_scatter(inner, 0, first, first + 2)
    return x


#: function of tensors that must be followed to its inputs, and the inputs
FOLLOWED = {
    "expand": (lambda x: x[:, None].expand(3, 5, 6), (V.view(1, 6).expand(3, 6).contiguous(),)),
    "view": (lambda x: x.view(12, 6).view(2, 6, 6), (X,)),
    "view that mixes": (lambda x: x.view(4, 3, 6), (X,)),
    "flatten, unflatten": (lambda x: x.flatten().unflatten(0, (2, 36)), (X,)),
    "squeeze": (lambda x: x[:, :1].squeeze(1), (X,)),
    "permute": (lambda x: x.permute(2, 0, 1), (X,)),
    "transpose": (lambda x: x.transpose(0, -1), (X,)),
    "movedim": (lambda x: x.movedim(0, 2), (X,)),
    "moveaxis, swapdims": (lambda x: x.moveaxis(0, 2).swapdims(0, 1), (X,)),
    "select": (lambda x: x[:, -1], (X,)),
    "slice": (lambda x: x[:, 1:-1, ::2], (X,)),
    "narrow": (lambda x: x.narrow(1, 1, 2).narrow(2, -3, 2), (X,)),
    "flip": (lambda x: x.flip(1), (X,)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (Y,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), (X,)),
    "index": (lambda x, i: x[:, i], (X, PLACES)),
    "index by two": (lambda x, i, j: x[:, i[:, None], j[:, :1].view(2)], (X, PLACES, J)),
    "index apart": (lambda x, j: x[j, :, j], (X, J)),
    "index from the end": (lambda x: x[:, torch.arange(3) - 2], (X,)),
    "index_select": (lambda x, i: x.index_select(1, i), (X, PLACES)),
    "gather": (lambda x, i: x.gather(1, i), (X, torch.randint(4, (3, 2, 6)))),
    "embedding": (lambda w, i: torch.nn.functional.embedding(i, w), (Y, J)),
    "cast": (lambda x: x.to(torch.bfloat16).to(torch.int64).bool(), (X,)),
    "arithmetic": (lambda x, y: (x * 2 - y / 3) ** 2 + abs(-x), (X, Y)),
    "rsub": (lambda x: 1.0 - x, (X,)),
    "alpha": (lambda x, y: torch.add(x, y, alpha=3), (X, Y)),
    "synonyms": (lambda x, y: torch.multiply(x, 2).subtract(torch.absolute(y), alpha=3).divide(y).negative(), (X, Y)),
    "synonyms of rounding": (lambda n: torch.divide(n, 2, rounding_mode="floor") + torch.fix(n / 3), (N,)),
    "synonyms of comparisons": (lambda x, y: x.less(y) | x.greater_equal(1.0) | x.not_equal(y), (X, Y)),
    "rounding": (lambda n: (n // 3) + torch.div(n, 2, rounding_mode="trunc") + n % 3, (N,)),
    "clamp": (lambda x: x.clamp(min=-0.5) + x.clamp(-1, 1) + x.clamp_max(0.3), (X,)),
    "mixed dtypes": (lambda x, n: x.bfloat16() * n[..., None] + x, (X, N)),
    "mixed with a scalar tensor": (lambda x: x.bfloat16() * torch.full((), 0.1), (X,)),
    "min of two": (lambda x, y: torch.min(x, y), (X, Y)),
    "where": (lambda m, x: torch.where(m, x, -1e9), (M, X)),
    "masked_fill": (lambda m, x: x.masked_fill(~m, float("-inf")), (M, X)),
    "logic": (lambda m, x: (m & (x > 0)) | ~(m ^ (x < 1)) | torch.logical_and(x, m), (M, X)),
    "triu, tril": (lambda x: x.triu(1).tril(3), (X,)),
    "slice_scatter": (lambda x: torch.slice_scatter(x, torch.zeros(3, 2, 6), 1, 1, 3), (X,)),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 0, -1), (X, Y)),
    "parts of parts": (lambda x: in_boxes(x, 5), (X,)),
    "a row of a part": (lambda x, v: torch.slice_scatter(x, x[1:].select_scatter(v.expand(2, 6), 1, 2), 0, 1), (X, V)),
    "a part of another": (lambda x, y: x.slice_scatter(x[:2].slice_scatter(y[:2, None], 1, 1, 2), 0, 1), (X, Y)),
    "cat": (lambda x, y: torch.cat([x, y[None], x], 0), (X, Y)),
    "concat": (lambda x, y: torch.concat([x, y[None], x], 0), (X, Y)),
    "pad": (lambda x: torch.nn.functional.pad(x, (1, 2, -1, 0), value=3.0), (X,)),
    "detach": (lambda x: x.detach() * 2, (X,)),
    "creation": (lambda x: torch.full_like(x, 2) + x.new_ones(6) + torch.arange(1, 13, 2) + torch.zeros(1), (X,)),
    "log of a distance": (lambda x: (torch.arange(6)[None] - torch.arange(4)[:, None]).abs().log() * x, (X,)),
}

#: read from the value of an op
STORED = {
    "cumsum": (lambda n: (n == 0).cumsum(-1) * 2, (N,), {"cumsum"}),
    "reduction": (lambda x: x.amax(-1) + 1, (X,), {"amax"}),
    "indices below 0 into a value": (lambda n, i: n.cumsum(1)[:, i - 4], (N, PLACES), {"cumsum", "i_1"}),
    "padding_idx": (lambda w, i: torch.nn.functional.embedding(i, w, padding_idx=0) + 1, (Y, J), {"embedding"}),
    "bits": (lambda x: x.view(torch.int32) + 1, (X,), {"view"}),
    "far smaller than what it is made of": (lambda x: x[:, 0, 0] + x[:, 1, 0], (X,), {"add"}),
}


def traced(function, inputs):
    gm = make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
    rename_synonyms(gm.graph)
    return gm, gm.graph.output_node().args[0]


def pulled(gm, node, names="vwxyz"):
    shape = shape_of(node)
    given = {n: getattr(gm, n.target) for n in gm.graph.find_nodes(op="get_attr")}
    cone = Cone(Constants(gm.graph, given), dict(zip(names[len(names) - len(shape) :], shape, strict=True)))
    return cone, cone.element(node, names)


def values_of(gm, inputs):
    found = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node):
            found[node] = super().run_node(node)
            return found[node]

    Recorder(gm).run(*inputs)
    return found


def assert_element_is(gm, node, inputs, cone, term):
    values = values_of(gm, inputs)
    found = evaluate(term, coordinates(list(cone.sizes), cone.sizes), values)
    assert found.dtype == values[node].dtype
    assert torch.equal(found.expand(values[node].shape), values[node]), show(term)


@pytest.mark.parametrize("case", FOLLOWED)
def test_element_is_followed_to_the_inputs(case):
    function, inputs = FOLLOWED[case]
    gm, node = traced(function, inputs)
    cone, term = pulled(gm, node)
    assert_element_is(gm, node, inputs, cone, term)
    assert {load.source.op for load in loads(term)} <= {"placeholder"}, show(term)


@pytest.mark.parametrize("case", STORED)
def test_element_is_read_where_the_climb_ends(case):
    function, inputs, sources = STORED[case]
    gm, node = traced(function, inputs)
    cone, term = pulled(gm, node)
    assert_element_is(gm, node, inputs, cone, term)
    assert {load.source.name for load in loads(term)} == sources


def test_a_chain_of_writes_to_parts_of_parts_grows_with_its_length():
    gm, node = traced(lambda x: in_boxes(x, 40), (X,))
    cone, term = pulled(gm, node)
    assert_element_is(gm, node, (X,), cone, term)
    assert len(cone.found) < 5 * 40


def test_alpha_of_scalars_is_not_dropped():
    gm, node = traced(lambda x: torch.ops.aten.add.Scalar(x, 1, 3), (X,))
    cone, term = pulled(gm, node)
    assert_element_is(gm, node, (X,), cone, term)


def test_gradient_stops_at_detach():
    gm, node = traced(lambda x: x.detach() * x, (V.clone().requires_grad_(),))
    cone, term = pulled(gm, node)
    x = V.clone().requires_grad_()
    (source,) = {load.source for load in loads(term)}
    evaluate(term, coordinates(["z"], cone.sizes), {source: x}).sum().backward()
    assert torch.equal(x.grad, V)


# ---- folding with what is known --------------------------------------------------------------------------------------
def packed(position_ids):
    """transformers' search for packed documents."""
    first = position_ids[:, :1] - 1
    ids = (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)
    return ids[:, :, None] == ids[:, None, :]


def test_detection_of_documents_vanishes_without_position_ids():
    gm, node = traced(lambda: packed(torch.arange(9)[None].expand(2, 9)), ())
    assert show(pulled(gm, node, "bqk")[1]) == "True"


def test_detection_of_documents_stays_with_position_ids():
    gm, node = traced(packed, (torch.arange(9)[None].expand(2, 9),))
    assert show(pulled(gm, node, "bqk")[1]) == "(cumsum[b, q] == cumsum[b, k])"


def test_window_wider_than_the_sequence_vanishes():
    gm, node = traced(lambda: torch.arange(9) > torch.arange(9)[:, None] - 9, ())
    assert show(pulled(gm, node, "bhqk")[1]) == "True"


def test_constants_of_the_program_are_known_and_inputs_are_not():
    table = torch.tensor([0, 2, 4, 6])
    gm, node = traced(lambda: table[torch.arange(4)] + 1, ())
    assert show(pulled(gm, node, "q")[1]) == "2q+1"
    gm, node = traced(lambda table: table[torch.arange(4)] + 1, (table,))
    assert show(pulled(gm, node, "q")[1]) == "(table_1[q] + 1)"


def test_places_of_a_long_sequence_are_a_line_without_their_numbers():
    gm, node = traced(lambda: torch.arange(3, 2 * (LARGEST + 1) + 3, 2), ())
    assert show(pulled(gm, node, "q")[1]) == "2q+3"


def test_an_axis_of_one_place_counts_for_nothing():
    """Of a batch of 1 nothing depends on the batch."""
    table = torch.tensor([[3, 5, 7, 9]])
    gm, _ = traced(lambda: table + 1, ())
    (node,) = gm.graph.find_nodes(op="get_attr")
    cone = Cone(Constants(gm.graph, {node: table}), {"b": 1, "q": 4})
    assert show(cone.at(node, (axis("b"), axis("q")))) == "2q+3"


def test_a_factor_goes_to_every_summand():
    """So the places of a view, flat, are lines again and no products of sums."""
    gm, node = traced(lambda: torch.arange(24).view(2, 3, 4).repeat_interleave(2, 0), ())
    cone, term = pulled(gm, node)
    assert_element_is(gm, node, (), cone, term)
    assert show(term) == "((((floor_divide(x, 2) * 3) * 4) + 4y) + z)"


@pytest.mark.parametrize(("rows", "keys", "found"), [("q", "k", "where((k-q <= 0), 1, 0)"), ("x", "y", "ones[x, y]")])
def test_a_known_triangle_is_a_band_between_queries_and_keys(rows, keys, found):
    """Of other axes, which are not known yet to be these, the table is read."""
    ones = torch.ones(5, 5).tril()
    gm, node = traced(lambda: ones[:, :4], ())
    given = {n: ones for n in gm.graph.find_nodes(op="get_attr")}
    cone = Cone(Constants(gm.graph, given), {rows: 5, keys: 4}, frozenset(rows), frozenset(keys))
    assert show(cone.element(node, rows + keys), lambda source: "ones") == found


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_of_no_tokens_there_is_no_element():
    gm, node = traced(lambda: torch.arange(0) <= torch.arange(0)[:, None], ())
    with pytest.raises(Unreadable, match="a sequence of 0 tokens"):
        pulled(gm, node)


def test_a_table_over_queries_and_keys_that_the_program_computes_is_refused():
    gm, node = traced(lambda x: (x @ x.transpose(-1, -2)) > 0, (torch.randn(3, 32, 6),))
    with pytest.raises(Unreadable, match=r"matmul makes a tensor \[3, 32, 32\] over queries and keys from data"):
        pulled(gm, node, "bqk")


def test_a_table_that_exists_is_read():
    gm, node = traced(lambda x: x > 0, (X,))
    assert show(pulled(gm, node, "bqk")[1], lambda source: "x") == "(x[b, q, k] > 0)"


def test_a_vector_of_differences_is_no_table():
    def relative(x):
        return x.cumsum(0)[torch.arange(3)[None] - torch.arange(3)[:, None] + 2]

    gm, node = traced(relative, (V,))
    assert show(pulled(gm, node, "qk")[1]) == "cumsum[k-q+2]"


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ([axis("q"), axis("k")], True),
        ([axis("k"), axis("h"), axis("q")], True),
        ([affine({"k": 1, "q": -1}, 5)], False),  # a vector over differences
        ([axis("h"), affine({"k": 1, "q": -1}, 5)], False),
        ([affine({"k": 1, "q": -1}, 5), axis("k")], True),
        ([axis("b"), axis("q")], False),
        ([axis("q"), axis("q")], False),
    ],
)
def test_what_is_read_at_pairs(index, found):
    """Where a query and a key stand in different dims, there is a number for each pair of them."""
    assert pairs(index) == found


def test_a_climb_as_deep_as_a_model_ends():
    def deep(x):
        for _ in range(150):
            x = x * 2 + x.sin()
        return x

    gm, node = traced(deep, (V,))
    (source,) = {load.source for load in loads(pulled(gm, node)[1])}
    assert source.op == "call_function"


def test_embedding_whose_gradient_is_not_that_of_its_rows_is_not_entered():
    gm, node = traced(lambda w, i: torch.nn.functional.embedding(i, w, scale_grad_by_freq=True) + 1, (Y, J))
    assert "embedding" in {load.source.name for load in loads(pulled(gm, node)[1])}


def test_a_table_of_relative_places_in_a_grid_is_no_table_of_pairs():
    """Swin and BEiT: 8 x 8 patches are 64 rows, their differences 15 x 15 numbers."""

    def grid(table):
        row, column = torch.arange(64) // 8, torch.arange(64) % 8
        return table.cumsum(0)[row[None] - row[:, None] + 7, column[None] - column[:, None] + 7]

    gm, node = traced(grid, (torch.randn(15, 15),))
    cone, term = pulled(gm, node, "qk")
    assert_element_is(gm, node, (torch.randn(15, 15),), cone, term)
    assert {load.source.name for load in loads(term)} == {"cumsum"}


def test_a_program_on_the_meta_device_is_known_all_the_same():
    gm, node = traced(lambda: packed(torch.arange(9, device="meta")[None].expand(2, 9)), ())
    assert show(pulled(gm, node, "bqk")[1]) == "True"
