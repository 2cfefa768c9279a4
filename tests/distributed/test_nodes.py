"""Which ranks share a node, as the launcher says; and programs on several, made of namespaces."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringopt
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.plan_of import on_nodes, plan_of
from ringopt.cost.message_bytes import Sizes, bytes_sent
from ringopt.distributed.lookup import process_mesh
from ringopt.distributed.mesh import ANY, PretendedMesh
from ringopt.distributed.nodes import Nodes, nodes_from, nodes_of
from ringopt.distributed.submesh import SubMesh
from ringopt.errors import OptionError, RingCommError
from ringopt.hardware.devices import LINKS, Link
from ringopt.hardware.profile import load, store
from ringopt.hardware.rates import cautious
from tests.context_parallel.reference import assert_near
from tests.distributed.reading import READS
from tests.harness.nodes import NodeLab, needs_nodes
from tests.harness.threads import ThreadMesh, run_on_threads


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
        return [circle.rank, circle.size, circle.logging_rank, int(total)]

    assert run_on_threads(4, body) == [[0, 2, 0, 101], [0, 2, 1, 1010], [1, 2, 2, 101], [1, 2, 3, 1010]]


# ---- a program ------------------------------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (6, 4)).transpose(1, 2)
        k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2)).square().mean()


def made() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model().double(), torch.randn(2, 23, 16, dtype=torch.float64)


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """On this rank, of nodes of 2: loss and gradients, and what the attention sent."""
    torch._dynamo.reset()
    model, x = made()
    before = len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager", **options})
    with pytest.MonkeyPatch.context() as patch, ringopt.record_traffic() as traffic:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        loss = compiled(x)
        loss.backward()
    sent = {way: sum(e.bytes for e in traffic.events if e.label.startswith(way)) for way in ("forward", "backward")}
    return {
        "numbers": [loss.detach(), *(x.grad for x in model.parameters())],
        "sent": sent,
        "site": ringopt.reports()[before].sites[0],
    }


def test_a_program_on_two_nodes(ranks: Any) -> None:
    """The numbers of one process; bytes are those that the plan tells."""
    results = ranks(4, trained, {"strategy": "hybrid"})
    model, x = made()
    loss = model(x)
    loss.backward()
    heads = Sizes(2, 6, 3, 4, 4, 8, 8)
    for rank, found in enumerate(results):
        for got, right in zip(found["numbers"], [loss.detach(), *(x.grad for x in model.parameters())], strict=True):
            assert_near(got, right, 1e-10)
        site = found["site"]
        assert (site.strategy, site.layout) == ("hybrid(2)", "zigzag")
        plan = plan_of(ShardedPattern.of_self_attention("causal", 23, 4, "zigzag"), "hybrid(2)", (6, 3))
        sent = [bytes_sent(plan, heads, rank, backward) for backward in (False, True)]
        assert list(found["sent"].values()) == sent and site.bytes_sent == sent[0]
    assert any(note.startswith("nodes of 2 ranks: of ") for note in results[0]["site"].notes)


@pytest.mark.zoo
def test_auto_takes_it_where_the_profile_has_a_slow_link_between_nodes(ranks: Any, tmp_path: Path) -> None:
    assert ranks(4, chosen_by_auto, str(tmp_path)) == ["hybrid(2)"] * 4


def chosen_by_auto(folder: str) -> str:
    slow = replace(cautious(), link=LINKS["nvlink4"], between=Link("slow", 1e3, 0.0), memory=2**30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        if dist.get_rank() == 0:
            store(slow)
        dist.barrier()
        load.cache_clear()
        return str(trained({"timeout": 77.0})["site"].strategy)  # of a mesh that has agreed on no rates yet


# ---- several nodes --------------------------------------------------------------------------------------------------
PATIENT, TIMEOUT = 40.0, 8.0  # seconds; TCP tries again ever later: behind a link that was down for 10, up to 13


def begun(timeout: float, **options: Any) -> tuple[Model, Any, Tensor]:
    dist.init_process_group("gloo")
    torch._dynamo.reset()
    model, x = made()
    options = {"inner_backend": "aot_eager", "timeout": timeout, **options}
    return model, torch.compile(model, backend="ring", options=options), x


def near_and_far(rank: int, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Of a training step: loss and gradients, what was chosen; of which ranks the memory is read; what this process is
    called."""
    model, compiled, x = begun(PATIENT, **options)
    loss = compiled(x)
    loss.backward()
    links = process_mesh(None, PATIENT)._links
    return {
        "numbers": [x.tolist() for x in (loss.detach(), *(x.grad for x in model.parameters()))],
        "site": ringopt.reports()[-1].sites[0],
        "near": sorted(links.lines) if links is not None else [],
        "name": (socket.gethostname(), os.getpid()),
    }


@needs_nodes
@pytest.mark.parametrize(("nodes", "each"), [pytest.param(2, 1, marks=pytest.mark.zoo), (3, 1), (2, 2)])
def test_on_several_nodes(nodes: int, each: int) -> None:
    """Numbers are those of one process; memory is read within a node, and not of the process that has its number on
    another."""
    options = {"strategy": "hybrid"} if each > 1 else {}
    with NodeLab(nodes, each) as lab:
        results = lab.values(near_and_far, options)
    model, x = made()
    loss = model(x)
    loss.backward()
    for rank, found in enumerate(results):
        for got, right in zip(found["numbers"], [loss.detach(), *(x.grad for x in model.parameters())], strict=True):
            assert_near(torch.tensor(got, dtype=torch.float64), right, 1e-10)
        node = rank // each
        mates = [peer for peer in range(node * each, (node + 1) * each) if peer != rank] if READS else []
        assert found["near"] == mates
        assert found["name"] == (f"node{node}", results[rank % each]["name"][1])
        if each > 1:
            assert found["site"].strategy == "hybrid(2)"


def steps(rank: int, ranks: int, folder: str, seconds: float, timeout: float) -> tuple[int, float, float, str]:
    """Training steps until all agree that `seconds` are over since the second: how many, the farthest loss, the longest
    step, and the error that ended them, or "". Touches a file when two are done."""
    model, compiled, x = begun(timeout)
    expected, mesh = model(x).item(), process_mesh(None, timeout)
    number, farthest, longest, begin, last = 0, 0.0, 0.0, float("inf"), time.monotonic()
    try:
        while True:
            loss = compiled(x)
            loss.backward()
            farthest = max(farthest, abs(loss.item() / expected - 1))
            over = mesh.all_reduce(torch.tensor(float(time.monotonic() - begin > seconds)), "enough")
            now, number = time.monotonic(), number + 1
            longest, last = max(longest, now - last if number > 2 else 0.0), now
            if over > 0:
                return number, farthest, longest, ""
            if number == 2:
                begin = now
                Path(folder, str(rank)).touch()
    except RingCommError as error:
        return number, farthest, time.monotonic() - last, str(error)


def cut_for(seconds: float, folder: Path) -> Any:
    def meanwhile(lab: NodeLab) -> None:
        until = time.monotonic() + 60
        while len(list(folder.iterdir())) < lab.nodes * lab.ranks and time.monotonic() < until:
            time.sleep(0.02)
        lab.cut(1)
        time.sleep(seconds)
        lab.mend(1)

    return meanwhile


@needs_nodes
@pytest.mark.parametrize("seconds", [1.0, pytest.param(10.0, marks=pytest.mark.zoo)])
def test_a_link_that_comes_back_costs_time_and_nothing_else(seconds: float, tmp_path: Path) -> None:
    with NodeLab(2, 1) as lab:
        results = lab.values(steps, str(tmp_path), seconds + 2, PATIENT, meanwhile=cut_for(seconds, tmp_path))
    for number, farthest, longest, error in results:
        assert not error and number > 2
        assert farthest < 1e-12 and longest > 0.7 * seconds


@needs_nodes
def test_a_link_that_stays_down_is_an_error_on_both_nodes(tmp_path: Path) -> None:
    with NodeLab(2, 1) as lab:
        results = lab.values(steps, str(tmp_path), 60.0, TIMEOUT, meanwhile=cut_for(TIMEOUT + 4, tmp_path))
    for rank, (_, farthest, seconds, error) in enumerate(results):
        assert farthest < 1e-12
        assert f"rank {rank} of 2" in error and "failed after" in error
        assert seconds < TIMEOUT + 6
