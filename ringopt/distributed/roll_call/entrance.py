"""Do all ranks begin the same? Whatever they begin together (a graph is compiled, compared, called), they say so first.

It is one message of one size, so that ranks that begin different things hear of it, where messages of unequal sizes
would be taken for each other. Its words: what is begun; one for the others to read, which need not be equal; and
digests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringopt.distributed.consistency import texts_of_all
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.standing import Call, differences_of_calls
from ringopt.errors import RingMismatchError

LABEL = "entrance"
WIDTH = 16  # words
BEGUN, ASIDE, FREE = range(3)  # of which the third and those that follow hold digests
COMPILES, COMPARES = 1, 2  # begun; a call is named by the digest of its program


# Judgements of what a device has not answered yet. Ranks that are threads of one process share a mesh, hence the rank.
_late: WeakKeyDictionary[Mesh, dict[int, Callable[[], None]]] = WeakKeyDictionary()


def on_host(mesh: Mesh) -> bool:
    """Whether tensors of the mesh are read without waiting for a device."""
    return mesh.device.type == "cpu"


def judge_later(mesh: Mesh, judgement: Callable[[], None]) -> None:
    """Leaves a judgement to what this rank begins next."""
    _late.setdefault(mesh, {})[mesh.rank] = judgement


def settle_late(mesh: Mesh) -> None:
    """What was left by the last call: first of all that is begun, so that all ranks come to it together."""
    judgement = _late.setdefault(mesh, {}).pop(mesh.rank, None)
    if judgement is not None:
        judgement()


def enter_together(mesh: Mesh, begun: int, aside: int = 0) -> list[int]:
    """What each rank says aside, when all have begun the same. Raises RingMismatchError on all ranks alike."""
    settle_late(mesh)
    found = [part.tolist() for part in mesh.all_gather(header(mesh, begun, aside), LABEL)]
    check_begun(mesh, found)
    return [words[ASIDE] for words in found]


def header(mesh: Mesh, begun: int, aside: int, digests: Sequence[int] = ()) -> Tensor:
    """A message, int64 [WIDTH], filled up with zeros."""
    words = [begun, aside, *digests]
    return torch.tensor([*words, *[0] * (WIDTH - len(words))], dtype=torch.int64, device=mesh.device)


def check_begun(mesh: Mesh, found: Sequence[Sequence[int]]) -> None:
    """Raises RingMismatchError where the ranks have begun different things: on the host all ranks alike. On a device a
    rank that calls hears of it later than one that compiles, so no message is sent to say more."""
    if len({words[BEGUN] for words in found}) == 1:
        return
    if on_host(mesh):
        texts = texts_of_all(mesh, json.dumps(asdict(mesh.recent.call)), LABEL)
        calls = {rank: Call.from_json(text) for rank, text in enumerate(texts)}
        apart = differences_of_calls(mesh.rank, calls) or "their graphs differ"
    else:
        doing = {COMPILES: "compiles a graph", COMPARES: "calls a graph for the first time"}
        kinds = [doing.get(words[BEGUN], f"calls graph {words[BEGUN] % 2**32:08x}") for words in found]
        apart = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
    raise RingMismatchError(
        f"the ranks do not begin the same call: {apart}. Every rank must make the same calls, each with the same full "
        "batch and in the same mode (train or eval, with gradients or without)"
    )
