"""One process a GPU, or on the CPU: the same attentions by NCCL, or by gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringopt.distributed.lookup import process_mesh
from ringopt.errors import OptionError
from ringopt.tools.benchmarks.gpu.checks import sites, skipped, verdict
from ringopt.tools.benchmarks.lab.names import TIMEOUT
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row


def on_rank(rank: int, size: int, on_gpus: bool, tokens: int) -> list[Row]:
    """The rows of one rank."""
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh, rows = process_mesh(None, TIMEOUT), list[Row]()
    mesh.meet_on(device)
    for site in sites(tokens):
        what = f"{site.mask}, {site.strategy}, {size} ranks"
        try:
            found = site.on(mesh, size, None, site.operands(device))
        except OptionError as error:
            rows.append(skipped("processes", what, str(error)))
            continue
        exact = site.of_rank(site.exact(device), rank, size)
        rows.append(verdict("processes", what, distance([x.float() for x in found], exact)))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def worst(of_ranks: list[list[Row]]) -> list[Row]:
    """Of each attention the row of the rank that is farthest off."""
    return [max(rows, key=lambda row: row["error"] or 0.0) for rows in zip(*of_ranks, strict=True)]
