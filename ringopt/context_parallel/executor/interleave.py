"""Exchanges by turns: while one waits, another computes. Into how many an attention is cut: plan/concurrency.py."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from ringopt.context_parallel.executor.loop import Posted, Run, run_plan
from ringopt.context_parallel.executor.operands import Attention, Operands
from ringopt.context_parallel.plan.concurrency import SubExchange

T = TypeVar("T")
Turns = Generator[None, None, T]


def by_turns(runs: Sequence[Turns[T]]) -> list[T]:
    """What each returns. The order in which they go on is that of `runs`, on every rank."""
    found: dict[int, T] = {}
    while len(found) < len(runs):
        for place, run in enumerate(runs):
            if place not in found:
                try:
                    next(run)
                except StopIteration as done:
                    found[place] = done.value
    return [found[place] for place in range(len(runs))]


def to_the_end(run: Run, first: Posted | None = None) -> Turns[None]:
    """An exchange, until its last message has come or left."""
    last = yield from run_plan(run, first)
    yield
    last.arrive()


def run_alone(run: Run, first: Posted | None = None) -> None:
    """One exchange, that has nobody to take turns with."""
    by_turns([to_the_end(run, first)])


def part_of(attention: Attention, given: Operands, sub: SubExchange) -> tuple[Attention, Operands]:
    """What one of the exchanges is given: views of its heads."""
    own = queries_of(given, sub.heads)
    sinks = given.sinks[:, own] if given.sinks is not None else None
    part = replace(given, q=given.q[:, own], k=kv_heads_of(given.k, sub), v=kv_heads_of(given.v, sub), sinks=sinks)
    return replace(attention, exchange=sub.exchange, first_head=attention.first_head + own.start), part


def queries_of(given: Operands, heads: range) -> slice:
    """The query heads of some KV heads."""
    each = given.q.shape[1] // given.k.shape[1]
    return slice(heads.start * each, heads.stop * each)


def kv_heads_of(x: Tensor, sub: SubExchange) -> Tensor:
    """Of K or V."""
    return x[:, sub.heads.start : sub.heads.stop]
