"""The captured graph is the program, bit for bit; what would lose a gradient is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ringopt.frontend.capture import capture
from ringopt.frontend.explicit_autocast import explicit_casts
from ringopt.ir.nodes import op_name, readable_name, value_of
from ringopt.ir.refusal import GraphRefused
from ringopt.torch_compat.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from tests.harness.capturing import after, assert_same
from tests.harness.models import MODELS, build
from tests.harness.translation import captured


def is_operator(node):
    return isinstance(node.target, torch._ops.OpOverload)


SAMPLE = ("llama_padded", "vit", "t5", "encoder_causal")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.zoo]) for name in MODELS if name != "gpt2"],
)
def test_models_bit_for_bit(name):
    model, inputs = build(name, 13)
    gm, given = captured(model, **inputs)
    flat = capture(gm, given).graph
    strange = {node.target for node in flat.graph.nodes if node.op == "call_function" and not is_operator(node)}
    assert {getattr(target, "__name__", target) for target in strange} <= {"getitem", "_set_grad_enabled"}
    assert "scaled_dot_product_attention" in map(op_name, flat.graph.nodes)
    assert_same(flat, gm, given)


@pytest.mark.parametrize(
    "function", [lambda x: x * x.max().item(), lambda x: x.nonzero().sum()], ids=["number", "size"]
)
def test_what_is_known_only_when_the_program_runs_is_refused(function):
    open_ended = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with open_ended:
        gm, inputs = captured(function, torch.randn(3))
    with pytest.raises(GraphRefused, match="is known only when the program runs"):
        capture(gm, inputs)


class Regions(torch.nn.Module):
    def forward(self, x):
        with torch.no_grad():
            mean = x.mean(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            products = x @ x.T
        return x * mean + products.float().sum()


def test_regions_of_an_exported_program_are_written_out():
    x = torch.randn(3, 4, requires_grad=True)
    gm, inputs = captured(torch.export.export(Regions(), (x,)).module(), x)
    assert {"wrap_with_set_grad_enabled", "wrap_with_autocast"} <= set(map(op_name, gm.graph.nodes))
    flat = capture(gm, inputs).graph
    assert not [node for node in flat.graph.nodes if "wrap" in op_name(node)]
    assert_same(flat, Regions(), inputs)


def test_sizes_that_come_up_in_a_region_are_bound():
    """Left open, they are an error in whatever is compiled next of the same program (HSTU)."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def picked(x):
        return x[x > 0].sum()

    shape_env = ShapeEnv()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        flat = capture(*captured(picked, torch.randn(3, 4)), shape_env).graph
    explicit_casts(flat)
    assert shape_env.pending_fresh_unbacked_symbols == []
    (index,) = (node for node in flat.graph.nodes if op_name(node) == "index")
    assert set(index.meta["unbacked_bindings"]) == free_unbacked_symbols(value_of(index))


def test_what_runs_only_under_autocast_logs_no_error(caplog):
    """That it does not run outside is how the casts are found, and nothing for users to read."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def product(x):
        return x.softmax(-1) @ (x @ x)  # one is of float32, the other of bfloat16

    flat = capture(*captured(product, torch.randn(2, 4, 4))).graph
    explicit_casts(flat)
    (last,) = flat.graph.output_node().args[0]
    assert [op_name(x) for x in last.args] == ["to", "matmul"] and value_of(last).dtype == torch.bfloat16
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@torch.autocast("cpu", dtype=torch.bfloat16)
def rows_of(x):
    return x.shape[0] if x is not None else torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("made", [False, True])
def test_a_region_between_two_breaks_of_which_no_tensor_comes(made):
    """Wan's rotary embedding: its graph has no inputs. So has that of what a region makes of constants."""

    def program(x):
        y = x.sin()
        torch._dynamo.graph_break()
        n = rows_of(None if made else y)
        torch._dynamo.graph_break()
        return y * n

    torch._dynamo.reset()
    x = torch.randn(2, 2)
    torch.testing.assert_close(torch.compile(program, backend="ring")(x), program(x))


def test_sizes_become_numbers():
    gm, inputs = captured(lambda x: F.softmax(x.view(x.shape[0], -1), -1), torch.randn(3, 4, 5))
    assert [node.args[1] for node in capture(gm, inputs).graph.graph.nodes if op_name(node) == "view"] == [[3, -1]]


@pytest.mark.parametrize(
    "dynamo, said",
    [
        ("l_self_modules_linear_parameters_weight_", "linear_weight"),
        ("l_inputs_input_ids_", "inputs_input_ids"),
        ("l_x_", "x"),
    ],
)
def test_inputs_have_readable_names(dynamo, said):
    assert readable_name(dynamo) == said


NUMBERS = {
    "whole": lambda n: torch.div(n, 8, rounding_mode="trunc") - 1,
    "a quotient": lambda n: torch.div(n, 8),
    "beside a fraction": lambda n: torch.mul(n, 0.3) + torch.add(0.5, n, alpha=2),
    "of two fractions": lambda n: torch.sub(n / 3, 0.25),
    "floored": lambda n: torch.floor_divide(n, 5) + torch.add(True, n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_functions_of_torch_that_are_given_numbers(name):
    """`torch.div(length, 8)`, as Longformer counts its chunks, is a tensor in Python; no operator takes two numbers."""

    def function(x):
        n = NUMBERS[name](x.shape[1])
        return x * n, n

    x = torch.rand(2, 21)
    gm, _ = after([], function, x)
    found, expected = gm(*gm.meta["inputs"]), function(x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
