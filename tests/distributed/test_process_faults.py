"""Faults of a process: errors on one rank or all, ranks that die, hang, come late or fork."""

from __future__ import annotations

import os
import pickle
import signal
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd

from ringopt.context_parallel.executor.keys_move import KeysBackward
from ringopt.distributed import failure_agreement
from ringopt.distributed.failure_agreement import Place, all_alike, match
from ringopt.distributed.lookup import DEFAULT_TIMEOUT, process_mesh
from ringopt.errors import RingCommError
from ringopt.ops import collectives as convert
from tests.distributed.reading import needs_reading
from tests.distributed.test_process import Ranks, mesh_over
from tests.harness.pool import RankError


def after_an_error() -> list[str]:
    """Rank 0 loses patience; rank 1 comes later. What either is told then, and of the message after that."""
    mesh = process_mesh(timeout_s=32.0)
    assert mesh._links is not None
    if mesh.rank == 0:
        mesh._links._timeout = 0.3
    else:
        time.sleep(1.0)
    said = []
    for label in ("first", "second"):
        with pytest.raises(RingCommError) as raised:
            mesh.exchange([], [(1 - mesh.rank, torch.empty(4))], label).wait()
        said.append(str(raised.value))
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return said


@needs_reading
def test_after_an_error_nothing_is_taken_for_what_was_to_come(ranks: Ranks) -> None:
    (early, second), (late, other) = ranks(2, after_an_error)
    assert "(world), first: receive of 16 bytes from rank 1 failed after 0." in early
    assert "Timed out waiting 300ms for rank 1. A peer died, hung" in early
    assert "(world), first: receive of 16 bytes from rank 0 failed after" in late
    assert "Connection closed by rank 0" in late
    for rank, sentence in enumerate((second, other)):
        assert sentence.startswith(
            f"rank {rank} of 2 (world), second: exchange was not begun: an earlier message has failed, and the ranks "
            "are not at the same message any more. Restart the ranks. Its last "
        )


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 8)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.table(numbers)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


CUTS = ("rows", "backward", "between", "interrupt", "all rows", "all backward", "all between")


def cut_short(where: str) -> list[str]:
    """Calls of a compiled model of which one is cut short on rank 0 alone: by a number that only its rows have, in a
    block of the backward, by an interrupt there, or between its operators; or so on all ranks. What they said."""
    timeout = 34.0 + CUTS.index(where)  # a mesh for each
    options = {"inner_backend": "aot_eager", "timeout": timeout}
    torch.manual_seed(0)
    alone = Tokens()
    model = torch.compile(alone, backend="ring", options=options)
    odd, said = dist.get_rank() == 0 or where.startswith("all"), list[str]()

    def no_memory(*_: Any) -> None:
        raise KeyboardInterrupt("stopped") if where == "interrupt" else MemoryError("none left")

    for bad in (False, True, False):
        numbers = torch.arange(12)[None] % 10
        numbers[0, 0] = 10 if bad and where == "rows" else 0
        if bad and where == "all rows":
            numbers[:] = 10
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failure_agreement, "PATIENCE", 1.0)
            patch.setattr(failure_agreement, "PATIENCE_LATER", 1.0)
            if bad and odd and where.endswith(("backward", "interrupt")):
                patch.setattr(KeysBackward, "add", no_memory)
            try:
                found = model(numbers).square()
                if bad and odd and where.endswith("between"):
                    patch.setattr(convert, "mesh_of", no_memory)
                found.sum().backward()
                said.append("" if torch.allclose(found, alone(numbers).square()) else "wrong")
            except (IndexError, MemoryError, KeyboardInterrupt, RingCommError) as error:
                said.append(f"{type(error).__name__}: {error}")
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return said


@needs_reading
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("rows", "IndexError: index out of range in self"),
        ("backward", "MemoryError: none left"),
        ("interrupt", "KeyboardInterrupt: stopped"),
    ],
)
def test_what_cuts_a_call_short_on_one_rank_ends_the_mesh(ranks: Ranks, where: str, told: str) -> None:
    """A program that catches it would send its next batch to ranks that are still in this one."""
    (fine, raised, after), (others_fine, others_raised, others_after) = ranks(2, cut_short, where)
    assert fine == others_fine == ""
    assert raised == told
    assert "Connection closed by rank 0" in others_raised
    assert f"was not begun: an earlier call was cut short by {told}, and the ranks are not at the same" in after
    assert "was not begun: an earlier message has failed" in others_after


@needs_reading
def test_what_cuts_a_backward_short_between_its_operators_ends_the_mesh_at_the_next_call(ranks: Ranks) -> None:
    """Autograd tells nobody of it. The others, still in that backward, would take the next batch for its messages."""
    (fine, raised, after), (others_fine, others_raised, others_after) = ranks(2, cut_short, "between")
    assert (fine, others_fine, raised) == ("", "", "MemoryError: none left")
    assert "was not begun: an earlier backward was cut short by an error, and the ranks are not at the same" in after
    assert "Connection closed by rank 0" in others_raised
    assert "was not begun: an earlier message has failed" in others_after


@pytest.mark.sample(3)
@needs_reading
@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("all rows", "IndexError: index out of range in self"),
        ("all backward", "MemoryError: none left"),
        ("all between", "MemoryError: none left"),
    ],
)
def test_what_cuts_a_call_short_on_all_ranks_ends_nothing(ranks: Ranks, where: str, told: str) -> None:
    """An input that every rank has: none of them has sent what another does not wait for."""
    assert ranks(2, cut_short, where) == 2 * [["", told, ""]]


def by_compiled_autograd() -> list[bool]:
    torch.manual_seed(0)
    alone, numbers = Tokens(), torch.arange(12)[None] % 10
    model = torch.compile(alone, backend="ring", options={"inner_backend": "aot_eager", "timeout": 33.6})
    expected = torch.autograd.grad(alone(numbers).square().sum(), alone.table.weight)[0]
    said = []
    for context in (nullcontext(), compiled_autograd._enable(torch.compile(backend="eager")), nullcontext()):
        alone.zero_grad()
        with context:
            model(numbers).square().sum().backward()
        said.append(torch.allclose(alone.table.weight.grad, expected))
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return said


def test_a_backward_may_be_one_of_compiled_autograd(ranks: Ranks) -> None:
    """Which traces what listens for its begin."""
    assert ranks(2, by_compiled_autograd) == 2 * [[True, True, True]]


def test_ranks_that_were_cut_short_at_different_messages_do_not_go_on() -> None:
    def place(sent: dict[str, int], received: dict[str, int], collectives: int = 2, **more: Any) -> dict[str, object]:
        return {"sent": sent, "received": received, "collectives": collectives, "programs": 1, "torn": False} | {
            "error": "MemoryError",
            **more,
        }

    assert match([place({"1": 3}, {}), place({}, {"0": 3})])
    assert not match([place({"1": 3}, {}), place({}, {"0": 2})]), "a message that was sent, and is not received"
    assert not match([place({}, {}), place({}, {}, 3)]), "a sum that only one has begun"
    assert not match([place({}, {}), place({}, {}, programs=2)]), "a program that only one has begun"
    assert not match([place({}, {}), place({}, {}, error="IndexError")]), "an error that only one has"
    assert not match(2 * [place({}, {}, torn=True)]), "a message that may have been posted"


def late(seconds: float) -> bool:
    """Whether this rank may go on, that comes to the error as many seconds after the others."""
    mesh = process_mesh(timeout_s=33.5)
    store = dist.distributed_c10d._get_process_group_store(mesh.group)
    time.sleep(seconds * mesh.rank)
    return all_alike(store, f"late {seconds}", mesh.rank, mesh.size, Place(error="MemoryError"), mesh.attend, 1.0)


def test_a_rank_that_comes_late_to_an_error_does_not_go_on_alone(ranks: Ranks) -> None:
    assert ranks(2, late, 0.1) == [True, True]
    assert ranks(2, late, 2.0) == [False, False]


def forked() -> tuple[str, set[int], float]:
    """What a process is told that was forked from a rank, the sockets that it has, and what the rank finds after it."""
    mesh = process_mesh(timeout_s=33.0)
    mesh.all_reduce(torch.ones(1))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mesh.all_reduce(torch.ones(1))
        except RingCommError as error:
            lines = mesh._links.lines.values() if mesh._links is not None else ()
            os.write(theirs, pickle.dumps((str(error), {line.socket.fileno() for line in lines})))
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as told:
        said, sockets = pickle.loads(told.read())
    os.waitpid(child, 0)
    total = mesh.all_reduce(torch.ones(1)).item()
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return said, sockets, total


@needs_reading
def test_a_process_forked_from_a_rank_is_no_rank(ranks: Ranks) -> None:
    """Such as a worker of a DataLoader. Its peers would read the memory of the rank, at the addresses of its own."""
    for said, sockets, total in ranks(2, forked):
        assert said.startswith("mesh 'world' belongs to process ") and "forked from it, which is no rank" in said
        assert sockets == {-1} and total == 2.0, "closed in the fork, open in the rank"


# Those of a group are uncaught: it is of no use after them, and the pool starts its ranks anew.
def lose_rank_1(how: str, transport: str) -> None:
    mesh = mesh_over(transport, 2.0)
    mesh.all_reduce(torch.ones(1))
    if mesh.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    mesh.exchange([(1, torch.ones(1000))], [(1, torch.empty(1000))], "forward 0").wait()


@pytest.mark.parametrize("transport", ["memory", "group"])
def test_a_rank_that_dies(ranks: Ranks, transport: str) -> None:
    with pytest.raises(RankError) as raised:
        ranks(2, lose_rank_1, "dies", transport)
    assert "then rank 0: RingCommError: rank 0 of 2 (world), forward 0: " in str(raised.value)


@pytest.mark.parametrize("transport", ["memory", "group"])
def test_a_rank_that_hangs_is_an_error_after_the_timeout(ranks: Ranks, transport: str) -> None:
    with pytest.raises(RankError) as raised:
        ranks(2, lose_rank_1, "hangs", transport)
    said = str(raised.value).splitlines()[0]
    assert "RingCommError: rank 0 of 2 (world), forward 0: receive of 4000 bytes from rank 1 failed after 2." in said
    assert "Timed out waiting 2000ms" in said and "look at the output of the other ranks" in said
