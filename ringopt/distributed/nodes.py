"""Which ranks of a mesh share a node: as the launcher says, agreed over the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakKeyDictionary

import torch

from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.distributed.process import ProcessMesh
from ringopt.hardware.devices import device_of
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

# What torchrun tells each process: how many there are on its node. Ranks are numbered node by node.
VARIABLE = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True)
class Nodes:
    """Each `size` ranks in a row are a node; 0 where there are no such, and `why`. `source`: who says so."""

    size: int
    why: str = ""
    source: str = VARIABLE


# What has been agreed, per mesh. Ranks that are threads of one process share a mesh, hence the rank.
_agreed: WeakKeyDictionary[Mesh, dict[int, Nodes]] = WeakKeyDictionary()


def nodes_of(mesh: Mesh) -> Nodes:
    """Asked of the other ranks once per mesh: every rank of it must come here, in the same order of calls. Of a
    pretended mesh they are those of its hardware, or as this process has been told. Raises RingCommError."""
    if isinstance(mesh, PretendedMesh):
        if mesh.hardware is not None:
            source = f"the data sheet of {mesh.hardware}"
            return Nodes(device_of(mesh.hardware).node, f"{source} names none", source)
        return nodes_from([(told(), rank) for rank in range(mesh.size)])
    known = _agreed.setdefault(mesh, {})
    if mesh.rank not in known:
        number = mesh.ranks[mesh.rank] if isinstance(mesh, ProcessMesh) else mesh.rank
        with unset_fake_temporarily():  # strategies are chosen while a graph is traced
            gathered = mesh.all_gather(torch.tensor([told(), number], device=mesh.device), "nodes")
        known[mesh.rank] = nodes_from([(int(size), int(rank)) for size, rank in gathered])
    return known[mesh.rank]


def told() -> int:
    """0 where nobody says so, or says no number."""
    size = os.environ.get(VARIABLE, "")
    return int(size) if size.isdecimal() else 0


def nodes_from(ranks: Sequence[tuple[int, int]]) -> Nodes:
    """Of ranks of a mesh, in order: each with what it was told, and its number in the world."""
    silent = [rank for rank, (size, _) in enumerate(ranks) if size < 1]
    if silent:
        return Nodes(0, f"rank {silent[0]} is not told how many ranks its node has: {VARIABLE}, which torchrun sets")
    sizes = {size for size, _ in ranks}
    if len(sizes) > 1:
        return Nodes(0, f"nodes have different numbers of ranks: {VARIABLE} is {', '.join(map(str, sorted(sizes)))}")
    numbers = [number // size for size, number in ranks]
    runs = [(node, len(list(members))) for node, members in groupby(numbers)]
    if len({node for node, _ in runs}) < len(runs) or len({length for _, length in runs}) > 1:
        return Nodes(0, f"the ranks of the mesh are, in order, on nodes {numbers}, not equally many in a row on each")
    return Nodes(runs[0][1])
