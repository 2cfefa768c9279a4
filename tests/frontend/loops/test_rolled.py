"""Loops that are recurrences are traced as one node: one graph for any number of turns, of a size that does not depend
on it, with the numbers and gradients of the program."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import ringopt
import ringopt.backend
from ringopt.frontend.loops.rolled import joined, rolls_loops
from tests.frontend.loops import programs
from tests.harness.models import difference

ONE_NODE = ["chunks", "last_state", "grows_at_first", "in_a_checkpoint", "partly_seen", "appended", "steps", "by_rows"]
MORE = ["tokens", "twice", "some_rows", "Layer", "begins_later", "by_numbered_rows"]
TURN_BY_TURN = {
    "sums": "it only adds up",
    "through_an_alias": "it writes to memory that it may read",
    "through_a_list": "it writes to memory that it may read",
    "in_place": "mutat",
    "broadcasts": "a row that is written has another shape",
    "counted": "side effect",
    "last_row": "a list of its rows is read for more than torch.stack or torch.cat",
    "through_another_name": "it appends to a list that it may read",
    "in_a_deque": "it appends to what is no list, or one that others may hold",
    "written_since": "a list of its rows is read for more than torch.stack or torch.cat",
    "row_behind": "x_t",
    "number_behind": "the number of its last turn is read behind it",
    "another_since": "a tensor of which it reads or writes rows is another in each turn",
}


def inputs(n: int) -> list[Tensor]:
    torch.manual_seed(n)
    x, w = torch.randn(2, n, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64) * 0.3
    return [x.requires_grad_(), w.requires_grad_()]


def results(run: Any, n: int) -> list[Tensor]:
    """What it returns, and its gradients."""
    given = inputs(n)
    found = run(*given)
    return [found.detach(), *torch.autograd.grad(found.square().sum(), given)]


def compared(name: str, lengths: list[int], options: dict[str, Any]) -> tuple[float, list[Any], str]:
    """On a rank: the largest error, the reports, and what was said of loops."""
    torch._dynamo.reset()
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ringopt.frontend.loops.rolled")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    program = getattr(programs, name)
    program = program() if isinstance(program, type) else program
    before, compiled = len(ringopt.reports()), torch.compile(program, backend="ring", options=options)
    errors = [difference(results(compiled, n), results(program, n)) for n in lengths]
    log.removeHandler(handler)
    return max(errors), ringopt.reports()[before:], " ".join(said)


EAGER = {"inner_backend": "aot_eager"}


@pytest.mark.parametrize(
    "name, p",
    [
        *((name, 2) for name in ONE_NODE),
        *(pytest.param(name, 2, marks=pytest.mark.zoo) for name in MORE),
        *(pytest.param(name, p, marks=pytest.mark.zoo) for name in (*ONE_NODE, *MORE) for p in (3, 4)),
    ],
)
def test_one_graph_serves_any_number_of_turns(name: str, p: int, ranks: Any) -> None:
    for error, reports, said in ranks(p, compared, name, [64, 50, 77, 61], EAGER):
        assert error < 1e-10 and said == ""
        assert len(reports) == 2  # for the first length, and for any
        assert "a recurrence of any number of steps is one scan" in str(reports[1].notes)
        assert all(report.sharded_fraction > 0.95 for report in reports)


OFTEN = ("through_an_alias", "through_a_list", "through_another_name", "written_since", "number_behind")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo] * (name not in OFTEN)) for name in TURN_BY_TURN]
)
def test_what_is_more_than_that_is_traced_turn_by_turn(name: str, ranks: Any) -> None:
    for error, _, said in ranks(2, compared, name, [12, 9], EAGER):
        assert error < 1e-10 and TURN_BY_TURN[name] in said


@pytest.mark.parametrize(("name", "first"), [("exchange", "heads"), ("saturates", "in turn")])
def test_what_is_not_affine_runs_rank_by_rank_at_any_length(ranks: Any, name: str, first: str) -> None:
    """By heads at a known one: two states that need each other."""
    for error, reports, said in ranks(2, compared, name, [64, 48, 72], EAGER):
        assert error < 1e-10 and said == ""
        assert [report.sites[-1].strategy for report in reports] == [first, "in turn"]
        assert [report.sharded_fraction for report in reports] == [1.0, 1.0]


def test_a_process_that_was_alone_before_traces_loops_as_its_new_neighbours_do(ranks: Any) -> None:
    ((error, _, said),) = ranks(1, compared, "saturates", [64, 48], EAGER)
    assert error < 1e-10 and "is traced turn by turn" in said
    for error, reports, said in ranks(2, compared, "saturates", [64, 48], EAGER):
        assert error < 1e-10 and said == ""
        assert [report.sites[-1].strategy for report in reports] == ["in turn", "in turn"]


def test_slices_of_a_split_tensor_are_one_node(ranks: Any) -> None:
    for error, reports, said in ranks(2, compared, "by_slices", [64, 48, 72], EAGER):
        assert error < 1e-10 and said == "" and len(reports) == 2
        assert "a recurrence of any number of steps is one scan" in str(reports[1].notes)


def test_slices_are_one_node_where_all_turns_have_as_many_rows(ranks: Any) -> None:
    for error, reports, said in ranks(2, compared, "slices", [64, 48, 50, 72], EAGER):
        assert error < 1e-10 and said == ""
        notes = [str(report.notes) for report in reports]
        assert len(notes) == 3 and "a recurrence of any number of steps is one scan" in notes[1]
        assert "a recurrence of 12 steps is one scan" in notes[2]  # behind them comes one of two rows


@pytest.mark.parametrize(
    "name", ["chunks", *(pytest.param(name, marks=pytest.mark.zoo) for name in ("appended", "steps"))]
)
def test_one_process_has_one_graph_too(name: str) -> None:
    error, reports, said = compared(name, [64, 50, 77, 61], EAGER)
    assert error < 1e-10 and said == "" and len(reports) == 2
    assert "a recurrence of any number of steps is one scan (programs.py" in str(reports[1].notes)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_rows_are_joined_as_a_list_of_them_is(join: Any, dim: int) -> None:
    rows, before = torch.randn(5, 2, 3, 4), [torch.randn(2, 3, 4), torch.randn(2, 3, 4)]
    for kept in ([], before):
        found, expected = joined(join is torch.stack, kept, rows, dim), join([*kept, *rows], dim)
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    with pytest.raises(IndexError):
        joined(join is torch.stack, [], rows, 4)


def test_a_graph_is_as_large_for_many_turns() -> None:
    nodes = list[int]()

    @rolls_loops
    def backend(gm: Any, _inputs: Any) -> Any:
        nodes.append(sum(len(part.graph.nodes) for part in gm.modules() if isinstance(part, torch.fx.GraphModule)))
        return gm

    for n in (10, 3_000):
        torch._dynamo.reset()
        given = [each.detach() for each in inputs(n)]
        found = torch.compile(programs.tokens, backend=backend, dynamic=False)(*given)
        assert torch.allclose(found, programs.tokens(*given))
    assert nodes[0] == nodes[1] < 50


def test_it_is_explained_with_its_line() -> None:
    torch._dynamo.reset()
    report = ringopt.explain(programs.tokens, *inputs(2_000), world_size=4)
    assert [site.strategy for site in report.sites] == ["states"] and report.sharded_fraction == 1.0
    assert "a recurrence of 2000 steps is one scan (programs.py:" in str(report.notes)


def test_of_fewer_turns_than_two_a_rank_each_number_has_a_graph(ranks: Any) -> None:
    """As Dynamo unrolls them: one graph for all lengths of three chunks, which two ranks do not share alike."""
    for error, reports, _ in ranks(2, compared, "chunks", [12, 10, 9, 11], EAGER):
        assert error < 1e-10 and len(reports) == 2
        assert "a recurrence of 3 steps is one scan" in str(reports[1].notes)


def test_two_or_three_chunks_without_padding_have_a_known_length(ranks: Any) -> None:
    """Guards say so of an open one: of the number of chunks, and that rows are as many as tokens."""
    for error, reports, _ in ranks(2, compared, "steps", [16, 12, 8], EAGER):
        assert error < 1e-10 and [report.sharded_fraction for report in reports] == [1.0] * 3


def test_of_tensors_with_other_numbers_of_rows_python_leaves_the_rest(ranks: Any) -> None:
    for error, reports, _ in ranks(2, compared, "over_other_numbers", [12, 9], EAGER):
        assert error < 1e-10 and "a recurrence of 8 steps" in str(reports[-1].notes)


def test_in_a_graph_that_is_left_as_it_is_loops_are_as_they_were() -> None:
    """torch's scan is for the passes: no compiler behind ringopt is given one."""
    error, reports, said = compared("grows_at_first", [64, 50], EAGER)
    assert error < 1e-10 and reports[1].sites == () and "its graph stays as it is" in said


def test_without_find_scan_loops_are_as_they_were(ranks: Any) -> None:
    for error, _, said in ranks(2, compared, "tokens", [12], {**EAGER, "disable_passes": ("find_scan",)}):
        assert error < 1e-10 and "no pass takes it" in said
