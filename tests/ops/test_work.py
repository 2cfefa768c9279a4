"""FLOPs of what stays on one device: two a multiplication, of the pairs that are seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from ringopt.ir.nodes import op_name
from ringopt.ops import operators
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traits import flops_of

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
