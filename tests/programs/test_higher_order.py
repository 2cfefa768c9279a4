"""Programs with higher-order operators: these run whole on every rank, the rest on shards, with torch's gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import ringopt
from ringopt.errors import RingMismatchError
from ringopt.frontend.flex import example
from ringopt.frontend.one_node import reason_against
from ringopt.ir.printer import changes, short
from ringopt.passes import LINE, UNDERSTAND
from tests.harness.capturing import after
from tests.harness.models import difference, run

WIDTH, HEADS, ROWS = 16, 2, 11


class Model(nn.Module):
    """Attention, `step(self, value)`, a layer."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.step, self.qkv, self.out = step, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay, self.weight = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(self.step(self, y))


def chosen(m, x):
    return torch.cond(x.sum() > 0, lambda y: (y @ m.weight).sin(), lambda y: y.cos(), (x,))


def recurrence(m, x):
    return scan(lambda state, y: (state * m.decay + y, state + y), torch.zeros_like(x[:, 0]), x, dim=1)[1]


def both_states(m, x):
    last, states = scan(lambda state, y: (state * m.decay + y, state.clone()), torch.zeros_like(x[:, 0]), x, dim=1)
    return states + last[:, None]


def looped(m, x):
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]


def without_gradient(m, x):
    with torch.no_grad():
        scale = chosen(m, x)
    return x * scale


def nested(m, x):
    def inner(y):
        return torch.cond(y.mean() > 0, lambda z: z * 2, lambda z: z.sin(), (y,))

    return torch.cond(x.sum() > 0, inner, lambda y: inner(y.cos()), (x,))


def of_each_row(m, x):
    """A gradient of each sequence, and one that is called behind what else reads its value; a vmap in a checkpoint."""
    x = torch.utils.checkpoint.checkpoint(torch.vmap(lambda row: row * row.softmax(0)), x, use_reentrant=False) + x
    torch.vmap(torch.sin)(x)  # which nobody reads
    each = torch.vmap(torch.func.grad(lambda w, row: (row @ w).square().mean()), (None, 0))(m.weight, x)
    y, backward = torch.func.vjp(lambda y: (y @ m.weight).tanh(), x)
    return x @ each + backward(y * 2)[0]


def turned(m, x):
    """The graphs view their operand as only the order that it has in memory allows."""

    def rows(y):
        return y.transpose(1, 2).view(2, -1).sin().view(2, ROWS, WIDTH)

    return torch.cond(x.sum() > 0, rows, lambda y: rows(y).cos(), ((x * m.decay).transpose(1, 2),))


def lost(m, x):
    """Of a product that a region of autocast computes in 16 bits nothing; of one in more bits a lot."""
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.cond(x.sum() > -1e9, lambda y: y @ m.weight, lambda y: y.bfloat16(), (x,)).float()
    return x + 1e3 * (product - product.bfloat16().float()).detach()


# Before 2.13 torch's scan stacks along dim 0, whatever it went along, and its gradients are wrong.
OLD = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")

STEPS = {
    "cond": chosen,
    "scan": recurrence,
    "scan with its last state": both_states,
    "map": lambda m, x: mapped(lambda row, w: row @ w, x.transpose(0, 1).contiguous(), m.weight).transpose(0, 1),
    "without gradient": without_gradient,
    "one inside another": nested,
    "views inside": turned,
    "autocast": lost,
    "torch.func": of_each_row,
}


def data():
    return {"x": torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()}


def compared(name, autocast=False):
    """The error of the outputs and of all gradients, and the report."""
    found = []
    for ring in (True, False):
        torch._dynamo.reset()
        model = Model(STEPS[name])
        backend = dict(backend="ring", options={"inner_backend": "aot_eager"}) if ring else dict(backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(run(torch.compile(model, **backend), model, data()))
    return difference(*found), ringopt.reports()[-1]


@pytest.mark.parametrize(
    "name, p",
    [
        pytest.param("scan", 2, marks=OLD),
        ("torch.func", 3),
        *(
            pytest.param(name, 2 + i % 2, marks=[pytest.mark.zoo, *[OLD] * name.startswith("scan")])
            for i, name in enumerate(STEPS)
        ),
    ],
)
def test_on_ranks(ranks, name, p):
    for error, report in ranks(p, compared, name):
        assert error < 1e-4 and report.refusal is None
        assert report.sharded_fraction == 1.0
        shared_out = name.startswith("scan")  # for its step is affine
        whole = "runs whole on every rank: what the graphs of a higher-order operator"
        assert shared_out != any(whole in note for note in report.notes)
        assert shared_out == any("is one scan" in note for note in report.notes)
        assert {gather.op for gather in report.gathers} <= {"cond", "map_impl", "torch_func", "output"}


@pytest.mark.zoo
def test_autocast_around_the_program(ranks):
    for error, report in ranks(2, compared, "cond", True):
        assert error < 2e-2 and report.refusal is None


def looping():
    """Compiled and eager; torch itself compiles no gradient of a loop whose length is known only when it runs."""
    torch._dynamo.reset()
    model, x = Model(looped), data()["x"]
    with torch.no_grad():
        found = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})(x)
        return float((found - model(x)).abs().max()), ringopt.reports()[-1]


def test_a_loop_on_ranks(ranks):
    for error, report in ranks(2, looping):
        assert error < 1e-5 and report.refusal is None and report.sharded_fraction == 1.0


def dropped(apart=0, **backend):
    """What the ranks return where a graph draws random numbers, by generators that are seeded alike or not."""
    torch._dynamo.reset()
    model = Model(lambda m, x: torch.cond(x.sum() > -1e9, lambda y: F.dropout(y, 0.5), lambda y: y.cos(), (x,)))
    compiled = torch.compile(model, **(backend or dict(backend="ring", options={"inner_backend": "aot_eager"})))
    torch.manual_seed(3 + apart * (dist.is_initialized() and dist.get_rank()))
    try:
        return compiled(**data()).detach()
    except RingMismatchError as error:
        return str(error)


@pytest.mark.zoo
def test_random_numbers_are_those_of_one_process(ranks):
    expected = dropped(backend="aot_eager")
    for found in ranks(2, dropped):
        torch.testing.assert_close(found, expected)


@pytest.mark.zoo
def test_generators_that_differ_are_an_error(ranks):
    for error in ranks(2, dropped, 1):
        assert "the random number generator" in error


def test_the_diff():
    model, x = Model(chosen), data()["x"].detach()
    before, _ = after(UNDERSTAND, model, x)
    now, _ = after(LINE, Model(chosen), x, ranks=2)
    lines = changes(short(before.graph), short(now.graph)).splitlines()
    assert_expected_inline(
        "\n".join(lines[next(i for i, line in enumerate(lines) if "%flatten" in line) :]),
        """\
- %flatten = flatten(%transpose_3, 2)
+ %flatten = reshape(%transpose_3, [2, -1, 16])
- %sum_1 = sum(%flatten)
+ %sum_1_sum = sum(%flatten, [0, 1, 2], False, dtype=float32)
+ %sum_1_reduce_from_group = reduce_from_group(%sum_1_sum)
+ %sum_1 = to(%sum_1_reduce_from_group, float32)
  %gt = gt(%sum_1, 0)
+ %flatten_whole = gather(%flatten, 1, 1, 11, 1, 'zigzag')
- %cond = cond([%gt, %flatten, %weight])
+ %cond = cond([%gt, %flatten_whole, %weight])
- %getitem_3 = getitem(%cond, 0)
+ %getitem_6 = getitem(%cond, 0)
+ %getitem_3_rows = scatter(%getitem_6, 1, 1, 11, 1, 5, 'zigzag')
+ %out_weight_copied = getitem(%bucket, 0)
+ %out_bias_copied = getitem(%bucket, 1)
- %linear_1 = linear(%getitem_3, %out_weight, %out_bias)
+ %linear_1 = linear(%getitem_3_rows, %out_weight_copied, %out_bias_copied)
- %add = add(%x, %linear_1)
+ %add = add(%x_rows, %linear_1)
+ %add_whole = gather(%add, 1, 1, 11, 1, 'zigzag')
- return [%add]
+ return [%add_whole]""",
    )


@pytest.mark.parametrize(
    "step, sentence",
    [
        (lambda m, x: torch.func.jvp(torch.sin, (x,), (x.cos(),))[1], "transform that .* is not sharded"),
        (
            lambda m, x: sum(torch.vmap(lambda row: (row, torch.rand_like(row)), randomness="different")(x)),
            r"\(number 0 of 2\) lies in the memory of what it is given; return a clone",
        ),
    ],
    ids=["forward mode", "a view and random numbers"],
)
def test_which_transforms_are_not_one_node(step, sentence):
    assert re.search(sentence, ringopt.explain(Model(step), data()["x"], world_size=2).refusal)


def a_call(*operands, example=None):
    """A node of Dynamo's that calls a higher-order operator, and the values of its operands."""
    graph = fx.Graph()
    nodes = [graph.create_node("get_attr", f"x{i}") for i in range(len(operands))]
    for node, operand in zip(nodes, operands, strict=True):
        node.meta["example_value"] = operand
    node = graph.call_function(torch.ops.higher_order.cond, tuple(nodes))
    node.meta["example_value"] = example
    return node


GRAPH, NUMBERS = fx.symbolic_trace(lambda x: x.sin()), torch.ones(3)


@pytest.mark.parametrize(
    "operands, made, sentence",
    [
        ((NUMBERS,), NUMBERS, "given no graph to run, .*; call it outside of what is compiled"),
        ((GRAPH, {1}), NUMBERS, "given set, and not only tensors, .*; hand it the tensors themselves"),
        ((GRAPH, NUMBERS), (NUMBERS + 1, 2), "returns int, and not only tensors; return tensors"),
        ((GRAPH, NUMBERS), (), "returns nothing, and not only tensors"),
    ],
)
def test_a_refusal_says_what_was_found_and_what_to_do(operands, made, sentence):
    assert re.search(sentence, reason_against(a_call(*operands, example=made), example))


def test_what_can_be_one_node():
    assert reason_against(a_call(GRAPH, NUMBERS, 2, example=(NUMBERS + 1,)), example) is None


def test_other_graphs_are_another_program():
    other = {"sin": lambda y: y.sin(), "cos": lambda y: y.cos()}
    texts = set()
    for inside in other.values():
        step = lambda m, x, inside=inside: torch.cond(x.sum() > 0, inside, lambda y: y * 1, (x,))  # noqa: E731
        texts.update(after(UNDERSTAND, Model(step), data()["x"])[1].program.text for _ in range(2))
    assert len(texts) == 2


def test_rows_of_a_result_are_those_of_the_dim_that_is_as_long():
    """Not of that where the operand has them."""

    def turning(m, x):
        return torch.cond(x.sum() > 0, lambda y: y.sin().mT.clone(), lambda y: y.cos().mT.clone(), (x,)).mT

    report = ringopt.explain(Model(turning), data()["x"], world_size=2)
    assert report.refusal is None and report.sharded_fraction == 1.0


@OLD
def test_a_checkpoint_around_one():
    """It is computed again as torch would."""
    again = lambda m, x: torch.utils.checkpoint.checkpoint(recurrence, m, x, use_reentrant=False)  # noqa: E731
    report = ringopt.explain(Model(again), data()["x"], world_size=2)
    assert report.refusal is None and report.sharded_fraction == 1.0
    assert any(note.startswith("1 checkpointed region: computed again") for note in report.notes)
