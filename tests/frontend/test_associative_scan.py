"""torch's associative_scan is one scan under backend="ring", and what it was under any other."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

import ringopt
import ringopt.backend
from ringopt.frontend.higher_order.associative_scan import teach_associative_scan
from ringopt.ops import operators
from tests.harness.errors import worst_of
from tests.harness.translation import validate

ROWS, WIDTH = 13, 4


def affine(a: Tensor, b: Tensor) -> Tensor:
    """As Mamba's layers call it."""

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (a.sigmoid(), b), dim=1, combine_mode="generic")[1] * b


def from_the_end(a: Tensor, b: Tensor) -> Tensor:
    """In a dict, from the last row to the first."""

    def combine(left: Any, right: Any) -> Any:
        return {"gate": left["gate"] * right["gate"], "sum": right["gate"] * left["sum"] + right["sum"]}

    given = {"gate": a.sigmoid(), "sum": b}
    return associative_scan(combine, given, dim=-2, reverse=True, combine_mode="generic")["sum"] * b


def not_affine(a: Tensor, b: Tensor) -> Tensor:
    return associative_scan(torch.logaddexp, a, dim=1, combine_mode="generic") * b


def branching(a: Tensor, b: Tensor) -> Tensor:
    """torch's scan, of a step with a graph inside, behind an attention."""
    a = F.scaled_dot_product_attention(a, a, a, is_causal=True)

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cond(row.sum() > 0, lambda s, r: s * 0.5 + r, lambda s, r: s * 0.25 - r, (state, row))
        return state, state.clone()

    rows: Tensor = scan(step, torch.zeros_like(a[:, 0]), a.movedim(1, 0))[1]
    return rows.movedim(0, 1) * b


def by_batch(a: Tensor, b: Tensor) -> Tensor:
    return divided(a, b, 0)


def by_length(a: Tensor, b: Tensor) -> Tensor:
    return divided(a, b, 1)


def divided(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """torch's scan, of a step that divides by a size, and has a view of such sizes."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = state * 0.5 + (row / b.shape[dim]).flatten().view(row.shape)
        return state, state.clone()

    rows: Tensor = scan(step, torch.zeros_like(a[:, 0]), a.movedim(1, 0))[1]
    return rows.movedim(0, 1) * b


def over_chunks(a: Tensor, b: Tensor) -> Tensor:
    """torch's scan over chunks of four rows, whose number torch works out."""

    def step(state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return state * 0.5 + rows.sum(1), rows + state[:, None]

    chunks: Tensor = scan(step, torch.zeros_like(a[:, 0]), a.unflatten(1, (-1, 4)).movedim(1, 0))[1]
    return chunks.movedim(0, 1).flatten(1, 2) * b


def branching_by_length(a: Tensor, b: Tensor) -> Tensor:
    """Of the first rows, by a size that none of them has."""

    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cond(row.sum() > 0, lambda s, r: s * 0.5 + r, lambda s, r: s * 0.25 - r, (state, row))
        return state / b.shape[1], state.clone()

    return scan(step, torch.zeros_like(a[:, 0]), a[:, :5].movedim(1, 0))[0][:, None] * b


class Called(torch.nn.Module):
    def __init__(self, program: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program, self.layer = program, torch.nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(x).chunk(2, -1)
        found: Tensor = self.program(a, b)
        return found


def given() -> Tensor:
    return torch.randn(2, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("p, layout", [(1, "contiguous"), (2, "zigzag"), (3, "contiguous")])
@pytest.mark.parametrize("program", [affine, from_the_end])
def test_it_is_a_scan_on_shards(program: Any, p: int, layout: str) -> None:
    verdict = validate(p, Called(program), given(), layout=layout)
    assert verdict.wrong == "" and verdict.report.refusal is None
    assert f"a recurrence of {ROWS - 1} steps is one scan" in verdict.report.notes[0]
    if p > 1:
        assert [site.strategy for site in verdict.report.sites] == ["states"]
        assert verdict.report.sharded_fraction == 1.0


@pytest.mark.parametrize(("p", "strategy"), [(2, "heads"), (5, "in turn")])
def test_what_is_not_affine_is_shared_by_heads_or_rank_by_rank_beside_the_rest(p: int, strategy: str) -> None:
    verdict = validate(p, Called(not_affine), given())
    assert verdict.wrong == "" and verdict.report.refusal is None
    (site,) = verdict.report.sites
    assert site.strategy == strategy and "logaddexp of what a step carries" in str(site.notes)
    made = {"heads": operators.scan.default, "in turn": operators.sharded_scan.default}
    assert made[strategy] in {node.target for node in verdict.graph.graph.nodes}


@pytest.mark.zoo
@pytest.mark.parametrize("program", [affine, from_the_end])
def test_one_graph_serves_any_number_of_steps(ranks: Any, program: Any) -> None:
    """Behind the first length, that of the ranks themselves among them."""
    for error, reports in ranks(2, over_sizes, program, [(2, rows) for rows in (ROWS, 9, 20, 3)]):
        assert error < 1e-12
        assert [report.sites[0].strategy for report in reports] == ["states", "states"]
        assert any("a recurrence of any number of steps is one scan" in note for note in reports[1].notes)


def test_one_graph_serves_any_batch(ranks: Any) -> None:
    """Dynamo gives a step the sizes that are open, as numbers."""
    for error, reports in ranks(2, over_sizes, affine, [(2, ROWS), (3, ROWS), (5, ROWS), (4, 9), (6, 11)]):
        assert error < 1e-12 and len(reports) == 3
        assert [[site.strategy for site in report.sites] for report in reports] == [["states"]] * 3
        assert not any("fixed at" in note or "these sizes only" in note for report in reports for note in report.notes)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")
def test_one_graph_serves_any_number_of_chunks(ranks: Any) -> None:
    for error, reports in ranks(2, over_sizes, over_chunks, [(2, 24), (2, 16), (2, 40), (2, 56)]):
        assert error < 1e-12 and len(reports) == 2
        assert [[site.strategy for site in report.sites] for report in reports] == [["states"]] * 2


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")
@pytest.mark.parametrize("program", [by_batch, by_length])
def test_a_step_that_reads_a_size_is_of_the_one_at_hand(ranks: Any, program: Any) -> None:
    for error, reports in ranks(2, over_sizes, program, [(2, ROWS), (3, ROWS), (5, 9)]):
        assert error < 1e-12 and [[site.strategy for site in report.sites] for report in reports] == [["states"]] * 3
        assert not any("failed" in note for report in reports for note in report.notes)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")
def test_a_scan_that_stays_whole_is_of_the_length_at_hand(ranks: Any) -> None:
    """Its graphs were made for that."""
    for error, reports in ranks(2, over_sizes, branching, [(2, ROWS), (2, 9), (3, 20)]):
        assert error < 1e-12 and len(reports) == 3
        assert any("a recurrence is no scan" in note for note in reports[-1].notes)
        assert any("fixed at 20 by lower" in note for note in reports[-1].notes)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's own scan has other gradients")
def test_and_of_the_numbers_at_hand(ranks: Any) -> None:
    for error, _reports in ranks(2, over_sizes, branching_by_length, [(2, ROWS), (2, 9), (2, 20), (2, 30)]):
        assert error < 1e-12


def over_sizes(program: Any, sizes: list[tuple[int, int]]) -> tuple[float, list[ringopt.Report]]:
    """On a rank: the error of outputs and gradients, and the reports of what was compiled."""
    torch._dynamo.reset()
    model, error, before = Called(program), 0.0, len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for batch, rows in sizes:
        x = torch.randn(batch, rows, WIDTH, dtype=torch.float64, requires_grad=True)
        found, expected = (
            [y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])] for y in (compiled(x), model(x))
        )
        error = worst_of(error, *(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)))
    return error, ringopt.reports()[before:]


def test_other_backends_have_what_they_had() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    model, x = Called(affine), given()
    torch._dynamo.reset()
    found = torch.compile(model, backend=other)(x)
    names = {getattr(node.target, "__name__", str(node.target)) for node in graphs[0].graph.nodes}
    assert "_vmap_increment_nesting" in names and "scan" not in names
    torch.testing.assert_close(torch.compile(model, backend="ring", options={"inner_backend": "eager"})(x), found)
    torch.testing.assert_close(torch.compile(model, backend=other)(x), found)
    assert len(graphs) == 1  # that one is still there


@pytest.mark.zoo
def test_a_program_that_is_left_as_it_is_has_what_it_had() -> None:
    """What no pass can read refuses the graph; it is compiled as under any other backend, Inductor too."""

    def refused(a: Tensor, b: Tensor) -> Tensor:
        return affine(a, b) + b[:, 1:].as_strided([1], [1])

    model, x = Called(refused), given()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "eager"})
    with patch.object(ringopt.backend, "inner", lambda gm, *_given, **_options: seen.append(gm) or gm):
        seen: list[torch.fx.GraphModule] = []
        torch.testing.assert_close(compiled(x), model(x))
    assert "as_strided" in str(ringopt.reports()[-1].refusal)
    assert "scan" not in {getattr(node.target, "__name__", "") for node in seen[-1].graph.nodes}


def test_what_torch_says_of_bad_arguments_is_said() -> None:
    def scalar(x: Tensor) -> Any:
        return associative_scan(torch.add, x, dim=5, combine_mode="generic")

    torch._dynamo.reset()
    with pytest.raises(Exception, match="Dimension out of range"):
        torch.compile(scalar, backend="ring", options={"inner_backend": "eager"})(torch.ones(3))


def test_what_dynamo_does_not_take_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with patch("torch.compiler.substitute_in_graph", side_effect=ValueError("another library has it")):
        teach_associative_scan()
    assert "no recurrence is found in it: another library has it" in caplog.text


def partly_seen(x: Tensor) -> Tensor:
    """torch's scan, of whose step a part has no gradient."""

    def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scale = row.mean() + h.mean()
        h = h * 0.5 + row * scale
        return h.clone(), h.clone()

    rows: Tensor = scan(step, torch.zeros_like(x[0]), x)[1]
    return rows


def one_by_one(x: Tensor) -> Tensor:
    h, rows = torch.zeros_like(x[0]), []
    for row in x:
        h = h * 0.5 + row * (row.mean() + h.mean()).detach()
        rows.append(h)
    return torch.stack(rows)


def test_a_part_of_a_step_without_gradient_has_none() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(partly_seen, backend="ring", options={"inner_backend": "aot_eager"})
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    found, expected = ((y := run(x), *torch.autograd.grad(y.square().sum(), x)) for run in (compiled, one_by_one))
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(found, expected, strict=True))
