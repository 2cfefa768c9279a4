"""All ranks hear of a difference, and of the same one."""

from __future__ import annotations

import pytest

from ringopt.distributed.handshake import Key, agree
from ringopt.distributed.mesh import PretendedMesh
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import RingMismatchError
from tests.harness.threads import ThreadMesh, run_on_threads

KEY: Key = (("op", "ring_attention"), ("length", 64), ("scale", 0.125), ("causal", True), ("dtype", "torch.float32"))


def changed(**fields: int | float | str | bool) -> Key:
    return tuple((field, fields.get(field, value)) for field, value in KEY)


def refusals(*keys: Key) -> list[str]:
    """What each rank is told."""

    def body(mesh: ThreadMesh) -> str:
        with pytest.raises(RingMismatchError) as raised:
            agree(mesh, keys[mesh.rank])
        return str(raised.value)

    return run_on_threads(len(keys), body)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ((KEY, KEY, changed(length=48)), "rank 2 has length=48, but ranks 0, 1 have length=64"),
        ((changed(length=48), KEY, KEY), "rank 0 has length=48, but ranks 1, 2 have length=64"),
        ((KEY, changed(scale=0.1)), "rank 1 has scale=0.1, but rank 0 has scale=0.125"),
        ((KEY, changed(dtype="torch.half")), 'rank 1 has dtype="torch.half", but rank 0 has dtype="torch.float32"'),
        ((KEY, KEY, changed(length=8, scale=1.0), changed(length=9)), "rank 2 has length=8; rank 3 has length=9, but"),
        ((KEY, KEY[:-1]), 'rank 1 has dtype=None, but rank 0 has dtype="torch.float32"'),
        ((changed(causal=True), changed(causal=1)), "rank 1 has causal=1, but rank 0 has causal=true"),
    ],
)
def test_the_odd_rank_and_the_first_field_are_named(keys: tuple[Key, ...], told: str) -> None:
    sentences = refusals(*keys)
    assert len(set(sentences)) == 1, "all ranks raise the same"
    assert sentences[0].startswith("the ranks do not make the same ring_attention: ")
    assert told in sentences[0]
    assert sentences[0].endswith("with shards of the same sequence")


def test_different_operators() -> None:
    (told, _, _) = refusals(KEY, KEY, changed(op="ring_attention_backward"))
    assert 'rank 2 has op="ring_attention_backward", but ranks 0, 1 have op="ring_attention"' in told


def test_what_is_agreed_is_not_asked_again() -> None:
    def body(mesh: ThreadMesh) -> None:
        for key in (KEY, KEY, changed(length=8), KEY):
            agree(mesh, key)

    with record_traffic() as traffic:
        run_on_threads(3, body)
    assert [event.label for event in traffic.of(1).events] == ["handshake"] * 2
    assert {event.bytes for event in traffic.events} == {2 * 4 * 8}, "four words to each of two others"


def test_another_mesh_asks_anew() -> None:
    for _ in range(2):
        with record_traffic() as traffic:
            run_on_threads(2, lambda mesh: agree(mesh, KEY))
        assert len(traffic.of(0).events) == 1


def test_one_rank_agrees_with_itself() -> None:
    agree(PretendedMesh(0, 1), KEY)
