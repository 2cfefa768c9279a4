"""The pool returns in rank order and turns every way to fail into a RankError, soon."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.pool import RankError, RankPool

Ranks = Callable[..., list[Any]]


class Box:
    """A class of the test module itself, which travels both ways."""

    def __init__(self, value: int):
        self.value = value


def who() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def total(start: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(start.add_(dist.get_rank()))
    return start


def boxed(box: Box) -> Box:
    return Box(box.value + dist.get_rank())


def draw() -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"boom {rank}")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(1)


def unpicklable() -> Callable[[], int]:
    return lambda: 1


@pytest.mark.parametrize("p", [1, 2, 3, 4, 2])
def test_results_come_in_rank_order(ranks: Ranks, p: int) -> None:
    assert [(rank, size) for rank, size, _ in ranks(p, who)] == [(rank, p) for rank in range(p)]


@pytest.mark.parametrize("p", [2, 4])
def test_the_process_group_works(ranks: Ranks, p: int) -> None:
    for result in ranks(p, total, torch.ones(3)):
        assert result.tolist() == [p + p * (p - 1) / 2] * 3


def test_processes_are_kept(ranks: Ranks) -> None:
    pids = [pid for _, _, pid in ranks(4, who)]
    assert [pid for _, _, pid in ranks(2, who)] == pids[:2]


def test_every_call_starts_from_the_same_state(ranks: Ranks) -> None:
    assert ranks(2, draw) == ranks(2, draw)
    assert {threads for _, threads in ranks(2, draw)} == {1}


def test_classes_of_a_test_module_travel(ranks: Ranks) -> None:
    assert [box.value for box in ranks(2, boxed, Box(5))] == [5, 6]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_raise_ends_the_call_with_its_traceback(ranks: Ranks, rank: int) -> None:
    with pytest.raises(RankError, match=rf"rank {rank} of 3 in .*raise_on: ValueError: boom {rank}\n") as raised:
        ranks(3, raise_on, rank)
    assert raised.value.rank == rank
    assert 'raise ValueError(f"boom {rank}")' in str(raised.value)
    assert len(ranks(3, who)) == 3  # the pool has started again


def test_a_dead_process_ends_the_call(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 in .*die_on: the process died with exit code -9"):
        ranks(2, die_on, 1)
    assert len(ranks(2, who)) == 2


def test_a_hang_ends_with_the_stack_of_the_rank(ranks: Ranks) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 in .*hang_on: no result after 3 s") as raised:
        ranks(2, hang_on, 1, timeout=3)
    assert "in hang_on" in str(raised.value)
    assert 3 <= time.monotonic() - begin < 60
    assert len(ranks(2, who)) == 2


def test_a_rank_that_died_between_calls_is_replaced() -> None:
    pool = RankPool()
    try:
        _, _, pid = pool.run(2, who)[1]
        os.kill(pid, signal.SIGKILL)
        pool._ranks[1].process.join()
        assert len(pool.run(2, who)) == 2
    finally:
        pool.close()


def test_a_result_that_cannot_travel_is_a_failure(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 in .*unpicklable: .*pickle"):
        ranks(1, unpicklable)


def test_only_functions_of_a_module(ranks: Ranks) -> None:
    for function in (lambda: 1, functools.partial(who)):
        with pytest.raises(TypeError, match="is not a function of a module"):
            ranks(2, function)


def test_at_most_eight_ranks(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="9 ranks asked for: the pool holds 1 to 8"):
        ranks(9, who)
