"""The mesh over gloo processes: what threads cannot show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.distributed.device_mesh import init_device_mesh

import ringopt
import ringopt.ops.ring
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Cargo
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.distributed.intra_node import discovery, process_vm
from ringopt.distributed.lookup import DEFAULT_TIMEOUT, mesh_of, process_mesh
from ringopt.distributed.mesh import forget_all
from ringopt.distributed.process import ProcessMesh
from ringopt.distributed.standing import Call
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, RingCommError, RingMismatchError
from tests.context_parallel.reference import assert_near, join, problem, sdpa, shard, visible
from tests.distributed.reading import READS, needs_reading

Ranks = Callable[..., list[Any]]

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.complex64)


# ---- transport -------------------------------------------------------------------------------------------------------
def mesh_over(transport: str, timeout: float) -> ProcessMesh:
    """A new one: "group" leaves all messages to the process group, as between nodes."""
    with pytest.MonkeyPatch.context() as patch:
        if transport == "group":
            patch.setattr(process_vm, "available", lambda: False)
        mesh = process_mesh(timeout_s=timeout)
    assert (mesh._links is None) == (transport == "group" or not READS)
    return mesh


def talk(transport: str) -> tuple[Any, ...]:
    mesh = mesh_over(transport, 20.0 + len(transport))
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    got = torch.empty(1000)
    mesh.exchange([(right, torch.full((1000,), float(mesh.rank)))], [(left, got)], "step").wait()
    gathered = [[x.real.int().flatten().tolist() for x in mesh.all_gather(torch.full((1, 2), mesh.rank).to(dtype))]
                for dtype in DTYPES]  # fmt: skip
    total = mesh.all_reduce(torch.randn(1001, generator=torch.Generator().manual_seed(mesh.rank)))
    same = all(torch.equal(total, other) for other in mesh.all_gather(total))
    empty = [list(x.shape) for x in mesh.all_gather(torch.empty(0, 3))]
    of_one = [x.tolist() for x in mesh.all_gather((torch.arange(9.0) + mesh.rank)[::9])]  # its stride is 9
    known = mesh_of("world") is mesh
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return got.unique().tolist(), gathered, same, empty, of_one, mesh.name, known, len(mesh.in_flight)


@pytest.mark.parametrize("transport", ["memory", "group"])
def test_messages_and_collectives(ranks: Ranks, transport: str) -> None:
    for rank, (got, gathered, same, empty, of_one, name, found, left) in enumerate(ranks(3, talk, transport)):
        assert got == [float((rank - 1) % 3)]
        for dtype, parts in zip(DTYPES, gathered, strict=True):
            assert parts == [[int(bool(r)) if dtype == torch.bool else r] * 2 for r in range(3)]
        assert same, "all_reduce gives the same bits everywhere"
        assert empty == [[0, 3]] * 3 and of_one == [[0.0], [1.0], [2.0]]
        assert (name, found, left) == ("world", True, 0)


def in_a_circle(mesh: ProcessMesh) -> list[float]:
    """Rank 0 waits for rank 1, through the group, which waits for rank 2, which waits until rank 0 has read from it."""
    first, second = (torch.full((100_000,), float(mesh.rank)) for _ in range(2))
    if mesh.rank == 0:
        early = mesh.exchange([], [(2, first)], "early")
        mesh.exchange([], [(1, second)], "step").wait()
        early.wait()
    elif mesh.rank == 1:
        mesh.exchange([], [(2, first)], "step").wait()
        mesh.exchange([(0, second)], [], "step").wait()
    else:
        mesh.exchange([(0, first)], [], "early").wait()
        mesh.exchange([(1, second)], [], "step").wait()
    return [float(first.unique()), float(second.unique())]


def near() -> tuple[list[int], list[int], str, str]:
    """Ranks whose memory this one reads: of all, and where rank 1 finds that it cannot read rank 0's; and what reports
    say of both."""
    every = process_mesh(timeout_s=30.0)
    with pytest.MonkeyPatch.context() as patch:
        if every.rank == 1:
            reads, answers = discovery._reads, iter([False, True])  # rank 0 is asked about first
            patch.setattr(discovery, "_reads", lambda *what: reads(*what) and next(answers))
        mixed = process_mesh(timeout_s=31.0)
    found = []
    for mesh in (every, mixed):
        got = [torch.empty(100_000) for _ in range(mesh.size)]
        peers = [peer for peer in range(mesh.size) if peer != mesh.rank]
        sends = [(peer, torch.full((100_000,), 10.0 * mesh.rank + peer)) for peer in peers]
        mesh.exchange(sends, [(peer, got[peer]) for peer in peers], "step").wait()
        assert [got[peer].unique().tolist() for peer in peers] == [[10.0 * peer + mesh.rank] for peer in peers]
        assert [float(x.unique()) for x in mesh.all_gather(torch.full((9999,), 1.0 + mesh.rank))] == [1.0, 2.0, 3.0]
        assert mesh.all_reduce(torch.full((9999,), 1.0 + mesh.rank)).unique().tolist() == [6.0]
        assert in_a_circle(mesh) == [2.0, 2.0 if mesh.rank == 2 else 1.0]
        found.append([] if mesh._links is None else sorted(mesh._links.lines))
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return found[0], found[1], every.remark, mixed.remark


@needs_reading
def test_ranks_on_a_node_read_each_other_where_they_can(ranks: Ranks) -> None:
    (*first, remark), *others = ranks(3, near)
    assert first == [[1, 2], [2], ""]
    assert remark == (
        "messages between rank 0 and 1 of the ranks on its machine go through gloo: they may not read each other's "
        "memory, for they are of other users or network namespaces, or the system forbids it (`ringopt doctor`)"
    )
    assert others == [([0, 2], [2], "", remark.replace("rank 0", "rank 1")), ([0, 1], [0, 1], "", "")]


def part_of_the_world() -> tuple[str, int, list[int]]:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh = process_mesh(grid["dp"])
    assert process_mesh(grid["dp"]) is mesh
    return mesh.name, mesh.rank, [int(x) for x in mesh.all_gather(torch.tensor(dist.get_rank()))]


def test_a_part_of_the_world(ranks: Ranks) -> None:
    even, odd = ("ranks:0,2", [0, 2]), ("ranks:1,3", [1, 3])
    expected = [(name, place, members) for place in (0, 1) for name, members in (even, odd)]
    assert ranks(4, part_of_the_world) == expected


def timeouts() -> tuple[bool, ...]:
    first, other = process_mesh(timeout_s=50.0), process_mesh(timeout_s=40.0)
    again, any_timeout = process_mesh(timeout_s=50.0), process_mesh()
    return first is again, first is not other, any_timeout is again, other.timeout == 40.0


def test_a_mesh_is_made_once_per_timeout(ranks: Ranks) -> None:
    assert ranks(2, timeouts) == [(True,) * 4] * 2


def restart(store: str) -> tuple[bool, bool, str]:
    """Ends the process group, and starts another: in a job of its own, for the pool's is gone then."""
    rank, size, old = dist.get_rank(), dist.get_world_size(), process_mesh()
    dist.destroy_process_group()
    with pytest.raises(RingCommError) as raised:
        old.all_reduce(torch.ones(1))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    new = process_mesh()
    total = new.all_reduce(torch.ones(1)).item()
    forget_all()
    return new is not old, total == size, str(raised.value)


def test_a_new_process_group_gets_a_new_mesh(ranks: Ranks, tmp_path: Any) -> None:
    for fresh, works, said in ranks(2, restart, str(tmp_path / "store")):
        assert fresh and works
        assert "mesh 'world' belongs to a process group that was destroyed; make it again" in said


def test_without_a_process_group() -> None:
    with pytest.raises(OptionError, match=r"torch.distributed is not initialized: run under torchrun"):
        process_mesh()


@pytest.mark.parametrize(("backend", "size"), [("fake", 4), ("gloo", 1)])
def test_what_a_rank_does_is_told_to_others_alone(backend: str, size: int) -> None:
    """Of torch's backend "fake" there are none: its store may hold nothing, and fail where something is put in."""
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=size - 1, world_size=size)
    try:
        mesh, call = process_mesh(), Call("compiles a graph")
        before = store.num_keys()
        mesh.stands(call, publish=True)
        assert (mesh.recent.call, store.num_keys()) == (call, before)
    finally:
        forget_all()
        dist.destroy_process_group()


# ---- the operator ----------------------------------------------------------------------------------------------------
def ring(n: int, pattern: str, layout: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    mesh, case = process_mesh(), problem(n, dtype=torch.float64)
    local = [shard(x, layout, mesh.size, mesh.rank) for x in (case.q, case.k, case.v, case.dout)]
    q, k, v = (x.clone().requires_grad_() for x in local[:3])
    with record_traffic() as traffic:
        out, _lse = torch.ops.ringopt.ring_attention(
            *(
                q,
                k,
                v,
                [],
                None,
                None,
                n,
                n,
                pattern,
                "",
                [],
                0.0,
                case.scale,
                layout,
                layout,
                "ring",
                "auto",
                mesh.name,
                "",
            ),
        )
        out.backward(local[3])
    posted = [event for event in traffic.events if event.kind == "posted"]
    sent = {way: sum(e.bytes for e in posted if e.label.startswith(way)) for way in ("forward", "backward")}
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)], sent


@pytest.mark.parametrize(
    ("p", "n", "pattern", "layout"),
    [(2, 67, "full", "contiguous"), (3, 17, "causal", "zigzag"), (4, 67, "causal", "zigzag"), (4, 3, "full", "zigzag")],
)
def test_ring_attention(ranks: Ranks, p: int, n: int, pattern: str, layout: str) -> None:
    results = ranks(p, ring, n, pattern, layout)
    expected = sdpa(problem(n), visible(pattern, n, n))
    for parts, right in zip(zip(*(tensors for tensors, _ in results), strict=True), expected, strict=True):
        assert_near(join(parts, layout), right, 1e-12)
    plan = exchange_of(ShardedPattern.of_self_attention(pattern, n, p, layout), "ring")
    row = 2 * 2 * (8 + 8) * 8  # batch * KV heads * (D + Dv) * bytes
    for rank, (_, sent) in enumerate(results):
        back = sum(plan.sent_rows(rank, cargo, backward=True) for cargo in Cargo)
        assert sent == {"forward": plan.sent_rows(rank, Cargo.OUT) * row, "backward": back * row}


STRATEGIES = ("gather", "ring", "ring2", "gather_q", "ring_q", "ulysses", "hybrid")


def by_each_strategy(times: int) -> dict[str, list[torch.Tensor]]:
    """out, dq, dk, dv of this rank, the last of `times` repetitions; every repetition has the same bits. The hybrid has
    nodes of 2 ranks."""
    case, found = problem(19, heads=(4, 2)), {}
    mine = [shard(x, "zigzag", dist.get_world_size(), dist.get_rank()) for x in (case.q, case.k, case.v, case.dout)]
    for strategy in STRATEGIES:
        for number in range(times):
            q, k, v = (x.clone().requires_grad_() for x in mine[:3])
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LOCAL_WORLD_SIZE", "2")
                out = ringopt.attention(
                    q, k, v, is_causal=True, enable_gqa=True, layout="zigzag", strategy=strategy, scale=case.scale
                )
            got = [out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3])]
            before = found.setdefault(strategy, got)
            assert all(map(torch.equal, got, before)), (strategy, number)
    return found


@pytest.mark.parametrize("times", [5, pytest.param(100, marks=pytest.mark.zoo)])
def test_every_strategy_many_times_on_four_ranks(ranks: Ranks, times: int) -> None:
    """None of so many forwards and backwards of each of seven hangs or differs."""
    results = ranks(4, by_each_strategy, times)
    expected = sdpa(problem(19, heads=(4, 2)), visible("causal", 19, 19))
    for strategy in STRATEGIES:
        for parts, right in zip(zip(*(found[strategy] for found in results), strict=True), expected, strict=True):
            assert_near(join(parts, "zigzag"), right, 1e-12)


def mismatch(field: str) -> str:
    mesh, odd = process_mesh(), dist.get_rank() == 1
    rows = 3 if field == "shards" and odd else 4
    dtype = torch.float64 if field == "dtype" and odd else torch.float32
    q, k, v = (torch.ones(1, 2, rows, 8, dtype=dtype) for _ in range(3))
    pattern = "full" if field == "pattern" and odd else "causal"
    with pytest.raises(RingMismatchError) as raised:
        torch.ops.ringopt.ring_attention(
            *(q, k, v, [], None, None, 12, 12, pattern, "", [], 0.0, 1.0),
            *("contiguous", "contiguous", "ring", "auto", mesh.name, ""),
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("dtype", 'rank 1 has dtype="torch.float64", but ranks 0, 2 have dtype="torch.float32"'),
        ("pattern", 'rank 1 has pattern="full", but ranks 0, 2 have pattern="causal"'),
        ("shards", 'rank 1 has shards="q is [1, 2, 3, 8], and rank 1 of 3 holds 4 rows (dim 2) of a contiguous'),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(ranks: Ranks, field: str, told: str) -> None:
    sentences = ranks(3, mismatch, field)
    assert len(set(sentences)) == 1
    assert told in sentences[0]


def test_the_version_is_known() -> None:
    assert ringopt.ops.ring.VERSION.startswith(ringopt.__version__ + "+")
