"""Which ranks of a mesh share a node, from the variables of the launcher, agreed over the ranks."""

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

# Set by torchrun: the number of processes on the node. Ranks are numbered node by node.
VARIABLE = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True)
class Nodes:
    """Each `size` consecutive ranks share a node; 0 where this does not hold, or is not known, and `why`. `source`: the
    variable or data sheet that it is from."""

    size: int
    why: str = ""
    source: str = VARIABLE


# The agreed nodes, per mesh. Ranks that are threads of one process share a mesh, hence the rank.
_agreed: WeakKeyDictionary[Mesh, dict[int, Nodes]] = WeakKeyDictionary()


def nodes_of(mesh: Mesh) -> Nodes:
    """The nodes of a mesh. Collective, once per mesh: every rank must call it, in the same order of calls. Of a
    pretended mesh they are those of its hardware, or as the variable of this process has it. Raises RingCommError."""
    if isinstance(mesh, PretendedMesh):
        if mesh.hardware is not None:
            source = f"the data sheet of {mesh.hardware}"
            return Nodes(device_of(mesh.hardware).node, f"{source} names none", source)
        return nodes_from([(_local_world_size(), rank) for rank in range(mesh.size)])
    known = _agreed.setdefault(mesh, {})
    if mesh.rank not in known:
        number = mesh.ranks[mesh.rank] if isinstance(mesh, ProcessMesh) else mesh.rank
        with unset_fake_temporarily():  # strategies are chosen while a graph is traced
            gathered = mesh.all_gather(torch.tensor([_local_world_size(), number], device=mesh.device), "nodes")
        known[mesh.rank] = nodes_from([(int(size), int(rank)) for size, rank in gathered])
    return known[mesh.rank]


def _local_world_size() -> int:
    """The number of ranks on this node, 0 where VARIABLE is not set to a number."""
    size = os.environ.get(VARIABLE, "")
    return int(size) if size.isdecimal() else 0


def nodes_from(ranks: Sequence[tuple[int, int]]) -> Nodes:
    """The nodes of a mesh, from (local world size, global rank) of each of its ranks in order."""
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
