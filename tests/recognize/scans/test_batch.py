"""What a step computes of its own row alone is computed for all rows at once: the same numbers, whatever dims it asks
for, and of numbers that have none."""

from __future__ import annotations

import string

import pytest
import torch

from ringopt.ir.nodes import shape_of
from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from ringopt.recognize.scans.batch import NoRule, OverSteps, einsum, part
from ringopt.scans.call import is_scan
from tests.harness.capturing import after, ops, results

# A row of a step -> what is added to its state.
NUMBERS = {
    "flip": lambda r: r.cos().flip(0),  # which torch.vmap takes of no number
    "softmax": lambda r: r.sin().softmax(-1),
    "cumsum": lambda r: r.sin().cumsum(0),
    "sum of no dims": lambda r: torch.sum(r.sin(), []) * r,
    "in a new dim": lambda r: r.sin()[None].expand(3).sum(0),
    "wider than the state": lambda r: (r.sin().double() * torch.ones(1, dtype=torch.float32))[0].to(r.dtype),
}
VECTORS = {
    "sum of all dims": lambda r: torch.sum(r.sin(), []) * r,
    "maximum of all dims": lambda r: torch.amax(r.sin(), ()) * r,
    "sums": lambda r: r.sin().sum(0, keepdim=True) + r.cos().mean(-1, keepdim=True) + r.cumsum(1),
    "softmax": lambda r: r.softmax(0) * r.sin().softmax(-1),
    "moved": lambda r: r.sin().t().unsqueeze(1).transpose(0, -1).squeeze(1) + r.flip(0, -1),
    "joined": lambda r: torch.cat([r.sin(), r.cos()], 1)[:, 1:5] + torch.stack([r, r], -1).sum(-1),
    "products": lambda r: r.sin() @ r.cos().mT @ r,
    "einsum": lambda r: torch.einsum("ij,kj->ik", r.sin(), r) @ r,
    "padded": lambda r: torch.nn.functional.pad(r.sin(), (1, 0))[:, :-1],
    "argmax": lambda r: r * r.sin().argmax(-1, keepdim=True),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, sizes", [*((name, ()) for name in NUMBERS), *((name, (4, 4)) for name in VECTORS)])
def test_of_all_steps_as_of_each(name, sizes):
    add = (VECTORS if sizes else NUMBERS)[name]

    def program(x):
        state, states = torch.zeros(sizes, dtype=x.dtype), []
        for row in x.unbind(0):
            state = state * 0.9 + add(row)
            states.append(state)
        return torch.stack(states)

    x = torch.randn(7, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    original, _ = after([Normalize()], program, x)
    gm, _ = after([Normalize(), FindScan()], program, x)
    assert ops(gm).count("scan") == 1
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, original.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("equation", "stacked", "written"),
    [
        ("ij, jk -> ik", (True, False), "Aij,jk->Aik"),
        ("ij,jk->ik", (False, True), "ij,Ajk->Aik"),
        ("ij,jk->ik", (True, True), "Aij,Ajk->Aik"),
        ("Aj,jB->AB", (True, True), "CAj,CjB->CAB"),  # a letter that is free
    ],
)
def test_an_equation_has_a_letter_more_for_the_steps(equation, stacked, written):
    graph = torch.fx.Graph()
    operands = list(map(graph.placeholder, ("left", "right")))
    node = graph.call_function(torch.ops.aten.einsum.default, (equation, operands))
    batch = OverSteps(torch.fx.Graph(), 7)
    batch.stacked = {x for x, has_steps in zip(operands, stacked, strict=True) if has_steps}
    assert einsum(node, batch) == (node.target, [written, operands], {})


@pytest.mark.parametrize("equation", ["...j,jk->...k", "ij,jk", f"{string.ascii_uppercase},A->A"])
def test_an_equation_without_a_place_for_the_steps_is_left_to_the_step(equation):
    graph = torch.fx.Graph()
    operands = list(map(graph.placeholder, ("left", "right")))
    with pytest.raises(NoRule):
        einsum(graph.call_function(torch.ops.aten.einsum.default, (equation, operands)), OverSteps(graph, 7))


def test_a_slice_without_a_dim_is_along_the_first_of_a_step():
    graph = torch.fx.Graph()
    row = graph.placeholder("row")
    node = graph.call_function(torch.ops.aten.slice.Tensor, (row,), {"start": 1})
    batch = OverSteps(torch.fx.Graph(), 7)
    batch.stacked = {row}
    assert part(node, batch) == (node.target, [row, 1], {"start": 1})


def test_dtypes_of_numbers_and_of_rows_are_promoted_as_in_a_step():
    """A number does not widen a vector; as one of a column it would."""

    def program(g, x):
        state, states = torch.zeros(4), []
        for t in range(7):
            state = state * 0.9 + g[t].sin() * x[t].cos()
            states.append(state)
        return torch.stack(states)

    given = torch.randn(7, dtype=torch.float64), torch.randn(7, 4)
    gm, _ = after([Normalize(), FindScan()], program, *given)
    (found,) = results(gm, gm.meta["inputs"])[:1]
    assert ops(gm).count("scan") == 1 and found.dtype == torch.float32
    torch.testing.assert_close(found, program(*given))


def looped(add):
    def program(x, w):
        state, states = torch.zeros_like(x[0]), []
        for row in x.unbind(0):
            state = state * 0.9 + add(row, w)
            states.append(state)
        return torch.stack(states)

    return program


def test_a_product_of_vectors_is_left_to_the_step_where_there_are_as_many_steps_as_numbers():
    """For all steps at once it would be a product of a vector and a matrix, which sums over the steps."""
    program, given = looped(lambda row, w: (w @ row.sin()) * row), (torch.randn(6, 6), torch.randn(6))
    gm, _ = after([Normalize(), FindScan()], program, *given)
    assert ops(gm).count("scan") == 1
    torch.testing.assert_close(gm(*given)[0], program(*given))


def test_equations_are_solved_for_all_steps_at_once():
    program = looped(lambda row, w: torch.linalg.solve_triangular(w + row.tanh(), row, upper=True))
    given = torch.randn(5, 3, 3), 4 * torch.eye(3)
    gm, _ = after([Normalize(), FindScan()], program, *given)
    assert ops(gm).count("scan") == ops(gm).count("linalg_solve_triangular") == 1
    torch.testing.assert_close(gm(*given)[0], program(*given))


def test_what_only_makes_a_row_larger_stays_in_the_step():
    """A row a step is read, and not as many as the state has."""
    program = looped(lambda row, w: row.sin().sum(0, keepdim=True).expand_as(w))
    given = torch.randn(5, 64, 4), torch.randn(64, 4)
    gm, _ = after([Normalize(), FindScan()], program, *given)
    (scan,) = (node for node in gm.graph.nodes if is_scan(node))
    assert [tuple(shape_of(x)) for x in scan.args[1]] == [(5, 1, 4)]
