"""The mesh over threads refuses what a real group would hang on or corrupt: other tests lean on that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringopt.distributed.lookup import mesh_of
from tests.harness import threads
from tests.harness.threads import ThreadMesh, ThreadsError, run_on_threads


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TIMEOUT", 0.5)


def ring(mesh: ThreadMesh, buffer: torch.Tensor, got: torch.Tensor, label: str = "") -> None:
    mesh.exchange([(1 - mesh.rank, buffer)], [(1 - mesh.rank, got)], label).wait()


def unequal_lengths(mesh: ThreadMesh) -> None:
    ring(mesh, torch.ones(2 + mesh.rank), torch.ones(2))


def unequal_dtypes(mesh: ThreadMesh) -> None:
    ring(mesh, torch.ones(2, dtype=[torch.float32, torch.float64][mesh.rank]), torch.ones(2))


def unequal_steps(mesh: ThreadMesh) -> None:
    ring(mesh, torch.ones(2), torch.ones(2), f"step {mesh.rank}")


def nobody_sends(mesh: ThreadMesh) -> None:
    if mesh.rank == 1:
        mesh.exchange([], [(0, torch.ones(2))], "step 0").wait()


def nobody_receives(mesh: ThreadMesh) -> None:
    if mesh.rank == 1:
        mesh.exchange([(0, torch.ones(2))], [], "step 0").wait()


def nobody_waits(mesh: ThreadMesh) -> None:
    mesh.exchange([(1 - mesh.rank, torch.ones(2))], [(1 - mesh.rank, torch.ones(2))], "step 0")


def changed_while_sent(mesh: ThreadMesh) -> None:
    buffer = torch.ones(2)
    pending = mesh.exchange([(1 - mesh.rank, buffer)], [(1 - mesh.rank, torch.ones(2))], "step 0")
    buffer.zero_()
    pending.wait()


def different_collectives(mesh: ThreadMesh) -> None:
    (mesh.all_reduce if mesh.rank else mesh.all_gather)(torch.ones(2))


def different_shapes(mesh: ThreadMesh) -> None:
    mesh.all_gather(torch.ones(2 + mesh.rank))


def missing_collective(mesh: ThreadMesh) -> None:
    if mesh.rank == 0:
        mesh.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (unequal_lengths, r"posts '' \[.\] torch.float32, and rank . has posted '' \[.\] torch.float32 for it"),
        (unequal_dtypes, "has posted"),
        (unequal_steps, "has posted 'step"),
        (nobody_sends, r"rank 1 waits for rank 0 in 'step 0' \[2\] torch.float32, which never comes"),
        (nobody_receives, "rank 1 waits for rank 0 in 'step 0'"),
        (nobody_waits, r"exchanges nobody waited for: \['step 0', 'step 0'\]"),
        (changed_while_sent, "changed the buffer of 'step 0'"),
        (different_collectives, "the ranks entered different collectives"),
        (different_shapes, "the ranks entered different collectives"),
        (missing_collective, "rank 0 waits in all_reduce, which not all ranks enter"),
    ],
)
def test_refused(body: Callable[[ThreadMesh], None], sentence: str) -> None:
    with pytest.raises(ThreadsError, match=sentence):
        run_on_threads(2, body)


def test_a_buffer_read_before_it_arrived_holds_nan() -> None:
    def body(mesh: ThreadMesh) -> tuple[bool, bool]:
        got = torch.zeros(2)
        pending = mesh.exchange([(1 - mesh.rank, torch.ones(2))], [(1 - mesh.rank, got)])
        early = got.isnan().all().item()
        pending.wait()
        return bool(early), bool(got.eq(1).all())

    assert run_on_threads(2, body) == [(True, True)] * 2


def test_the_first_error_is_raised_and_the_others_are_released() -> None:
    def body(mesh: ThreadMesh) -> None:
        if mesh.rank == 2:
            raise ZeroDivisionError("the cause")
        mesh.all_reduce(torch.ones(1))

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_on_threads(4, body)


def test_results_come_in_rank_order_and_the_mesh_is_registered() -> None:
    assert run_on_threads(3, lambda mesh: (mesh_of(mesh.name).rank, mesh.size)) == [(0, 3), (1, 3), (2, 3)]
