"""Where rows lie, and how they are packed."""

from __future__ import annotations

import pytest
import torch

from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Local
from ringopt.context_parallel.plan.exchange import Cargo, Message
from ringopt.errors import PlanError

OWN = (range(0, 2), range(6, 8))
K = torch.arange(4.0).view(1, 1, 4, 1)
V = 10 + torch.arange(8.0).view(1, 1, 4, 2)


def held() -> Held:
    return Held(KVShape.of(K, V), OWN, Local(OWN), K, V)


def leaving(*rows: range) -> Message:
    return Message(0, 1, Cargo.OUT, rows)


def test_local_rows() -> None:
    local = Local(OWN)
    assert [local.slice(range(*ends)) for ends in ((0, 2), (1, 2), (6, 8), (7, 8))] == [
        slice(0, 2), slice(1, 2), slice(2, 4), slice(3, 4),
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"rows range\(1, 7\) are not in one piece of the local rows"):
        local.slice(range(1, 7))


def test_a_message_holds_k_then_v_of_each_piece() -> None:
    assert held().take(leaving(*OWN)).tolist() == [0, 1, 10, 11, 12, 13, 2, 3, 14, 15, 16, 17]


def test_a_message_is_read_back() -> None:
    there = Held(KVShape.of(K, V), (), Local(()), K[:, :, :0], V[:, :, :0])
    packed = there.shape.empty(OWN)
    packed.flat.copy_(held().take(leaving(*OWN)))
    there.put(packed)
    key, value = there.pair(range(7, 8))
    assert key.flatten().tolist() == [3] and value.flatten().tolist() == [16, 17]
    assert there.take(leaving(*OWN)).data_ptr() == packed.flat.data_ptr(), "sent on without a copy"
    assert there.take(leaving(*OWN[1:])).tolist() == [2, 3, 14, 15, 16, 17]
    there.drop(OWN[:1])
    with pytest.raises(PlanError, match=r"rows range\(0, 1\) are not here; here are \(range\(6, 8\),\)"):
        there.pair(range(0, 1))


def test_rows_of_two_buffers_are_packed_anew() -> None:
    there = Held(KVShape.of(K, V), (), Local(()), K[:, :, :0], V[:, :, :0])
    for piece in OWN:
        packed = there.shape.empty((piece,))
        packed.flat.copy_(held().take(leaving(piece)))
        there.put(packed)
    assert there.take(leaving(*OWN)).tolist() == held().take(leaving(*OWN)).tolist()


def test_gradients_go_home_or_into_the_message_that_carries_them() -> None:
    message = Message(0, 1, Cargo.BACK, (range(2, 4),))
    gradients = Gradients(KVShape.of(K, V, torch.float64), OWN, Local(OWN), 4, [message])
    dk, dv = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 2)
    for rows in (range(6, 7), range(3, 4), range(3, 4)):
        gradients.add(rows, dk, dv)
    assert gradients.take(message).tolist() == [0, 2, 0, 0, 2, 2]
    assert gradients.home()[0].flatten().tolist() == [0, 0, 1, 0]
    assert gradients.home()[1].dtype == torch.float64
    with pytest.raises(PlanError, match="have no way home: the rank sends on nothing"):
        gradients.add(range(3, 4), dk, dv)


def test_a_message_to_which_nothing_was_added_carries_zeros() -> None:
    message = Message(0, 1, Cargo.BACK, (range(2, 4),))
    gradients = Gradients(KVShape.of(K, V), OWN, Local(OWN), 4, [message])
    assert gradients.take(message).tolist() == [0] * 6
