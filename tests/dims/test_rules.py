"""The table of rules, held against the ops themselves.

The law of a rule: for every dim of the output that `pull` accepts, rows a..b of the output are the op on rows a..b of
the operands that run along, and on the others whole.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.dims.rule import ViewRule
from ringopt.dims.rules import is_known, rule_of
from ringopt.ir.nodes import is_tensor, op_name, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded, through_view
from ringopt.ops import operators

A, B, C = (3, 4, 6), (4, 6), (3, 6, 4)


def attended(q, k, v, mask=None, sinks=None):
    """The attention that passes find."""
    return operators.attention(q, k, v, mask, [], sinks, None, "causal", "", 0, 0.5)


#: name -> (function of float tensors, their shapes, the output dims along which it works row by row)
OPS = {
    "add with broadcast": (lambda x, y: x + y, (A, (6,)), {0, 1, 2}),
    "where": (lambda x, y: torch.where(x > 0, x, y), (A, B), {0, 1, 2}),
    "masked_fill": (lambda x, y: x.masked_fill(y > 0, 1.0), (A, (1, 4, 1)), {0, 1, 2}),
    "transpose": (lambda x: x.transpose(0, 2), (A,), {0, 1, 2}),
    "permute": (lambda x: x.permute(2, 0, 1), (A,), {0, 1, 2}),
    "movedim": (lambda x: x.movedim(0, 2), (A,), {0, 1, 2}),
    "unsqueeze": (lambda x: x.unsqueeze(1), (A,), {0, 2, 3}),
    "squeeze": (lambda x: x.squeeze(1), ((3, 1, 6),), {0, 1}),
    "expand": (lambda x: x.expand(5, 3, 4, 6), ((3, 1, 6),), {1, 3}),
    "tile": (lambda x: x.tile(1, 2), (A,), {0, 1}),
    "diagonal": (lambda x: x.diagonal(1, 0, 2), ((3, 4, 6),), {0}),
    "diagonal of the last dims": (lambda x: torch.linalg.diagonal(x), ((3, 4, 6, 6),), {0, 1}),
    "diag_embed": (lambda x: torch.diag_embed(x), (A,), {0, 1}),
    "diag_embed in front": (lambda x: torch.diag_embed(x, 1, 0, 2), (A,), {1, 3}),
    "mode": (lambda x: x.mode()[0], (A,), {0, 1}),
    "kthvalue": (lambda x: x.kthvalue(2)[0], (A,), {0, 1}),
    "unfold": (lambda x: x.unfold(1, 2, 1), (A,), {0, 2}),
    "as complex": (lambda x: torch.view_as_complex(x), ((3, 4, 2),), {0, 1}),
    "as real": (lambda x: torch.view_as_real(torch.complex(x, x)), (A,), {0, 1, 2}),
    "repeat": (lambda x: x.repeat(2, 1, 3, 1), (A,), {1, 3}),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (A,), {0, 2}),
    "select": (lambda x: x.select(1, 2), (A,), {0, 1}),
    "slice": (lambda x: x[:, 1:3], (A,), {0, 2}),
    "slice of all": (lambda x: torch.ops.aten.slice(x, 1, 0, 99), (A,), {0, 1, 2}),
    "narrow": (lambda x: x.narrow(1, 1, 2), (A,), {0, 2}),
    "split": (lambda x: x.split(3, 2)[1], (A,), {0, 1}),
    "view": (lambda x: x.view(12, 6), (A,), {0, 1}),
    "view of another dtype": (lambda x: x.view(torch.int32), (A,), {0, 1}),
    "split of the first dim": (lambda x: x.split(2)[1], (B,), {1}),
    "unbind of the first dim": (lambda x: x.unbind()[1], (A,), {0, 1}),
    "cat of the first dim": (lambda x, y: torch.cat([x, y]), (A, A), {1, 2}),
    "stack of a first dim": (lambda x, y: torch.stack([x, y]), (A, A), {1, 2, 3}),
    "chunk": (lambda x: x.chunk(2, -1)[0], (A,), {0, 1}),
    "unbind": (lambda x: x.unbind(1)[1], (A,), {0, 1}),
    "cat": (lambda x, y: torch.cat([x, y], 1), (A, A), {0, 2}),
    "select_scatter": (lambda x, y: x.select_scatter(y, 1, 2), (A, (3, 6)), {0, 2}),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 1, 3), (A, (3, 2, 6)), {0, 2}),
    "stack": (lambda x, y: torch.stack([x, y], 1), (A, A), {0, 2, 3}),
    "softmax": (lambda x: x.softmax(-1), (A,), {0, 1}),
    "cumsum": (lambda x: x.cumsum(1), (A,), {0, 2}),
    "flip": (lambda x: x.flip(1), (A,), {0, 2}),
    "roll": (lambda x: x.roll(1, 1), (A,), {0, 2}),
    "sort": (lambda x: x.sort(1)[0], (A,), {0, 2}),
    "topk": (lambda x: x.topk(2, -1)[0], (A,), {0, 1}),
    "triu": (lambda x: x.triu(1), (A,), {0}),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (A, (6,), (6,)), {0, 1}),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (A, (6,)), {0, 1}),
    "glu": (lambda x: F.glu(x, -1), (A,), {0, 1}),
    "pad": (lambda x: F.pad(x, (0, 1)), (A,), {0, 1}),
    "mean": (lambda x: x.mean(1), (A,), {0, 1}),
    "mean keepdim": (lambda x: x.mean(-1, keepdim=True), (A,), {0, 1}),
    "amax": (lambda x: x.amax(0), (A,), {0, 1}),
    "var of all": (lambda x: x.var(), (A,), set()),
    "max along": (lambda x: x.max(1)[0], (A,), {0, 1}),
    "larger of two": (lambda x, y: torch.max(x, y), (A, B), {0, 1, 2}),
    "max of all": (lambda x: x.max(), (A,), set()),
    "var and mean": (lambda x: torch.var_mean(x, 1)[1], (A,), {0, 1}),
    "product": (lambda x: x.prod(1), (A,), {0, 1}),
    "cummax": (lambda x: x.cummax(1)[0], (A,), {0, 2}),
    "batch norm in evaluation": (
        lambda x, m, v: F.batch_norm(x, m, v.abs(), m, v, False), (A, (4,), (4,)), {0, 1, 2},
    ),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), (A, (4,)), {0}),
    "instance norm": (lambda x: F.instance_norm(x), (A,), {0}),
    "convolution": (lambda x, w: F.conv1d(x, w), (A, (2, 4, 3)), {0}),
    "prelu": (F.prelu, (A, (4,)), {0, 1, 2}),
    "prelu of one slope": (F.prelu, (A, (1,)), {0, 1, 2}),
    "pooling": (lambda x: F.avg_pool1d(x, 2), (A,), {0, 1}),
    "resampling": (lambda x: F.interpolate(x, scale_factor=2), (A,), {0, 1}),
    "cosine similarity": (lambda x, y: F.cosine_similarity(x, y, dim=1), (A, (4, 1)), {0, 1}),
    "distance": (F.pairwise_distance, (A, B), {0, 1}),
    "number of zeros": (lambda x: torch.count_nonzero(x, 1), (A,), {0, 1}),
    "sum without nan": (lambda x: x.nansum(1), (A,), {0, 1}),
    "least and largest": (lambda x: x.aminmax(dim=1)[0], (A,), {0, 1}),
    "kth value": (lambda x: x.kthvalue(2, 1)[0], (A,), {0, 1}),
    "special function": (lambda x: torch.special.expit(x), (A,), {0, 1, 2}),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), (A,), {0, 1}),
    "gather": (lambda x, y: x.gather(2, (y > 0).long()), (A, (*C[:1], 4, 2)), {0, 1, 2}),
    "scatter": (lambda x, y: x.scatter(2, (y > 0).long(), y), (A, (*A[:2], 2)), {0, 1}),
    "scatter of a value": (lambda x, y: x.scatter(2, (y > 0).long(), 1.0), (A, (3, 3, 2)), {0}),
    "scatter_add": (lambda x, y: x.scatter_add(1, (y > 0).long(), y), (A, A), {0, 2}),
    "index_add": (lambda x, y: x.index_add(1, torch.tensor([2, 0]), y), (A, (3, 2, 6)), {0, 2}),
    "take_along_dim": (lambda x, y: x.take_along_dim((y > 0).long(), 1), (A, A), {0, 1, 2}),
    "bucketize": (lambda x, y: torch.bucketize(x, y.sort()[0]), (A, (5,)), {0, 1, 2}),
    "isin": (lambda x, y: torch.isin(x, y), (A, (5,)), {0, 1, 2}),
    "searchsorted": (lambda x, y: torch.searchsorted(y.sort()[0], x), (A, (5,)), {0, 1, 2}),
    "linear": (F.linear, (A, (5, 6), (5,)), {0, 1, 2}),
    "tensordot": (lambda x, y: torch.tensordot(x, y, ([2], [0])), (A, (6, 5)), {0, 1, 2}),
    "inner": (lambda x, y: torch.inner(x, y), (A, (5, 6)), {0, 1, 2}),
    "bilinear": (F.bilinear, (A, A, (5, 6, 6)), {0, 1}),
    "gru_cell": (torch.gru_cell, (B, (4, 5), (15, 6), (15, 5), (15,), (15,)), {0}),
    "lstm_cell": (
        lambda x, h, c, *weights: torch.lstm_cell(x, [h, c], *weights)[1], (B, (4, 5), (4, 5), (20, 6), (20, 5)), {0}
    ),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, (B, (4, 5), (5, 6), (5, 5)), {0}),
    "cdist": (lambda x, y: torch.cdist(x, y), (A, (3, 5, 6)), {0, 1, 2}),
    "addmv": (torch.addmv, ((4,), B, (6,)), {0}),
    "solve_triangular": (
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=False), ((3, 4, 2, 2), (1, 4, 2, 5)), {0, 1}
    ),
    "solve": (lambda x, y: torch.linalg.solve(x, y), ((4, 2, 2), (3, 4, 2, 5)), {0, 1}),
    "inverse": (torch.linalg.inv, ((3, 4, 2, 2),), {0, 1}),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(2)), ((3, 4, 2, 2),), {0, 1}),
    "logdet": (lambda x: torch.linalg.slogdet(x)[1], ((3, 4, 2, 2),), {0, 1}),
    "qr": (lambda x: torch.linalg.qr(x)[1], ((3, 4, 2, 2),), {0, 1}),
    "einsum with an ellipsis": (lambda x, y: torch.einsum("...d,ed->...e", x, y), (A, (5, 6)), {0, 1, 2}),
    "einsum of capitals": (lambda x, y: torch.einsum("BND,ED->BNE", x, y), (A, (5, 6)), {0, 1, 2}),
    "einsum without an arrow": (lambda x, y: torch.einsum("nbd,ed", x, y), (A, (5, 6)), {0, 1, 2}),
    "einsum of capitals and an ellipsis": (lambda x, y: torch.einsum("...D,ED", x, y), (A, (5, 6)), {0, 1, 2}),
    "einsum that broadcasts": (lambda x, y: torch.einsum("bnd,bnd->bnd", x, y), (A, (3, 1, 6)), {0, 1, 2}),
    "matmul": (lambda x, y: x @ y, (A, (3, 6, 5)), {0, 1, 2}),
    "matmul by matrix": (lambda x, y: x @ y, (A, (6, 5)), {0, 1, 2}),
    "matmul by vector": (lambda x, y: x @ y, (A, (6,)), {0, 1}),
    "vector by matmul": (lambda x, y: x @ y, ((4,), A), {0, 1}),
    "addmm": (torch.addmm, ((5,), B, (6, 5)), {0, 1}),
    "baddbmm": (torch.baddbmm, ((3, 1, 5), A, (3, 6, 5)), {0, 1, 2}),
    "baddbmm of a row": (torch.baddbmm, ((5,), A, (3, 6, 5)), {0, 1, 2}),
    "bmm": (torch.bmm, (A, (3, 6, 5)), {0, 1, 2}),
    "einsum": (lambda x, y: torch.einsum("bnd,ed->bne", x, y), (A, (5, 6)), {0, 1, 2}),
    "embedding": (lambda w, x: F.embedding((x > 0).long(), w), ((5, 6), (3, 4)), {0, 1}),
    "index": (lambda x, y: x[:, (y > 0).long()], (A, (5, 2)), {0, 1, 2, 3}),
    "index apart": (lambda x, y: x[(y > 0).long(), :, (y > 0).long()], (A, (5,)), {0, 1}),
    "attention": (lambda *x: attended(*x), ((3, 2, 5, 4),) * 3, {0, 1}),
    "attention of groups": (lambda *x: attended(*x), ((3, 4, 5, 4), (3, 2, 5, 4), (3, 2, 5, 4)), {0}),
    "attention with sinks": (lambda *x: attended(*x[:3], sinks=x[3]), (*((3, 2, 5, 4),) * 3, (2,)), {0, 1}),
    "attention with its own sinks": (lambda *x: attended(*x[:3], sinks=x[3]), (*((3, 2, 5, 4),) * 3, (3, 1)), {0, 1}),
    "index_select": (lambda x, y: x.index_select(1, (y > 0).long()), (A, (5,)), {0, 1, 2}),
}  # fmt: skip


def captured(function, shapes):
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    gm = make_fx(function, pre_dispatch=True, tracing_mode="fake")(*inputs)
    values = {}

    class Record(torch.fx.Interpreter):
        def run_node(self, node):
            values[node] = super().run_node(node)
            return values[node]

    Record(gm).run(*inputs)
    return gm, values


def run(node, rule, wanted, values, rows):
    """`node` on the rows of its operands that `wanted` names."""
    places = iter(wanted)

    def operand(arg):
        if not isinstance(value_of(arg), (torch.Tensor, tuple, list)):
            return values[arg]
        place, value = next(places), values[arg]
        cut = lambda x: x.narrow(place.dim, rows.start, len(rows)) if place else x  # noqa: E731
        return cut(value) if isinstance(value, torch.Tensor) else type(value)(map(cut, value))

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
    if op_name(node) == "expand":
        out = rule.push(0, wanted[0])
        args = (args[0], [-1 if d == out.dim else size for d, size in enumerate(shape_of(node))])
    return node.target(*args, **kwargs)


@pytest.mark.parametrize("name", OPS)
def test_the_law(name):
    function, shapes, along = OPS[name]
    gm, values = captured(function, shapes)
    for node in gm.graph.nodes:
        rule = rule_of(node)
        if rule is None or isinstance(rule, ViewRule):
            continue
        value = values[node] if is_tensor(node) else values[node][0]
        assert len(rule.operands) == len(list(tensor_args(node)))
        for dim, size in enumerate(value.shape):
            wanted = rule.pull(Sharded(dim, 1, size, 1))
            if wanted is None or size < 2:
                continue
            rows = range(1, size)
            found = run(node, rule, wanted, values, rows)
            found = found if isinstance(found, torch.Tensor) else found[0]
            torch.testing.assert_close(found, value.narrow(dim, 1, size - 1))
    last = gm.graph.output_node().args[0]
    if op_name(last) == "getitem":
        last = last.args[0]
    found = {dim for dim, size in enumerate(shape_of(last)) if rule_of(last).pull(Sharded(dim, 1, size, 1))}
    assert found == along or isinstance(rule_of(last), ViewRule)


def test_systems_of_vectors_have_no_rule():
    gm, _ = captured(lambda x, y: torch.linalg.solve(x + torch.eye(2), y), ((3, 3, 2, 2), (3, 3, 2)))
    assert rule_of(gm.graph.output_node().args[0]) is None


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda x: torch.matmul(x, x.transpose(-1, -2)), (A,)),
        (lambda x: x.sum(1), (A,)),
        (lambda x, y: F.linear(x, y), (A, (5, 6))),
        (lambda x, y: torch.einsum("bnd,bne->bde", x, y), (A, (3, 4, 5))),
        (lambda x, y: torch.tensordot(x, y, ([1], [1])), (A, (3, 4, 5))),
        (lambda x: torch.count_nonzero(x > 0, 1), (A,)),
    ],
)
def test_partial_sums_add_up(function, shapes):
    gm, values = captured(function, shapes)
    node = gm.graph.output_node().args[0]
    rule, first = rule_of(node), next(tensor_args(node))
    dim = rule.summed[0][0]
    size = shape_of(first)[dim]
    wanted = rule.sums(0, Sharded(dim, 1, size, 1))
    parts = [run(node, rule, wanted, values, rows) for rows in (range(0, 1), range(1, size))]
    torch.testing.assert_close(sum(parts), values[node])


def test_batch_norm_in_training_mixes_the_batch():
    gm, _ = captured(lambda x: F.batch_norm(x, None, None, training=True), (A,))
    assert [rule_of(node) for node in gm.graph.nodes if op_name(node) == "batch_norm"] == [None]


def test_what_writes_is_not_known():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    add, write = (graph.call_function(op, (x, x)) for op in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))
    assert is_known(add) and not is_known(write)


def test_random_numbers_have_no_rows():
    gm, _ = captured(lambda x: F.dropout(x, 0.5, True), (A,))
    assert all(rule_of(node) is None for node in gm.graph.nodes if op_name(node) == "dropout")


@pytest.mark.parametrize(
    "old, new, before, after",
    [
        ((2, 8, 4), (16, 4), Sharded(1, 1, 8, 1), Sharded(0, 2, 8, 1)),
        ((16, 4), (2, 8, 4), Sharded(0, 2, 8, 1), Sharded(1, 1, 8, 1)),
        ((2, 8, 4), (2, 32), Sharded(1, 1, 8, 1), Sharded(1, 1, 8, 4)),
        ((2, 8, 4), (2, 2, 4, 4), Sharded(1, 1, 8, 1), None),  # the sequence is cut in two dims
        ((2, 8, 1), (2, 1, 8), Sharded(1, 1, 8, 1), Sharded(2, 1, 8, 1)),
    ],
)
def test_views_keep_the_sequence_one_factor(old, new, before, after):
    assert through_view(before, old, new) == after


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_what_ranks_share_along_the_first_dim_is_row_by_row_along_others(name):
    graph = torch.fx.Graph()
    node = graph.call_function(getattr(torch.ops._c10d_functional, name).default, (graph.placeholder("x"),))
    node.meta["val"] = torch.empty(4, 6, 8)
    rule = rule_of(node)
    assert rule.pull(Sharded(0, 1, 4, 1)) is None
    assert [list(rule.pull(Sharded(dim, 1, size, 1))) for dim, size in ((1, 6), (2, 8))] == [
        [Sharded(1, 1, 6, 1)], [Sharded(2, 1, 8, 1)]
    ]  # fmt: skip
