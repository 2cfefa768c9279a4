"""Do all ranks hold the same? Values are compared by digest: a few words a value travel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.mesh import Mesh
from ringopt.errors import RingMismatchError

WORDS = 4  # int64 words of a digest


def compare(mesh: Mesh, program: list[int], names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Raises RingMismatchError on every rank alike when a rank has another program or another input."""
    shapes = [(tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else x for x in inputs]
    header = [len(inputs), *program, *digest(repr(shapes).encode())]
    odd = differing(mesh, torch.tensor([header], device=mesh.device))
    if odd:
        raise RingMismatchError(
            f"ranks {sorted(odd)} compiled another program, or were given inputs of other shapes, than rank 0; "
            f"this is rank {mesh.rank} with {[shape for shape in shapes if shape is not None][:8]}. Every rank must "
            "make the same call with the same full batch, and the model must not ask for its rank (if rank == 0: print)"
        )
    rows = torch.tensor([digest(bytes_of(x)) for x in inputs], device=mesh.device).reshape(-1, WORDS)
    odd = differing(mesh, rows)
    if odd:
        told = "; ".join(f"{names[i]} on ranks {sorted(ranks)}" for i, ranks in by_row(odd).items())
        raise RingMismatchError(
            f"inputs differ from those of rank 0: {told}. Under backend='ring' every rank passes the same full batch "
            "and holds the same parameters. If each rank loads its own data, pass options={'mesh': mesh['cp']}, so "
            "that only the ranks of one sequence share it; if it loads its rows of one batch, ringopt.from_rows makes "
            "whole inputs of them; if parameters or random number generators (dropout) differ, call torch.manual_seed "
            "with one number on all ranks before building the model"
        )


def differing(mesh: Mesh, rows: Tensor) -> dict[int, list[int]]:
    """rank -> numbers of the rows in which it differs from rank 0."""
    gathered = mesh.all_gather(rows)
    first = gathered[0]
    unequal = {rank: (other != first).any(1).nonzero().flatten().tolist() for rank, other in enumerate(gathered)}
    return {rank: found for rank, found in unequal.items() if found}


def by_row(odd: dict[int, list[int]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for rank, found in odd.items():
        for row in found:
            rows.setdefault(row, []).append(rank)
    return rows


def digest(data: Any) -> list[int]:
    whole = hashlib.blake2b(data, digest_size=8 * WORDS).digest()
    return [int.from_bytes(whole[i : i + 8], "little", signed=True) for i in range(0, 8 * WORDS, 8)]


def bytes_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    if not value.numel():
        return b""
    # A copy, for numpy() forbids its tensor's memory to be resized, which FSDP does to parameters.
    return value.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).cpu().numpy().data
