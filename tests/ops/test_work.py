"""FLOPs: two a multiplication, of the pairs that are seen."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from ringopt.ir.nodes import op_name
from ringopt.ops import operators
from ringopt.ops.sized_call import Operand, SizedCall
from ringopt.ops.traits import TABLE, flops_of
from ringopt.ops.work import sdpa
from ringopt.scans.body import to_text
from tests.scans.bodies import Scan, drawn

B, H, QUERIES, KEYS, D, DV = 2, 3, 5, 7, 4, 6
SEEN = {"full": QUERIES * KEYS, "causal": sum(range(1, QUERIES + 1))}


@pytest.mark.parametrize("pattern", SEEN)
def test_attention_on_one_device(pattern):
    q, k, v = torch.randn(B, H, QUERIES, D), torch.randn(B, H, KEYS, D), torch.randn(B, H, KEYS, DV)
    programs = {
        "attention": lambda q, k, v: operators.attention(q, k, v, None, [], None, None, pattern, "", 0, 0.5),
        "scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=pattern == "causal"
        ),
    }
    for name, program in programs.items():
        gm = make_fx(program, tracing_mode="fake", pre_dispatch=True)(q, k, v)
        (node,) = (node for node in gm.graph.nodes if node.op == "call_function" and op_name(node) == name)
        assert flops_of(node, SizedCall.of(node, 1, 0)) == 2 * B * H * SEEN[pattern] * (D + DV)


@pytest.mark.parametrize(("rows", "keys"), [(0, 7), (5, 0)])
def test_attention_without_queries_or_keys_is_no_work(rows: int, keys: int) -> None:
    sizes = {"query": (2, rows, D), "key": (2, keys, D), "value": (2, keys, DV)}
    operands = {name: Operand(size, torch.float32) for name, size in sizes.items()}
    call = SizedCall("scaled_dot_product_attention", {**operands, "is_causal": False}, None, 1, 0)
    assert sdpa(call) == 0


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions(dims, transposed):
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    x, weight = torch.randn(B, 4, *[6] * dims), torch.randn(4, 2 if transposed else 4, *[3] * dims)
    arguments = {"stride": 2, "padding": 1, **({"output_padding": 1} if transposed else {})}
    gm = make_fx(lambda x, weight: getattr(F, name)(x, weight, **arguments), pre_dispatch=True)(x, weight)
    (node,) = (node for node in gm.graph.nodes if node.op == "call_function")
    node.meta["val"] = getattr(F, name)(x, weight, **arguments)
    with FlopCounterMode(display=False) as counter:
        gm(x, weight)
    assert op_name(node) == name and flops_of(node, SizedCall.of(node, 1, 0)) == counter.get_total_flops()


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid(2)"])
def test_all_ranks_together_compute_each_pair_once(strategy):
    """Ranks that trade rows for heads compute all pairs of few heads; of "hybrid(2)", those of the rows of a node."""
    ranks, length, shape = 4, 12, (B, 4, 3, D)
    arguments = {
        **dict.fromkeys("qkv", Operand(shape, torch.float32)), "q_length": length, "kv_length": length,
        "pattern": "causal", "q_layout": "contiguous", "kv_layout": "contiguous", "strategy": strategy, "mask": "",
    }  # fmt: skip
    calls = [SizedCall("ring_attention", arguments, None, ranks, rank) for rank in range(ranks)]
    found = [TABLE["ring_attention"].flops(call) for call in calls]
    assert sum(found) == 2 * B * 4 * sum(range(1, length + 1)) * 2 * D
    if strategy == "hybrid(2)":  # rows 0 to 5, and 6 to 11, which see more
        assert found == [2 * B * 2 * pairs * 2 * D for pairs in (21, 21, 57, 57)]


def test_tokens_that_masks_pick_are_shared_evenly():
    """Each of two experts works on half of the 12 tokens."""
    graph, aten = fx.Graph(), torch.ops.aten
    x, *masks = (graph.placeholder(name) for name in ("x", "first", "second"))
    weight, parts = graph.placeholder("weight"), []
    for mask in masks:
        rows = graph.call_function(operator.getitem, (graph.call_function(aten.where.default, (mask,)), 0))
        picked = graph.call_function(aten.index.Tensor, (x, [rows]))
        parts.append(graph.call_function(aten.mm.default, (picked, weight)))
    graph.output((graph.call_function(aten.cat.default, (parts,)),))
    body = to_text(fx.GraphModule({}, graph), 0, 4, 0)
    masked = [Operand((12,), torch.bool)] * 2
    operands = [Operand((12, D), torch.float32), *masked, Operand((D, DV), torch.float32)]
    call = SizedCall("picked", {"body": body, "operands": operands}, None, 1, 0)
    assert TABLE["picked"].flops(call) == 2 * (2 * 6 * D * DV)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_backward_over_ranks_runs_the_steps_again_and_walks_back_for_each_level(levels):
    """A walk back is two products for each of the forward. Of 6 steps, each multiplies a 2 x 3 state by a matrix; where
    there is a second state, the first is multiplied once more for it."""

    def step(s, *more):
        *second, x, w = more
        return s @ w + x, *(t + s @ w for t in second)

    scan = Scan(step, [drawn(2, 3)] * levels, [drawn(6, 2, 3)], [drawn(3, 3)])
    arguments = {"init": scan.init, "xs": scan.xs, "consts": scan.consts, "body": scan.text}
    call = SizedCall("sharded_scan_backward", arguments, None, 2, 0)
    assert TABLE["sharded_scan_backward"].flops(call) == (1 + 2 + 2 * levels) * 6 * levels * (2 * 2 * 3 * 3)
