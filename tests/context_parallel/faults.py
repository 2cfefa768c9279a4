"""Faults to plant in right plans, each of which a proof must refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Message, Step

Plans = list[list[Step]]


def change(plans: Plans, rank: int, index: int, field: str, items: Sequence[Any]) -> None:
    plans[rank][index] = replace(plans[rank][index], **{field: tuple(items)})


def without(items: Sequence[Any], item: Any) -> list[Any]:
    rest = list(items)
    rest.remove(item)
    return rest


def pick(plans: Plans, random: Random, field: str, wanted: Callable[[Any], bool] = bool) -> Any:
    """(rank, step, item) of one of all items of a field that are wanted; None where there are none."""
    places = [
        (rank, index, item)
        for rank, plan in enumerate(plans)
        for index, step in enumerate(plan)
        for item in getattr(step, field)
        if wanted(item)
    ]
    return random.choice(places) if places else None


class Faults:
    """Methods named in FAULTS spoil one thing of `plans`; they return False where there is nothing to spoil."""

    def __init__(self, exchange: Exchange, plans: Plans, random: Random):
        self.exchange, self.plans, self.random = exchange, plans, random

    def edit(self, field: str, spoil: Callable[[Any], list[Any]], wanted: Callable[[Any], bool] = bool) -> bool:
        """One item becomes those that `spoil` makes of it."""
        place = pick(self.plans, self.random, field, wanted)
        if place is None:
            return False
        rank, index, item = place
        change(self.plans, rank, index, field, [*without(getattr(self.plans[rank][index], field), item), *spoil(item)])
        return True

    def move(self, field: str, by: int, wanted: Callable[[Any], bool] = bool) -> bool:
        """One item is moved by `by` steps."""
        place = pick(self.plans, self.random, field, wanted)
        if place is None or not 0 <= place[1] + by < len(self.plans[place[0]]):
            return False
        rank, index, item = place
        change(self.plans, rank, index, field, without(getattr(self.plans[rank][index], field), item))
        change(self.plans, rank, index + by, field, [*getattr(self.plans[rank][index + by], field), item])
        return True

    def edit_both(self, spoil: Callable[[Message], list[Message]], cargo: Cargo | None = None, by: int = 0) -> bool:
        """One message becomes others at both ends, `by` steps later."""
        place = pick(self.plans, self.random, "sends", lambda m: cargo in (None, m.cargo))
        if place is None:
            return False
        _, index, message = place
        ends = ((message.source, "sends"), (message.target, "receives"))
        if not all(0 <= index + by < len(self.plans[rank]) for rank, _ in ends):
            return False
        for rank, field in ends:
            change(self.plans, rank, index, field, without(getattr(self.plans[rank][index], field), message))
            new = [*getattr(self.plans[rank][index + by], field), *spoil(message)]
            change(self.plans, rank, index + by, field, new)
        return True

    def remote(self, block: Block) -> bool:
        """No rank has both its queries and its keys."""
        owner = self.exchange.q_layout.owner(block.queries.start)
        return self.exchange.kv_layout.owner(block.keys.start) != owner

    def block_lost(self) -> bool:
        return self.edit("blocks", lambda block: [])

    def block_doubled(self) -> bool:
        return self.edit("blocks", lambda block: [block, block])

    def block_of_another_kind(self) -> bool:
        return self.edit(
            "blocks", lambda block: [replace(block, kind=self.random.choice([k for k in Kind if k is not block.kind]))]
        )

    def block_without_its_last_key(self) -> bool:
        return self.edit("blocks", lambda block: [self.trimmed(block)], self.last_key_is_seen)

    def last_key_is_seen(self, block: Block) -> bool:
        return len(block.keys) > 1 and self.exchange.pattern.pairs(block.queries, block.keys[-1:]) > 0

    def trimmed(self, block: Block) -> Block:
        return Block(block.queries, block.keys[:-1], self.exchange.pattern.kind(block.queries, block.keys[:-1]))

    def block_of_another_rank(self) -> bool:
        place = pick(self.plans, self.random, "blocks")
        others = [rank for rank in range(self.exchange.ranks) if place and rank != place[0] and self.plans[rank]]
        if not others:
            return False
        rank, index, block = place
        other = self.random.choice(others)
        change(self.plans, rank, index, "blocks", without(self.plans[rank][index].blocks, block))
        change(self.plans, other, 0, "blocks", [*self.plans[other][0].blocks, block])
        return True

    def block_too_late(self) -> bool:
        return self.move("blocks", 1, self.remote)

    def block_too_early(self) -> bool:
        return self.move("blocks", -1, self.remote)

    def dropped_never(self) -> bool:
        return self.edit("drops", lambda rows: [])

    def dropped_twice(self) -> bool:
        return self.edit("drops", lambda rows: [rows, rows])

    def dropped_in_part(self) -> bool:
        return self.edit("drops", lambda rows: [rows[1:]], lambda rows: len(rows) > 1)

    def dropped_too_early(self) -> bool:
        return self.move("drops", -1)

    def dropped_too_late(self) -> bool:
        return self.move("drops", 1)

    def send_lost(self) -> bool:
        return self.edit("sends", lambda message: [])

    def receive_lost(self) -> bool:
        return self.edit("receives", lambda message: [])

    def send_too_late(self) -> bool:
        return self.move("sends", 1)

    def receive_too_early(self) -> bool:
        return self.move("receives", -1)

    def send_to_another_rank(self) -> bool:
        return self.edit("sends", lambda m: [replace(m, target=(m.target + 1) % self.exchange.ranks)])

    def send_to_itself(self) -> bool:
        return self.edit("sends", lambda m: [m, replace(m, target=m.source)])

    def receive_of_fewer_rows(self) -> bool:
        return self.edit("receives", lambda m: [replace(m, rows=m.rows[:-1])])

    def receive_of_other_order(self) -> bool:
        return self.edit("receives", lambda m: [replace(m, rows=m.rows[::-1])], lambda m: len(m.rows) > 1)

    def channel_in_other_order(self) -> bool:
        """Two messages from one rank to another in one step, received the other way round."""
        for rank, plan in enumerate(self.plans):
            for index, step in enumerate(plan):
                if len({m.source for m in step.receives}) < len(step.receives):
                    change(self.plans, rank, index, "receives", step.receives[::-1])
                    return True
        return False

    def message_lost(self) -> bool:
        return self.edit_both(lambda message: [])

    def message_doubled(self) -> bool:
        return self.edit_both(lambda message: [message, message])

    def message_of_other_cargo(self) -> bool:
        other = {Cargo.OUT: Cargo.BACK, Cargo.BACK: Cargo.OUT}
        return self.edit_both(lambda message: [replace(message, cargo=other[message.cargo])])

    def message_of_fewer_rows(self) -> bool:
        return self.edit_both(lambda m: [replace(m, rows=(*m.rows[:-1], m.rows[-1][:-1]))])

    def keys_too_late(self) -> bool:
        return self.edit_both(lambda message: [message], Cargo.OUT, by=1)

    def keys_too_early(self) -> bool:
        return self.edit_both(lambda message: [message], Cargo.OUT, by=-1)

    def gradients_lost(self) -> bool:
        return self.edit_both(lambda message: [], Cargo.BACK)

    def gradients_too_early(self) -> bool:
        return self.edit_both(lambda message: [message], Cargo.BACK, by=-1)


SPOILED = ("block", "dropped", "send", "receive", "channel", "message", "keys", "gradients")
FAULTS = [name for name in vars(Faults) if name.split("_")[0] in SPOILED]
