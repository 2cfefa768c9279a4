"""Where the ranks stood when their mesh ended: the events in a file, the calls in the error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringopt.distributed import groups, standing
from ringopt.distributed.groups import Ended, await_all, met_group
from ringopt.distributed.lookup import DEFAULT_TIMEOUT, process_mesh
from ringopt.distributed.standing import MOST, Call, Recent, differences, differences_of_calls
from ringopt.errors import RingCommError
from tests.distributed.reading import needs_reading

Ranks = Callable[..., list[Any]]


class Drops(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.nn.functional.dropout(self.inner(x), 0.5, self.training)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]


HOW = ("shape", "dtype", "grad", "train")


def unequal(how: str, folder: str, check: str = "first") -> tuple[str, float]:
    """A second call that differs on rank 1 from that of rank 0, after one that did not."""
    torch._dynamo.reset()
    timeout = (170.0 if check == "first" else 180.0) + HOW.index(how)  # a mesh of its own, for it may end
    options = {"inner_backend": "aot_eager", "timeout": timeout, "dump": folder, "check_inputs": check}
    model = Drops().eval()
    compiled = torch.compile(model, backend="ring", options=options, dynamic=False)
    x, odd = torch.ones(2, 8, 8), dist.get_rank() == 1
    compiled(x)
    mesh = process_mesh()
    assert mesh._links is not None
    mesh._links._timeout = 6.0  # a loaded machine takes longer to make a mesh
    if odd and how == "shape":
        x = torch.ones(2, 12, 8)
    if odd and how == "dtype":
        x, _ = x.double(), model.double()
    if odd and how == "train":
        model.train()
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(Exception) as raised, torch.set_grad_enabled(not (odd and how == "grad")):
        for _ in range(3):
            compiled(x).sum().backward() if torch.is_grad_enabled() else compiled(x)
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return str(raised.value), time.monotonic() - began


TOLD = {
    "shape": "rank 1 {} with inputs [2, 12, 8] float32 where this rank has [2, 8, 8] float32",
    "dtype": "rank 1 {} with inputs [2, 8, 8] float64 where this rank has [2, 8, 8] float32",
    "train": "another graph",
    "grad": "gradients off where this rank has them on",
}


@needs_reading
@pytest.mark.zoo
@pytest.mark.parametrize("how", HOW)
def test_what_differs_after_the_first_call_is_named(ranks: Ranks, tmp_path: Path, how: str) -> None:
    (said, seconds), (other, _) = ranks(2, unequal, how, str(tmp_path))
    expected = re.escape(TOLD[how]).replace(r"\{\}", "(calls|compiles) a (compiled )?graph")
    assert re.search(expected, said), (said, other)
    assert seconds < 30
    files = sorted(file.name for file in tmp_path.glob("ringopt-*.txt"))
    assert {name.rpartition("-")[2] for name in files} == {"rank0.txt", "rank1.txt"}
    assert f"events are in {tmp_path}/ringopt-" in said
    text = next(tmp_path.glob("*-rank0.txt")).read_text()
    assert (
        text.startswith("rank 0 of mesh world, process ") and "MainThread" in text and "calls a compiled graph" in text
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(("how", "when"), [("train", "every"), ("grad", "every"), ("train", "always")])
def test_where_batches_are_compared_it_is_told_at_once(ranks: Ranks, tmp_path: Path, how: str, when: str) -> None:
    """And no mesh ends."""
    expected = re.escape(TOLD[how]).replace(r"\{\}", "(calls|compiles) a (compiled )?graph")
    (said, _), (other, _) = ranks(2, unequal, how, str(tmp_path), when)
    assert re.search(expected, said), (said, other)
    assert all("RingMismatchError" in found or "do not begin the same call" in found for found in (said, other))
    assert not list(tmp_path.glob("ringopt-*.txt"))


def test_calls_told_apart() -> None:
    one = Call("calls a compiled graph", "1", ("[2] int64",), True, {"dropout": 2, "linear": 1})
    two = Call("compiles a graph", "2", ("[3] int64",), True, {"linear": 1})
    assert differences_of_calls(0, {0: one, 1: two, 2: one}) == (
        "This rank calls a compiled graph; rank 1 compiles a graph with inputs [3] int64 where this rank has [2] "
        "int64; another graph (without dropout)"
    )
    assert differences_of_calls(1, {0: one, 1: one}) == ""


def test_who_has_heard_of_all_ranks_waits_no_longer() -> None:
    """Both have failed, and say so: neither waits out its patience for the other."""
    store, calls = dist.HashStore(), [Call("calls a compiled graph"), Call("compiles a graph", gradients=True)]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda rank: differences(store, "a mesh", rank, 2, calls[rank], patience=6.0), range(2)))
    assert time.monotonic() - began < 3.0
    assert said == [
        "This rank calls a compiled graph; rank 1 compiles a graph with gradients on where this rank has them off",
        "This rank compiles a graph; rank 0 calls a compiled graph with gradients off where this rank has them on",
    ]


def test_events_are_few_and_cost_little(tmp_path: Path) -> None:
    recent = Recent()
    best = min(timed(recent) for _ in range(50))
    assert len(recent.events) == MOST
    assert best < 1e-6
    recent.folder = str(tmp_path / "new")
    path = Path(recent.write("world", 0, "why").rpartition(" in ")[2])
    lines = path.read_text().splitlines()
    assert len(lines) == 2 + MOST and re.search(
        r"-\d+\.\d+ s  posted     forward 0 +\[1\] +16 B  MainThread", lines[-1]
    )


def timed(recent: Recent) -> float:
    began = time.process_time()
    for _ in range(1000):
        recent.note("posted", "forward 0", [1], 16)
    return (time.process_time() - began) / 1000


def test_a_file_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(standing.tempfile, "mkstemp", full)
    assert Recent().write("world", 0, "why") == "Its last events could not be written (No space left on device)"


def alone_at_the_group() -> tuple[str, float]:
    """Rank 1 does not come to a mesh: what rank 0 is told, and how long the second time takes."""
    if dist.get_rank() == 1:
        time.sleep(5)
        return "", 0.0
    with pytest.raises(RingCommError) as raised:
        met_group("never made", (0, 1), 2.0)
    began = time.monotonic()
    with pytest.raises(RingCommError, match=r"did not come|has ended"):  # on a busy machine rank 1 has returned by now
        met_group("never made", (0, 1), 2.0)
    return str(raised.value), time.monotonic() - began


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    (said, again), _ = ranks(2, alone_at_the_group)
    assert "mesh 'never made' of ranks [0, 1] was not made in " in said and "ranks [1] did not come" in said
    assert again < 1.9
    from tests.harness.pool import POOL

    POOL.kill()  # the ranks have made unequally many groups


def test_a_wait_that_gloo_cuts_to_milliseconds_is_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended before the time was over, which stood for a process that has ended."""

    class Waiting:
        now = 0.0

        def wait(self, timeout: timedelta) -> None:
            Waiting.now += timeout // timedelta(milliseconds=1) / 1000
            raise RuntimeError("Timed out")

    for post in ("isend", "irecv"):
        monkeypatch.setattr(groups.dist, post, lambda *_, **__: Waiting())
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(groups, "has_gloo", lambda: True)
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: Waiting.now))
    with pytest.raises(RuntimeError, match="Timed out") as raised:
        await_all((0, 1), "cut", 0.1009)
    assert not isinstance(raised.value, Ended)


def ended_before_the_group(late: float) -> tuple[str, float]:
    """The connections of rank 2 are closed before a mesh is made, to which rank 1 comes `late`: what the others are
    told, and after how long."""
    if dist.get_rank() == 2:
        dist.destroy_process_group()
        time.sleep(5)
        return "", 0.0
    time.sleep(late * dist.get_rank())
    began = time.monotonic()
    with pytest.raises(RingCommError) as raised:
        met_group("with one that has ended", (0, 1, 2), 60.0)
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize("late", [pytest.param(0.0, marks=pytest.mark.zoo), 1.0])
def test_a_rank_that_has_ended_is_not_waited_for(ranks: Ranks, late: float) -> None:
    *others, _ = ranks(3, ended_before_the_group, late)
    for said, seconds in others:
        assert "mesh 'with one that has ended' of ranks [0, 1, 2] was not made in " in said
        assert "s: the process of rank 2 has ended" in said
        assert "ranks [1] did not come" not in said  # it was late
        assert seconds < 30
    from tests.harness.pool import POOL

    POOL.kill()
