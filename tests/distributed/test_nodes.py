"""Which ranks share a node, as the launcher says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringopt.attention.plans import on_nodes
from ringopt.distributed.mesh import ANY, PretendedMesh, SubMesh
from ringopt.distributed.nodes import Nodes, nodes_from, nodes_of
from ringopt.errors import OptionError
from tests.threads import ThreadMesh, run_on_threads


@pytest.mark.parametrize(
    ("ranks", "size", "why"),
    [
        ([(2, 0), (2, 1), (2, 2), (2, 3)], 2, ""),
        ([(4, 0), (4, 1)], 2, ""),  # a mesh within one node
        ([(4, 1), (4, 3), (4, 5), (4, 7)], 2, ""),  # every second rank of two nodes of 4
        ([(2, 0), (2, 2)], 1, ""),  # one of each
        ([(2, 0), (0, 1)], 0, "rank 1 is not told how many ranks its node has: LOCAL_WORLD_SIZE"),
        ([(2, 0), (2, 1), (1, 2)], 0, "nodes have different numbers of ranks: LOCAL_WORLD_SIZE is 1, 2"),
        ([(2, 0), (2, 1), (2, 2)], 0, "are, in order, on nodes [0, 0, 1], not equally many in a row on each"),
        ([(2, 0), (2, 2), (2, 1), (2, 3)], 0, "are, in order, on nodes [0, 1, 0, 1]"),
    ],
)
def test_nodes(ranks: list[tuple[int, int]], size: int, why: str) -> None:
    found = nodes_from(ranks)
    assert found.size == size and why in found.why


def test_ranks_agree_on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_on_threads(4, nodes_of) == [Nodes(2)] * 4


def test_hybrid_is_over_the_nodes_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert on_nodes("hybrid", PretendedMesh(0, 4)) == "hybrid(2)"
    assert on_nodes("hybrid", PretendedMesh(0, 32, "h100")) == "hybrid(8)"
    assert on_nodes("ring", PretendedMesh(0, 4)) == "ring"


class Anybody(PretendedMesh):
    name = ANY  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("told", "mesh", "sentence"),
    [
        ("4", PretendedMesh(0, 4), "LOCAL_WORLD_SIZE has nodes of 4, of the 4 ranks of this mesh"),
        ("1", PretendedMesh(0, 4), "it takes several nodes of several ranks each"),
        ("", PretendedMesh(0, 4), "rank 0 is not told how many ranks its node has"),
        ("many", PretendedMesh(0, 4), "rank 0 is not told how many ranks its node has"),
        ("2", PretendedMesh(0, 4, "cpu"), "the data sheet of cpu names none"),
        ("2", PretendedMesh(0, 8, "h100"), "the data sheet of h100 has nodes of 8, of the 8 ranks"),
        ("2", Anybody(0, 2), "a program for any number of ranks knows none"),
    ],
)
def test_where_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch, told: str, mesh: Any, sentence: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    with pytest.raises(OptionError, match=sentence):
        on_nodes("hybrid", mesh)


def test_some_ranks_talk_by_the_mesh_of_all() -> None:
    """Under its numbers: an error names the rank that everybody knows."""

    def body(mesh: ThreadMesh) -> list[int]:
        circle = SubMesh(mesh, range(mesh.rank % 2, 4, 2))
        total = circle.all_reduce(torch.tensor([10**mesh.rank]))
        with pytest.raises(ValueError, match=r"rank . of 2 cannot exchange messages with rank 3"):
            circle.exchange([(3, torch.ones(1))], [])
        return [circle.rank, circle.size, circle.teller, int(total)]

    assert run_on_threads(4, body) == [[0, 2, 0, 101], [0, 2, 1, 1010], [1, 2, 2, 101], [1, 2, 3, 1010]]
