"""`ringopt.diff(..., inputs=...)`: both programs run on the same inputs, and the values of matched nodes."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.export import ExportedProgram, export

import ringopt
from ringopt.compare import node_errors
from ringopt.compare.node_values import error_of
from ringopt.errors import ProgramError
from ringopt.tools.example import tiny


class Deep(nn.Module):
    """Layers of a product and an activation, of which one may be another."""

    def __init__(self, other: int = -1, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) * (1.01 if number == self.other else 1.0)
        return x


def program(module: nn.Module, *inputs: Tensor) -> ExportedProgram:
    return export(module, inputs or (torch.zeros(2, 4),))


def test_the_first_node_that_is_off_has_its_place() -> None:
    diff = ringopt.diff(program(Deep()), program(Deep(other=1)), inputs="random:3")
    first = diff.first_bad
    assert first is not None and first.error is not None
    assert (first.node.name, first.kind) == ("mul_1", "changed")
    assert "x = layer(x)" in first.node.source
    assert first.error.relative == pytest.approx(0.01 / 1.0, rel=1e-5)
    assert [c.node.name for c in diff.compared if c.error and c.error.bad] == ["mul_1", "linear_2", "mul_2"]
    assert not diff.same
    data = json.loads(json.dumps(diff.to_dict(), allow_nan=False))
    assert (data["first_bad"], data["compared"]) == ("mul_1", len(diff.compared))


@pytest.mark.parametrize("how", ["tuple", "dict", "file", "random"])
def test_inputs_are_given_in_four_ways(how: str, tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    torch.save({"x": x}, tmp_path / "x.pt")
    given: Any = {"tuple": (x,), "dict": {"x": x}, "file": tmp_path / "x.pt", "random": "random"}[how]
    diff = ringopt.diff(program(Deep()), program(Deep()), inputs=given)
    assert diff.same and diff.first_bad is None and len(diff.compared) == 6 + 1 + 6


class Naughty:
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return print, ("code of a stranger ran",)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((), "0 inputs were given; the program asks for 1: x"),
        ({"y": torch.zeros(2, 4)}, "inputs y were given; the program asks for x"),
        ((torch.zeros(3, 4),), r"input x is \[3, 4\]; the program takes a tensor \[2, 4\]"),
        ("absent.pt", "absent.pt does not exist; expected a file of torch.save, or random"),
        (3, "inputs are a tuple or a dict of tensors, or random.*; found int"),
    ],
)
def test_wrong_inputs_are_told(given: Any, sentence: str) -> None:
    with pytest.raises(ProgramError, match=sentence):
        ringopt.diff(program(Deep()), program(Deep()), inputs=given)


def test_a_file_with_code_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save((Naughty(),), tmp_path / "x.pt")
    with pytest.raises(ProgramError, match=r"x.pt cannot be read as tensors"):
        ringopt.diff(program(Deep()), program(Deep()), inputs=tmp_path / "x.pt")
    assert "stranger" not in capsys.readouterr().out


def test_what_a_node_raises_is_told_with_its_name() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x)

    failing = program(Refusing(), torch.eye(3))
    with pytest.raises(ProgramError, match=r"after does not run on these inputs: %linalg_cholesky: .*Error"):
        ringopt.diff(failing, failing, inputs=(-torch.eye(3),))


def test_weights_without_numbers_are_refused() -> None:
    with torch.device("meta"):
        hollow = program(Deep(), torch.zeros(2, 4, device="meta"))
    with pytest.raises(ProgramError, match=r"layers\.0\.weight has no numbers"):
        ringopt.diff(hollow, hollow, inputs="random")


def test_graphs_of_others_are_run_without_an_export() -> None:
    """A plain trace, with modules, methods and functions of torch and no shapes noted."""
    sides = [fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), activation)) for activation in (nn.ReLU(), nn.SiLU())]
    sides[1].load_state_dict(sides[0].state_dict())
    diff = ringopt.diff(*sides, inputs=(torch.randn(2, 4),))
    assert diff.first_bad is not None and diff.first_bad.node.name == "_1"
    assert diff.before.flops is None
    with pytest.raises(ProgramError, match="input input_1 has no fixed shape in the program"):
        ringopt.diff(*sides, inputs="random")


def test_draws_are_the_same_on_both_sides() -> None:
    """Each side draws as if it ran alone; and the caller's generator stays where it was."""

    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(nn.functional.dropout(x, 0.5) + torch.rand_like(x), 0.5)

    both = program(Dropping(), torch.ones(4, 4))
    state = torch.get_rng_state()
    assert ringopt.diff(both, both, inputs="random").same
    assert torch.equal(state, torch.get_rng_state())


def test_a_value_that_is_written_later_is_compared_as_it_was() -> None:
    class Writing(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            self.late = late
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            if self.late:
                z = x.cos()
                y.add_(1)
            else:
                y.add_(1)
                z = x.cos()
            self.calls += 1
            return y * z

    sides = [program(Writing(late), torch.ones(2, 4)) for late in (True, False)]
    x = torch.randn(2, 4)
    diff = ringopt.diff(*sides, inputs=(x,))
    assert diff.first_bad is None
    assert float(sides[0].state_dict["calls"]) == 0  # nor is the program itself written to
    assert ringopt.diff(*sides, inputs=(x,)).first_bad is None


def test_integers_of_example_inputs_bound_those_that_are_made() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)

        def forward(self, ids: Tensor, there: Tensor) -> Tensor:
            return torch.where(there[..., None], self.table(ids), 0.0)

    both = program(Embedding(), torch.tensor([[3, 5, 6]]), torch.ones(1, 3, dtype=torch.bool))
    for seed in range(8):
        assert ringopt.diff(both, both, inputs=f"random:{seed}").same


@pytest.mark.zoo
def test_little_more_is_held_than_one_program_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 layers, whose values would all be there at the end."""
    seen = []

    def noted(found: Any, expected: Any) -> Any:
        large = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype == torch.float64 and x.numel() == 999]
        seen.append(len(large))
        return error_of(found, expected)

    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(60):
                x = x.sin() + 1
            return x

    both = program(Long(), torch.zeros(999, dtype=torch.float64))
    monkeypatch.setattr(node_errors, "error_of", noted)
    assert ringopt.diff(both, both, inputs="random").same
    assert len(seen) == 121 and max(seen) <= 10


# ---- how far apart ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("found", "expected", "wanted"),
    [
        ([1.0, 2.0], [1.0, 4.0], (2.0, 0.5)),
        ([1.0, math.nan], [1.0, math.nan], (0.0, 0.0)),
        ([1.0, math.nan], [1.0, 2.0], (math.inf, math.inf)),
        ([1.0, math.inf], [1.0, -math.inf], (math.inf, math.inf)),
        ([1.0, 0.0], [0.0, 0.0], (1.0, math.inf)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_an_error_is_absolute_and_relative(
    found: list[float], expected: list[float], wanted: tuple[float, ...]
) -> None:
    error = error_of(torch.tensor(found), torch.tensor(expected))
    assert error is not None and (error.largest, error.relative) == wanted
    assert error.bad == (wanted[1] > 1e-4)


def test_the_coarser_dtype_says_what_is_allowed() -> None:
    x = torch.randn(64)
    rounded = error_of(x.bfloat16(), x)
    assert rounded is not None and 1e-4 < rounded.relative < rounded.allowed == 5e-2 and not rounded.bad
    counts = error_of(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert counts is not None and counts.bad
    assert error_of(torch.zeros(2), torch.zeros(3)) is None
    pair = error_of((x, x), [x, 2 * x])
    assert pair is not None and pair.relative == pytest.approx(0.5)


# ---- numbers of others -----------------------------------------------------------------------------------------------
def test_numbers_of_others_are_laid_over_nodes() -> None:
    one = program(Deep())
    [node] = [node for node in one.graph.nodes if node.name == "linear_1"]
    diff = ringopt.diff(one, program(Deep(other=1))).overlay("profiled, us", {node: 12.5, "mul_1": math.inf})
    assert diff.to_dict()["overlays"] == {"profiled, us": {"linear_1": 12.5, "mul_1": "inf"}}
    with pytest.raises(ProgramError, match="overlay 'x': no node absent on either side"):
        diff.overlay("x", {"absent": 1})


# ---- gradients -------------------------------------------------------------------------------------------------------
class Stopped(torch.autograd.Function):
    """The identity, with a gradient of half its size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def graph_of(relu: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("weight")
    product = graph.call_function(torch.matmul, (x, weight))
    active = graph.call_function(relu, (product,))
    graph.output(graph.call_function(torch.sum, (active,)))
    root = nn.Module()
    torch.manual_seed(0)
    root.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    return fx.GraphModule(root, graph)


def test_a_gradient_that_is_off_is_found_where_all_values_agree() -> None:
    """From the outputs: the last node whose gradient is that of its counterpart is right."""
    right, wrong = graph_of(torch.relu), graph_of(lambda x: Stopped.apply(torch.relu(x)))
    x = torch.randn(3, 4, dtype=torch.float64)
    diff = ringopt.diff(right, wrong, inputs=(x,))
    assert diff.first_bad is None and not diff.same
    off = {c.node.name for c in diff.changes if c.gradient and c.gradient.bad}
    first = diff.first_bad_gradient
    assert first is not None and first.gradient is not None and first.node.name == "matmul"
    assert off == {"x", "weight", "matmul"} and first.gradient.relative == pytest.approx(0.5)
    assert "gradients compared 3 differ, the first %matmul" in str(diff)
    assert not right.weight._backward_hooks and right.weight.grad is None
    assert ringopt.diff(right, wrong, inputs=(x,), gradients=False).first_bad_gradient is None


def test_a_converted_program_has_the_gradients_of_the_one_that_it_was() -> None:
    module, inputs = tiny()
    one = export(module, inputs)
    diff = ringopt.diff(one, ringopt.convert(one), inputs="random:1")
    compared = [c.gradient for c in diff.changes if c.gradient is not None]
    assert len(compared) > 50 and diff.first_bad is diff.first_bad_gradient is None and not diff.no_gradients


def test_why_there_are_no_gradients_is_said() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.detach() * 2

    class Whole(Halves):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 2

    x = torch.randn(2, 4)
    diff = ringopt.diff(program(Halves(), x), program(Whole(), x), inputs=(x,))
    assert diff.no_gradients == "the programs do not return gradients of the same outputs"
    assert diff.no_gradients in str(diff)
