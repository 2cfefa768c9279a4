"""Ranks whose batches come apart after the first call: an error of that call, on all ranks, that names what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from ringopt.distributed.roll_call import batch as batches
from ringopt.distributed.roll_call import entrance
from ringopt.distributed.roll_call.batch import Batch
from ringopt.distributed.standing import Call
from ringopt.errors import RingMismatchError
from tests.harness.threads import ThreadMesh, run_on_threads

Ranks = Callable[..., list[Any]]

N = 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor, scale: float, extra: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(ids) * scale + extra.sum()
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return self.out(seen.transpose(1, 2).flatten(2))


def batch(step: int, length: int = N) -> dict[str, Any]:
    source = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(0, 16, (2, length), generator=source),
        "mask": torch.rand(2, 1, length, length, generator=source).lt(0.8).logical_or(torch.eye(length).bool()),
        "scale": 1.0 + step,
        "extra": torch.zeros(0, 3),
    }


def one_element(given: dict[str, Any]) -> None:
    given["ids"][1, 17] = (given["ids"][1, 17] + 1) % 16


def in_the_mask(given: dict[str, Any]) -> None:
    given["mask"][1, 0, 5, 6] ^= True


def in_a_scalar(given: dict[str, Any]) -> None:
    given["scale"] += 2**-20


def another_length(given: dict[str, Any]) -> None:
    given |= batch(2, N + 4)


def rows_of_nothing(given: dict[str, Any]) -> None:
    given["extra"] = torch.zeros(0, 5)


CHANGES = {each.__name__: each for each in (one_element, in_the_mask, in_a_scalar, another_length, rows_of_nothing)}
EQUAL = ""


def trained(steps: list[str], odd: int, options: dict[str, Any]) -> list[str]:
    """What each step says on this rank; rank `odd` is given another batch in those that are no EQUAL ones."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().double()
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager", "timeout": 60.0, **options})
    said = []
    for step, change in enumerate(steps):
        given = batch(step, N + 8 if step == 1 else N)  # so that lengths are open
        if change and dist.get_rank() == odd:
            CHANGES[change](given)
        try:
            expected = model(**given)
            found = compiled(**given)
            torch.testing.assert_close(found, expected)
            found.square().mean().backward()
            said.append("")
        except (RingMismatchError, BackendCompilerFailed) as error:
            said.append(str(error))
    return said


TOLD = {
    "one_element": "ids on ranks [{odd}] (other numbers in [2, 24] int64)",
    "in_the_mask": "mask on ranks [{odd}] (other numbers in [2, 1, 24, 24] bool)",
    "in_a_scalar": "scale on ranks [{odd}] (other numbers in [] float64)",
    "another_length": "ids on ranks [{odd}] (rank {odd}: [2, 28] int64, rank 0: [2, 24] int64)",
    "rows_of_nothing": "[0, 5] float32",  # which compiles another graph, on one rank
}


def check(results: list[list[str]], steps: list[str], odd: int) -> None:
    for said in results:
        for change, sentence in zip(steps, said, strict=True):
            assert bool(sentence) == bool(change), (change, sentence)
            assert not change or TOLD[change].format(odd=odd) in sentence, (change, sentence)


@pytest.mark.parametrize(
    "changes", [("in_a_scalar", "another_length"), pytest.param(tuple(TOLD), marks=pytest.mark.zoo)]
)
def test_a_batch_that_differs_on_one_rank(ranks: Ranks, changes: tuple[str, ...]) -> None:
    """It is named, and the mesh goes on: the next call, with equal batches, has the numbers of one process."""
    steps = [EQUAL, EQUAL, *(step for change in changes for step in (change, EQUAL))]
    check(ranks(2, trained, steps, 1, {}), steps, 1)


@pytest.mark.zoo
def test_it_is_not_asked_where_options_say_so(ranks: Ranks) -> None:
    """Nobody hears of it, and the numbers are neither rank's."""
    with pytest.raises(AssertionError, match="not close"):
        ranks(2, trained, [EQUAL, EQUAL, "in_a_scalar"], 1, {"check_inputs": "first"})


# ---- what ranks hold alike ------------------------------------------------------------------------------------------
class Cached(nn.Module):
    """Takes what it has returned, and writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, seen: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state.add_(1)
        q = self.inner(x).unflatten(-1, (2, 8)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return out + seen.mean() + state.sum(), seen * 2


def returned_again(outputs: str) -> tuple[list[str], list[str]]:
    """What comes back from a call is not read again, on no rank; who holds a copy of it holds the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"inner_backend": "aot_eager", "outputs": outputs}
    compiled, rank = torch.compile(Cached(), backend="ring", options=options, dynamic=False), dist.get_rank()
    x, seen, state, said = torch.randn(1, N, 16), torch.randn(3, 5), torch.zeros(2), []
    read: list[str] = []
    original = batches.word_of

    def noted(x: Tensor) -> Tensor:
        read.append(str(tuple(x.shape)))
        return original(x)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(batches, "word_of", noted)
        for step in range(6):
            if step == 3 and rank == 1:
                seen = seen.clone()
            if step == 4 and rank == 1:
                seen[0, 0] += 1
            if step == 5 and rank == 1:
                state = state + 1
            read.append(f"{step}:")
            try:
                x, seen = compiled(x, seen, state)
                said.append("")
            except RingMismatchError as error:
                said.append(str(error))
                x, seen, state = (dist_copy(t) for t in (x, seen, state))
    return said, read


def dist_copy(x: Tensor) -> Tensor:
    x = x.clone()
    dist.broadcast(x, 0)
    return x


@pytest.mark.sample(2)
@pytest.mark.parametrize("outputs", ["gather", "lazy"])
def test_what_a_call_has_made_is_not_read_again(ranks: Ranks, outputs: str) -> None:
    for rank, (said, read) in enumerate(ranks(2, returned_again, outputs)):
        assert [bool(sentence) for sentence in said] == [False, False, False, False, True, True], said
        assert "seen on ranks [1] (other numbers in [3, 5] float32)" in said[4]
        assert "state on ranks [1] (other numbers in [2] float32)" in said[5]
        until = " ".join(read).partition("3:")[0]
        assert until.strip() == "0: 1: 2:", (rank, read)


# ---- the message ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("odd", "named"), [(0, "x0"), (1, "x1"), (12, "x12"), (13, "x13 or x14 or x15"), (15, "x13 or x14 or x15")]
)
def test_each_input_has_a_word_of_its_own_while_there_are_enough(odd: int, named: str) -> None:
    """13 of the 16 words; the last is of all inputs that are left, one of which differs."""

    def body(mesh: ThreadMesh) -> str:
        inputs = [torch.tensor([int(place == odd and mesh.rank == 1)]) for place in range(16)]
        with pytest.raises(RingMismatchError) as raised, mesh.unbroken():
            batches.begin_batch(mesh, Batch.of(7, [f"x{place}" for place in range(16)], inputs, {}))
            mesh.all_reduce(torch.ones(1))  # the first other message, before which the words have come
        return str(raised.value)

    for sentence in run_on_threads(2, body):
        assert f"in an earlier call: {named} on ranks [1] (other numbers in [1] int64)" in sentence


def test_on_the_host_the_ranks_say_what_they_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """All come to the error at once, so another message can tell how their calls differ."""
    calls = [Call("calls a compiled graph", "1", ("[2] int64",)), Call("compiles a graph", "2", ("[3] int64",))]
    monkeypatch.setattr(entrance, "texts_of_all", lambda *_: [json.dumps(asdict(call)) for call in calls])

    def body(mesh: ThreadMesh) -> str:
        with pytest.raises(RingMismatchError) as raised:
            entrance.enter_together(mesh, (entrance.COMPARES, entrance.COMPILES)[mesh.rank])
        return str(raised.value)

    here, there = run_on_threads(2, body)
    assert "This rank calls a compiled graph; rank 1 compiles a graph with inputs [3] int64 where this" in here
    assert "This rank compiles a graph; rank 0 calls a compiled graph with inputs [2] int64 where this" in there


# ---- on a device ----------------------------------------------------------------------------------------------------
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "without_waiting", lambda x: x.tolist)
    for module in (batches, entrance):
        monkeypatch.setattr(module, "on_host", lambda mesh: False)


def test_a_device_answers_when_a_rank_compiles_next_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks come to the late judgement first, whatever they begin."""
    as_on_a_device(monkeypatch)

    def body(mesh: Any) -> str:
        with mesh.unbroken():
            batches.begin_batch(mesh, Batch.of(7, ["x"], [torch.tensor([mesh.rank])], {}))
            mesh.all_reduce(torch.ones(1))  # the first other message, before which the words have come
        with pytest.raises(RingMismatchError) as raised:
            if mesh.rank:
                entrance.enter_together(mesh, entrance.COMPILES)
            else:
                batches.begin_batch(mesh, Batch.of(7, ["x"], [torch.tensor([0])], {}))
        return str(raised.value)

    assert all("x on ranks [1] (other numbers in [1] int64)" in sentence for sentence in run_on_threads(2, body))


def test_on_a_device_no_message_says_what_else_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank does not read it."""
    as_on_a_device(monkeypatch)

    def body(mesh: Any) -> str:
        with pytest.raises(RingMismatchError) as raised:
            entrance.enter_together(mesh, (entrance.COMPILES, entrance.COMPARES)[mesh.rank])
        return str(raised.value)

    for sentence in run_on_threads(2, body):
        assert "rank 0 compiles a graph, rank 1 calls a graph for the first time" in sentence


def test_a_device_answers_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of what was not read, which is gone by then, nothing is claimed."""
    as_on_a_device(monkeypatch)

    def body(mesh: Any) -> list[str]:
        said = []
        for x, y, made in ((0, 0, {}), (0, mesh.rank, {1: 5 + mesh.rank}), (mesh.rank, 0, {}), (0, 0, {}), (0, 0, {})):
            try:
                with mesh.unbroken():
                    batches.begin_batch(mesh, Batch.of(7, ["x", "y"], [torch.tensor([x]), torch.tensor([y])], made))
                said.append("")
            except RingMismatchError as error:
                said.append(str(error))
        return said

    for said in run_on_threads(2, body):
        assert [bool(sentence) for sentence in said] == [False, False, False, True, False]
        assert "x on ranks [1] (other numbers in [1] int64)" in said[3] and "y on ranks" not in said[3]
