"""Comparison of programs and inputs over the ranks, by digests: a few words a value are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.distributed.mesh import Mesh
from ringopt.distributed.tensor_digest import word_of
from ringopt.errors import RingMismatchError
from ringopt.ir.canonical_order import Program

WORDS = 4  # int64 words of a digest
ADVICE = (
    "Under backend='ring' every rank passes the same full batch and holds the same parameters. If each rank loads its "
    "own data, pass options={'mesh': mesh['cp']}, so that only the ranks of one sequence share it; if it loads its "
    "rows of one batch, ringopt.from_rows makes whole inputs of them"
)


def compare_ranks(
    mesh: Mesh, program: list[int], names: Sequence[str], inputs: Sequence[Any], lines: Program | None = None
) -> None:
    """Compares the digest `program` and the `inputs` over the ranks. Raises the same RingMismatchError on every rank
    where one differs; with the `lines` of its program it names the first line that does."""
    shapes = [f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x) for x in inputs]
    called = [len(inputs), *program]
    headers = mesh.all_gather(torch.tensor([[*called, *digest(repr(shapes).encode())]], device=mesh.device))
    if differing(headers):
        if lines is not None and differing([found[:, : len(called)] for found in headers]):
            raise RingMismatchError(other_programs(mesh, lines))
        raise RingMismatchError(other_shapes(mesh, names, shapes))
    odd = differing(mesh.all_gather(digests_of(inputs, mesh.device)))
    if odd:
        where = "; ".join(f"{names[i]} on ranks {sorted(ranks)}" for i, ranks in _by_row(odd).items())
        raise RingMismatchError(
            f"inputs differ from those of rank 0: {where}. {ADVICE}; if parameters or random number generators "
            "(dropout) differ, call torch.manual_seed with one number on all ranks before building the model"
        )


def other_shapes(mesh: Mesh, names: Sequence[str], shapes: Sequence[str]) -> str:
    """The error message where programs are alike and shapes are not: the first input that is not that of rank 0."""
    texts = [text.split("\n") for text in texts_of_all(mesh, "\n".join(shapes), "shapes")]
    found = [[*text, *["nothing"] * (max(map(len, texts)) - len(text))] for text in texts]
    place = next(i for i, given in enumerate(zip(*found, strict=True)) if len(set(given)) > 1)
    odd = [rank for rank, given in enumerate(found) if given[place] != found[0][place]]
    name = names[place] if place < len(names) else f"input {place}"
    where = "; ".join(f"rank {rank} has {found[rank][place]}" for rank in (0, *odd))
    return (
        f"ranks {odd} were given inputs of other shapes than rank 0. The first that differs is {name}: {where}. Every "
        f"rank must make the same call. {ADVICE}"
    )


SHOWN = 300  # bytes of a line of a program that are sent to the other ranks


def other_programs(mesh: Mesh, program: Program) -> str:
    """The error message where programs differ, with the first line that is not that of rank 0, of every odd rank."""
    longest = max(int(count) for count in mesh.all_gather(torch.tensor([len(program.lines)], device=mesh.device)))
    digests = [digest(line.encode())[0] for line in program.lines] + [0] * (longest - len(program.lines))
    gathered = mesh.all_gather(torch.tensor(digests, device=mesh.device))
    unequal = torch.stack([other != gathered[0] for other in gathered])
    place = int(unequal.any(0).nonzero()[0])
    odd = unequal[:, place].nonzero().flatten().tolist()
    line, source = ("nothing", "") if place >= len(program.lines) else (program.lines[place], program.sources[place])
    text = (line + (f" ({source})" if source else "")).encode()[:SHOWN]
    mine = torch.tensor([*text, *[0] * (SHOWN - len(text))], dtype=torch.uint8, device=mesh.device)
    lines = [bytes(found.tolist()).rstrip(b"\0").decode(errors="replace") for found in mesh.all_gather(mine)]
    where = "; ".join(f"rank {rank} has {lines[rank]}" for rank in (0, *odd))
    return (
        f"ranks {odd} compiled another program than rank 0, whatever order it is written in. The first node that "
        f"differs: {where}. Every rank must build the same model, in the same mode, and make the same call with the "
        "same full batch; the model must not ask for its rank (if rank == 0: print), and must draw random numbers in "
        "one order (not by going through a set)"
    )


def differing(gathered: Sequence[Tensor]) -> dict[int, list[int]]:
    """rank -> indices of the rows of its table of digests in which it differs from rank 0."""
    first = gathered[0]
    unequal = {rank: (other != first).any(1).nonzero().flatten().tolist() for rank, other in enumerate(gathered)}
    return {rank: found for rank, found in unequal.items() if found}


def _by_row(odd: dict[int, list[int]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for rank, found in odd.items():
        for row in found:
            rows.setdefault(row, []).append(rank)
    return rows


def digest(data: Any) -> list[int]:
    """WORDS int64 words of a BLAKE2b hash of bytes."""
    whole = hashlib.blake2b(data, digest_size=8 * WORDS).digest()
    return [int.from_bytes(whole[i : i + 8], "little", signed=True) for i in range(0, 8 * WORDS, 8)]


def digests_of(values: Sequence[Any], device: torch.device) -> Tensor:
    """int64 [values, WORDS] on `device`: a hash of each; of a tensor that lies on a device a word that is made there
    (tensor_digest.py), and 0, for all parameters of a model would take long to come to the host."""
    away = [place for place, x in enumerate(values) if is_away(x)]
    table = torch.tensor([[0] * WORDS if is_away(x) else digest(bytes_of(x)) for x in values], dtype=torch.int64)
    table = table.reshape(-1, WORDS).to(device)
    if away:
        words = torch.stack([word_of(values[place]).to(device) for place in away])
        table[:, 0].index_copy_(0, torch.tensor(away, device=device), words)
    return table


def is_away(value: Any) -> bool:
    """Whether it is a tensor whose numbers are on a device."""
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and value.numel() > 0


def bytes_of(value: Any) -> Any:
    """The bytes of a tensor in row-major order, copied to the CPU; of other values their repr."""
    if not isinstance(value, Tensor):
        return repr(value).encode()
    if not value.numel():
        return b""
    # A copy, for numpy() forbids its tensor's memory to be resized, which FSDP does to parameters.
    return value.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).cpu().numpy().data


def texts_of_all(mesh: Mesh, mine: str, label: str) -> list[str]:
    """The text of every rank, in rank order. All ranks come here together; `label` names their two messages."""
    data = mine.encode()
    lengths = mesh.all_gather(torch.tensor([len(data)], device=mesh.device), label)
    padded = data.ljust(max(int(length) for length in lengths), b"\0")
    sent = torch.tensor(list(padded), dtype=torch.uint8, device=mesh.device)
    return [bytes(part.tolist()).rstrip(b"\0").decode() for part in mesh.all_gather(sent, label)]
