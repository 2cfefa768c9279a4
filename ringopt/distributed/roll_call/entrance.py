"""Do all ranks begin the same? Whatever they begin together (a graph is compiled, compared, called), they say so first.

It is one message of one size, so that ranks that begin different things hear of it, where messages of unequal sizes
would be taken for each other. Its words: what is begun; one for the others to read, which need not be equal; and
digests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from ringopt.distributed.mesh import Mesh
from ringopt.distributed.standing import Call, differences_of_calls
from ringopt.errors import RingMismatchError

WIDTH = 16  # words
BEGUN, ASIDE, FREE = range(3)  # of which the third and those that follow hold digests
COMPILES, COMPARES = 1, 2  # begun; a call is named by the digest of its program


def enter_together(mesh: Mesh, begun: int, aside: int = 0) -> list[int]:
    """What each rank says aside, when all have begun the same. Raises RingMismatchError on all ranks alike."""
    found = [part.tolist() for part in mesh.all_gather(header(mesh, begun, aside), "entrance")]
    check_begun(mesh, found)
    return [words[ASIDE] for words in found]


def header(mesh: Mesh, begun: int, aside: int, digests: Sequence[int] = ()) -> Tensor:
    """A message, int64 [WIDTH], filled up with zeros."""
    words = [begun, aside, *digests]
    return torch.tensor([*words, *[0] * (WIDTH - len(words))], dtype=torch.int64, device=mesh.device)


def check_begun(mesh: Mesh, found: Sequence[Sequence[int]]) -> None:
    """Raises RingMismatchError, on all ranks alike, where the ranks have begun different things."""
    if len({words[BEGUN] for words in found}) == 1:
        return
    calls = [Call(**json.loads(text)) for text in texts_of_all(mesh, json.dumps(asdict(mesh.recent.call)))]
    calls = [Call(**{**asdict(call), "inputs": tuple(call.inputs)}) for call in calls]
    apart = differences_of_calls(mesh.rank, dict(enumerate(calls))) or "their graphs differ"
    raise RingMismatchError(
        f"the ranks do not begin the same call: {apart}. Every rank must make the same calls, each with the same full "
        "batch and in the same mode (train or eval, with gradients or without)"
    )


def texts_of_all(mesh: Mesh, mine: str) -> list[str]:
    """That of every rank, in rank order. All ranks come here together."""
    data = mine.encode()
    lengths = mesh.all_gather(torch.tensor([len(data)], device=mesh.device), "entrance")
    padded = data.ljust(max(int(length) for length in lengths), b"\0")
    brought = torch.tensor(list(padded), dtype=torch.uint8, device=mesh.device)
    return [bytes(part.tolist()).rstrip(b"\0").decode() for part in mesh.all_gather(brought, "entrance")]
