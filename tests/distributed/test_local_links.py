"""Messages between ranks on one node: here threads of one process, each with sockets to all others."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, count
from typing import TypeVar

import pytest
import torch

from ringopt.distributed.intra_node import messages as local_links
from ringopt.distributed.intra_node.collectives import PIECE, LocalCollectives
from ringopt.distributed.intra_node.messages import SHORT, LocalLinks
from tests.distributed.reading import needs_reading

pytestmark = needs_reading

T = TypeVar("T")

LONG = SHORT // 4 + 1  # float32 numbers, one more than are sent in the offer


def joined(p: int, timeout: float = 20.0) -> list[LocalLinks]:
    """All of p ranks with each other."""
    sockets: list[dict[int, tuple[socket.socket, int]]] = [{} for _ in range(p)]
    for a, b in combinations(range(p), 2):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sockets[a][b], sockets[b][a] = ((end, os.getpid()) for end in ends)
    return [LocalLinks(peers, timeout) for peers in sockets]


def run(body: Callable[[int, LocalLinks], T], links: list[LocalLinks]) -> list[T]:
    with ThreadPoolExecutor(len(links)) as pool:
        found = list(pool.map(body, range(len(links)), links))
    assert all(not each.busy for each in links), "both ends of every message have met"
    return found


@pytest.mark.parametrize("numbers", [1, LONG - 1, LONG, 1_000_003])
def test_the_nth_that_is_sent_is_the_nth_that_is_received(numbers: int) -> None:
    def body(rank: int, links: LocalLinks) -> list[torch.Tensor]:
        got = [torch.empty(numbers) for _ in range(3)]
        ends = [links.receive(1 - rank, buffer) for buffer in got]
        ends += [links.send(1 - rank, torch.full((numbers,), 10.0 * rank + i)) for i in range(3)]
        # Offered before anybody receives them.
        ends += [links.send(1 - rank, torch.full((numbers,), 10.0 * rank + i)) for i in range(3, 6)]
        late = [torch.empty(numbers) for _ in range(3)]
        for end in ends[:3]:
            end.wait()
        ends = [*ends[3:], *(links.receive(1 - rank, buffer) for buffer in late)]
        for end in ends:
            end.wait()
        return [*got, *late]

    for rank, got in enumerate(run(body, joined(2))):
        assert [buffer.unique().tolist() for buffer in got] == [[10.0 * (1 - rank) + i] for i in range(6)]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_no_order_in_which_ranks_wait_can_block_them(p: int) -> None:
    """300 messages between any two, short and long, posted in one order and waited for in another by each rank."""
    draw = random.Random(p)
    messages = [(*draw.sample(range(p), 2), draw.choice([1, LONG - 1, LONG, 3 * LONG])) for _ in range(300)]

    def body(rank: int, links: LocalLinks) -> list[float]:
        order, ends, got = random.Random(rank), [], []
        for number, (sender, receiver, numbers) in enumerate(messages):
            if rank == sender:
                ends.append(links.send(receiver, torch.full((numbers,), float(number))))
            elif rank == receiver:
                got.append(torch.empty(numbers))
                ends.append(links.receive(sender, got[-1]))
            if order.random() < 0.1:
                links.attend()
            if len(ends) > 40:
                order.shuffle(ends)
                while len(ends) > 20:
                    ends.pop().wait()
        for end in ends:
            end.wait()
        return [float(x) for buffer in got for x in buffer.unique()]

    for rank, got in enumerate(run(body, joined(p))):
        assert got == [float(number) for number, (_, receiver, _) in enumerate(messages) if receiver == rank]


def test_a_peer_that_computes_blocks_nobody_who_sends_short_messages() -> None:
    """10 MB of them, which no socket holds."""

    def body(rank: int, links: LocalLinks) -> float:
        if rank == 0:
            ends = [links.send(1, torch.full((LONG - 1,), float(i))) for i in range(640)]
            links.receive(1, torch.empty(1)).wait()
            return float(sum(end.done for end in ends))
        time.sleep(0.2)
        got = [torch.empty(LONG - 1) for _ in range(640)]
        for end in [links.receive(0, buffer) for buffer in got]:
            end.wait()
        links.send(0, torch.ones(1)).wait()
        return sum(float(buffer.unique()) for buffer in got)

    assert run(body, joined(2)) == [640.0, 639 * 320]


@pytest.mark.parametrize(("short", "long"), [(20, 0), (11, 8)])
def test_who_has_waited_need_not_come_back(short: int, long: int) -> None:
    """Rank 0 sends short messages and takes long ones, more than a socket holds packets for a peer that computes."""

    def body(rank: int, links: LocalLinks) -> set[float]:
        there = [torch.full((LONG - 1,), float(rank)) for _ in range(short)]
        back = [torch.full((LONG,), float(rank)) for _ in range(long)]
        ends = [(links.receive if rank else links.send)(1 - rank, buffer) for buffer in there]
        ends += [(links.send if rank else links.receive)(1 - rank, buffer) for buffer in back]
        if rank == 1:
            time.sleep(0.2)
        for end in ends:
            end.wait()
        return {float(buffer.unique()) for buffer in (there if rank else back)}

    assert run(body, joined(2, timeout=3.0)) == [{1.0} if long else set(), {0.0}]


def test_messages_are_served_while_their_rank_is_blocked_elsewhere() -> None:
    taken = threading.Event()

    def body(rank: int, links: LocalLinks) -> bool:
        if rank == 1:
            links.send(0, torch.ones(LONG)).wait()
            taken.set()
            return True
        end = links.receive(1, torch.empty(LONG))
        with links.attended():
            blocked = taken.wait(10)
        end.wait()
        return blocked

    assert run(body, joined(2)) == [True, True]


def test_an_error_while_a_rank_is_blocked_elsewhere_ends_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = joined(2)
    end = here.receive(1, torch.empty(4))
    told: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))

    def no_memory(_offer: object) -> None:
        raise MemoryError

    here.expect(here.lines[1], (5, 1), no_memory)
    there.offer(there.lines[0], torch.ones(4), (5, 1))
    with here.attended():
        while not told:
            time.sleep(0.01)
    assert told == [MemoryError]
    with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
        end.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("p", "numbers"), [(2, 1), (3, 1001), (2, 40_001), (3, 40_001), (4, PIECE)])
def test_sums(p: int, numbers: int, dtype: torch.dtype) -> None:
    brought = [(torch.randn(numbers, generator=torch.Generator().manual_seed(r)) * 9).to(dtype) for r in range(p)]

    def body(rank: int, links: LocalLinks) -> torch.Tensor:
        together, total = LocalCollectives(links, rank), brought[rank].clone()
        ends = [together.sum(total), together.sum(again := brought[rank].clone())]
        for end in reversed(ends):
            end.wait()
        assert torch.equal(total, again), "the same bits in every run"
        return total

    totals = run(body, joined(p))
    assert all(torch.equal(total, totals[0]) for total in totals), "the same bits on all ranks"
    expected = torch.stack(brought).double().sum(0)
    tolerance = {torch.bfloat16: 1.0, torch.float32: 1e-4}.get(dtype, 1e-12)
    torch.testing.assert_close(totals[0].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("numbers", [3, LONG])
def test_a_sum_goes_by_no_mode_of_who_serves_it(numbers: int) -> None:
    def body(rank: int, links: LocalLinks) -> list[float]:
        with torch.inference_mode():
            total = torch.ones(numbers)
            end = LocalCollectives(links, rank).sum(total)
        end.wait()
        return total.unique().tolist()

    assert run(body, joined(2)) == [[2.0]] * 2


@pytest.mark.parametrize("numbers", [3, 5000])
def test_gathers_meet_each_other_and_no_message(numbers: int) -> None:
    def body(rank: int, links: LocalLinks) -> list[float]:
        together, right = LocalCollectives(links, rank), (rank + 1) % 3
        parts = [torch.full((numbers,), float(rank)) for _ in range(3)]
        got = torch.empty(numbers)
        # One rank sends before it gathers, the others after.
        ends = [links.send(right, -parts[0])] if rank == 0 else []
        ends += [together.gather(dict(enumerate(parts)))]
        ends += [links.send(right, -parts[rank])] if rank else []
        ends += [links.receive((rank - 1) % 3, got)]
        for end in reversed(ends):
            end.wait()
        return [*(float(part.unique()) for part in parts), float(got.unique())]

    assert run(body, joined(3)) == [[0.0, 1.0, 2.0, -2.0], [0.0, 1.0, 2.0, -0.0], [0.0, 1.0, 2.0, -1.0]]


# ---- faults ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numbers", [4, LONG])
def test_two_ends_of_unequal_length(numbers: int) -> None:
    def body(rank: int, links: LocalLinks) -> str:
        if rank == 0:
            links.send(1, torch.ones(numbers)).wait()
            return ""
        with pytest.raises(RuntimeError) as raised:
            links.receive(0, torch.ones(numbers + 1)).wait()
        return str(raised.value)

    sent, received = run(body, joined(2))
    assert (sent, received) == ("", f"rank 0 has sent {4 * numbers} bytes where {4 * numbers + 4} are received")


@pytest.mark.parametrize("all_serve", [True, False])
def test_a_sum_that_lacks_a_part_reaches_nobody(all_serve: bool) -> None:
    """One of three brings a number more: the first chunk cannot be summed, the others could. Nobody waits for a rank
    that has met the error first, or anything else, and serves no more messages."""

    def body(rank: int, links: LocalLinks) -> str:
        total = LocalCollectives(links, rank).sum(torch.ones(3 * LONG + (rank == 2)))
        if rank == 1 and not all_serve:
            return ""
        with pytest.raises(RuntimeError) as raised:
            total.wait()
        return str(raised.value)

    size, links = 4 * LONG, joined(3, timeout=3.0)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(body, range(3), links))
    assert found == [
        f"rank 2 has sent {size + 4} bytes where {size} are received",
        f"rank 0 has sent 0 bytes where {size} are received" if all_serve else "",
        f"rank 0 has sent 0 bytes where {size + 4} are received",
    ]


def test_a_rank_that_has_failed_is_gone_for_its_peers() -> None:
    here, there = joined(2)
    there.send(0, torch.ones(4)).wait()
    there.fail()
    here.receive(1, torch.empty(4)).wait()
    for end in (here.send(1, torch.ones(LONG)), here.receive(1, torch.empty(4))):
        with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
            end.wait()


def test_a_peer_that_goes() -> None:
    here, there = joined(2)
    there.send(0, torch.ones(4)).wait()
    got = torch.empty(4)
    lost = here.send(1, torch.ones(LONG))
    there.close()
    here.receive(1, got).wait()
    assert got.tolist() == [1.0] * 4, "what it has said before still arrives"
    for end in (lost, here.send(1, torch.ones(LONG)), here.receive(1, torch.empty(LONG))):
        with pytest.raises(RuntimeError, match=rf"Connection closed by rank 1, process {os.getpid()}"):
            end.wait()


def test_what_a_peer_has_offered_is_not_read_when_it_has_left() -> None:
    """Its memory may hold something else by then."""
    here, there = joined(2)
    there.send(0, torch.ones(LONG))
    there.fail()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
        here.receive(1, torch.empty(LONG)).wait()


@pytest.mark.parametrize("numbers", [4, 3 * LONG])
def test_a_rank_that_goes_ends_a_sum_of_three(numbers: int) -> None:
    """The other two wait for each other to add up what it has not brought."""

    def body(rank: int, links: LocalLinks) -> str:
        if rank == 2:
            links.close()
            return ""
        with pytest.raises(RuntimeError) as raised:
            LocalCollectives(links, rank).sum(torch.ones(numbers)).wait()
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(body, range(3), joined(3)))
    assert found == [f"Connection closed by rank 2, process {os.getpid()}"] * 2 + [""]


def test_who_was_stopped_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on while nobody looks: a job that is suspended, and all its ranks with it."""
    looks, monotonic = count(), time.monotonic
    here, there = joined(2, timeout=5.0)
    got = torch.empty(4)
    end = here.receive(1, got)
    later = threading.Timer(0.2, lambda: there.send(0, torch.ones(4)))
    later.start()
    with monkeypatch.context() as patch:
        patch.setattr(local_links.time, "monotonic", lambda: monotonic() + (3600 if next(looks) else 0))
        end.wait()
    later.join()
    assert got.tolist() == [1.0] * 4


def test_a_peer_that_hangs() -> None:
    here, _there = joined(2, timeout=0.3)
    with pytest.raises(RuntimeError, match="Timed out waiting 300ms for rank 1"):
        here.receive(1, torch.empty(4)).wait()


def test_memory_that_cannot_be_read() -> None:
    here, there = joined(2)
    here.lines[1].process = 2**22 + 1  # no process has this number
    there.send(0, torch.ones(LONG))
    with pytest.raises(RuntimeError, match="the memory of process 4194305 cannot be read: No such process"):
        here.receive(1, torch.empty(LONG)).wait()


def test_two_threads_may_wait_at_a_time() -> None:
    here, there = joined(2)
    first, second = torch.empty(LONG), torch.empty(LONG)
    ends = [here.receive(1, buffer) for buffer in (first, second)]
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(end.wait) for end in reversed(ends)]
        time.sleep(0.1)
        pool.submit(lambda: [there.send(0, torch.full((LONG,), x)).wait() for x in (1.0, 2.0)]).result()
        for wait in waits:
            wait.result()
    assert (float(first.unique()), float(second.unique())) == (1.0, 2.0)
