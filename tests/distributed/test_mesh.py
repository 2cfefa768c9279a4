"""What holds for every mesh, shown on pretended ones and on threads."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ringopt.distributed.lookup import mesh_of
from ringopt.distributed.mesh import Mesh, PretendedMesh, Transfer, forget_all, register, registered
from ringopt.errors import RingCommError
from tests.harness.threads import ThreadMesh, run_on_threads


@pytest.fixture(autouse=True)
def no_meshes() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


# ---- names -----------------------------------------------------------------------------------------------------------
def test_a_mesh_is_found_by_its_name() -> None:
    mesh = ThreadMesh(2, "here")
    register(mesh)
    assert mesh_of("here") is registered("here") is mesh
    forget_all()
    with pytest.raises(RingCommError, match=r"no mesh 'here' in this process; known are none\. Start the"):
        mesh_of("here")


def test_a_pretended_mesh_knows_rank_and_size_only() -> None:
    mesh = mesh_of("pretend:2/8")
    assert (mesh.rank, mesh.size, mesh.name) == (2, 8, "pretend:2/8")
    buffer = torch.ones(1)
    for talk in (
        lambda: mesh.exchange([(3, buffer)], []),
        lambda: mesh.all_gather(buffer),
        lambda: mesh.all_reduce(buffer),
    ):
        with pytest.raises(RingCommError, match=r"rank 2 of 8 is pretended, .* Start the ranks with torchrun"):
            talk()


@pytest.mark.parametrize("name", ["pretend:2/2", "pretend:2", "pretend:-1/2", "pretend:a/b", "pretend:"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="expected pretend:RANK/SIZE with RANK below SIZE, such as pretend:0/8"):
        mesh_of(name)


# ---- one rank --------------------------------------------------------------------------------------------------------
def test_one_rank_talks_to_nobody() -> None:
    mesh, x = PretendedMesh(0, 1), torch.arange(6.0).view(2, 3).T
    (gathered,), total = mesh.all_gather(x), mesh.all_reduce(x)
    for y in (gathered, total):
        assert torch.equal(y, x) and y.data_ptr() != x.data_ptr(), "operators may not return their inputs"
    assert total.is_contiguous()
    mesh.exchange([], []).wait()


# ---- messages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("peer", [-1, 1, 2])
def test_peers_are_other_ranks(peer: int) -> None:
    with pytest.raises(ValueError, match=f"rank 1 of 2 cannot exchange messages with rank {peer}"):
        PretendedMesh(1, 2).exchange([(peer, torch.ones(1))], [])


def test_a_message_is_a_flat_buffer() -> None:
    for buffer in (torch.ones(2, 3), torch.ones(4)[::2]):
        with pytest.raises(ValueError, match="a message is one 1-D contiguous buffer; found"):
            PretendedMesh(0, 2).exchange([], [(1, buffer)])


def test_rings_and_empty_messages() -> None:
    def body(mesh: ThreadMesh) -> list[float]:
        after, before, got = (mesh.rank + 1) % 3, (mesh.rank - 1) % 3, torch.empty(2)
        sends = [(after, torch.full((2,), float(mesh.rank))), (before, torch.empty(0))]
        pending = mesh.exchange(sends, [(before, got), (after, torch.empty(0))])
        pending.wait()
        pending.wait()  # the second one waits for nothing
        return got.tolist()

    assert run_on_threads(3, body) == [[2, 2], [0, 0], [1, 1]]


def test_collectives() -> None:
    def body(mesh: ThreadMesh) -> tuple[list[int], Tensor]:
        return [int(x) for x in mesh.all_gather(torch.tensor(mesh.rank))], mesh.all_reduce(torch.ones(2).bfloat16())

    for gathered, total in run_on_threads(3, body):
        assert gathered == [0, 1, 2]
        assert total.tolist() == [3, 3] and total.dtype == torch.bfloat16


class Broken(PretendedMesh):
    """Its messages fail, as when a peer dies."""

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        class Failing:
            def wait(self) -> None:
                raise RuntimeError("[gloo] Connection closed by peer.\nThis may be caused by a crash")

        return [Transfer("receive of 4 bytes from rank 1", Failing())]


def test_a_failing_wait_says_who_waited_for_whom() -> None:
    mesh: Mesh = Broken(0, 2)
    pending = mesh.exchange([], [(1, torch.ones(1))], "forward 3")
    with pytest.raises(RingCommError) as raised:
        pending.wait()
    said = str(raised.value)
    assert said.startswith("rank 0 of 2 (pretend:0/2), forward 3: receive of 4 bytes from rank 1 failed after 0.0 s: ")
    assert "[gloo] Connection closed by peer. A peer died, hung" in said and "restart the ranks" in said
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_buffers_live_as_long_as_the_transport_may_use_them() -> None:
    mesh, buffer = Broken(0, 2), torch.ones(1)
    alive = weakref.ref(buffer)
    pending = mesh.exchange([], [(1, buffer)])
    del buffer
    with pytest.raises(RingCommError):
        pending.wait()
    del pending
    gc.collect()
    assert alive() is not None
    del mesh
    gc.collect()
    assert alive() is None
