"""One set of rates for all ranks of a mesh: strategies chosen from unequal rates would be unequal programs."""

from __future__ import annotations

import json
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.distributed.nodes import nodes_of
from ringopt.errors import OptionError
from ringopt.hardware.profile import here
from ringopt.hardware.rates import Rates
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

# The agreed rates, per mesh. Ranks that are threads of one process share a mesh, hence the rank.
_agreed: WeakKeyDictionary[Mesh, dict[int, Rates]] = WeakKeyDictionary()

DIGEST = 8  # bytes


def agreed_rates(mesh: Mesh, device: str = "cpu") -> Rates:
    """The rates of rank 0, on every rank, also where a rank has others (a profile on one machine only).

    Collective, once per mesh: every rank must call it, in the same order of calls. For a pretended mesh they are those
    of this machine. Raises OptionError on every rank where rank 0 cannot read its profile; RingCommError.
    """
    if isinstance(mesh, PretendedMesh) or mesh.size == 1:
        return over_nodes(here(device), mesh)
    known = _agreed.setdefault(mesh, {})
    if mesh.rank not in known:
        known[mesh.rank] = over_nodes(_ask(mesh, device), mesh)
    return known[mesh.rank]


def over_nodes(rates: Rates, mesh: Mesh) -> Rates:
    """The rates with the number of ranks a node, if the profile has a link between nodes. Where the nodes are not
    known, every message counts as one between nodes."""
    if rates.between is None:
        return rates
    nodes = nodes_of(mesh)
    return replace(rates, node=nodes.size) if nodes.size else rates.beyond


def _ask(mesh: Mesh, device: str) -> Rates:
    mine, problem = cleanly(device)
    text = json.dumps(mine.to_dict() if mine is not None else {"problem": problem}).encode()
    digest = bytes.fromhex(mine.digest) if mine is not None else bytes(DIGEST)
    header = [len(text), int.from_bytes(digest, "little", signed=True)]
    with unset_fake_temporarily():  # strategies are chosen while a graph is traced
        return _of_rank_0(mesh, mine, text, header)


def _of_rank_0(mesh: Mesh, mine: Rates | None, text: bytes, header: list[int]) -> Rates:
    headers = mesh.all_gather(torch.tensor(header, device=mesh.device), "rates")
    if mine is not None and all(int(other[1]) == header[1] for other in headers):
        return mine
    longest = max(int(other[0]) for other in headers)
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=mesh.device)
    first = json.loads(bytes(mesh.all_gather(padded, "rates")[0].tolist()))
    if "problem" in first:
        raise OptionError(f"rank 0: {first['problem']}")
    rates = Rates.of_dict(first)
    return Rates.of_dict({**rates.to_dict(), "source": f"{rates.source} (of rank 0; other ranks have other rates)"})


def cleanly(device: str) -> tuple[Rates | None, str]:
    """The rates of this machine, or None and the error: the other ranks wait for either."""
    try:
        return here(device), ""
    except OptionError as error:
        return None, str(error)
