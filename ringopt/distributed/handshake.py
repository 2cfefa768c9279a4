"""Comparison of the arguments of a call over the ranks, once per call with new shapes, before its first message.

The transport does not check: on gloo a message longer than the receive buffer ends the process, and a shorter one is
accepted, with no error and wrong numbers.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from ringopt.distributed.consistency import digest, texts_of_all
from ringopt.distributed.mesh import Mesh
from ringopt.errors import RingMismatchError

Value: TypeAlias = int | float | str | bool
Key: TypeAlias = tuple[tuple[str, Value], ...]

# The keys that have been compared, per mesh. Ranks that are threads of one process share a mesh, hence the rank.
_agreed: WeakKeyDictionary[Mesh, set[Hashable]] = WeakKeyDictionary()


def agree(mesh: Mesh, key: Key) -> bool:
    """Compares `key`, a tuple of (field, value), over the ranks of `mesh`; a no-op for a key that has been compared.
    Returns whether it is new, which all ranks are told alike.

    Raises the same RingMismatchError on every rank: which rank is odd, in which field, and both values. If some ranks
    call it with a new key and others with a known one, the former end in a timeout of the transport.
    """
    agreed = _agreed.setdefault(mesh, set())
    if (mesh.rank, key) in agreed:
        return False
    if mesh.size > 1:
        text = json.dumps(key)
        headers = mesh.all_gather(torch.tensor(digest(text.encode()), device=mesh.device), "handshake")
        if not all(torch.equal(headers[0], header) for header in headers):
            raise RingMismatchError(_difference([_named(found) for found in texts_of_all(mesh, text, "handshake")]))
    agreed.add((mesh.rank, key))
    return True


def _named(text: str) -> dict[str, str]:
    """The fields of a key, with values as JSON."""
    return {field: json.dumps(value) for field, value in json.loads(text)}


def _difference(keys: list[dict[str, str]]) -> str:
    """The error message: the first field in which ranks differ. The odd ranks are those outside the largest equal
    group."""
    fields = dict.fromkeys(field for key in keys for field in key)
    field = next(field for field in fields if any(key.get(field) != keys[0].get(field) for key in keys))
    groups: dict[str | None, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key.get(field), []).append(rank)
    common, *odd = sorted(groups.items(), key=lambda group: -len(group[1]))
    odds = "; ".join(f"{_ranks(ranks)} {field}={value}" for value, ranks in odd)
    call = json.loads(keys[common[1][0]].get("op", '"call"'))
    return (
        f"the ranks do not make the same {call}: {odds}, but {_ranks(common[1])} {field}={common[0]}. Every rank must "
        "make the same calls, in the same order, with shards of the same sequence"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
