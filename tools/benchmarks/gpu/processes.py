"""The same attentions and the same decoder on processes: by NCCL, or on the CPU by gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ringopt.distributed.lookup import process_mesh
from ringopt.errors import OptionError
from ringopt.tools.benchmarks.gpu.checks import sites, skipped, verdict
from ringopt.tools.benchmarks.gpu.compiled import compiled
from ringopt.tools.benchmarks.lab.names import TIMEOUT
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row


def on_rank(rank: int, size: int, on_gpus: bool, tokens: int) -> list[Row]:
    """The rows of one rank."""
    device = _gpu(rank, size) if on_gpus else torch.device("cpu")
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
    rows.extend({**row, "part": "processes"} for row in compiled(device, tokens // 2))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _gpu(rank: int, size: int) -> torch.device:
    """Where there are fewer GPUs than ranks, one that ranks share. NCCL refuses two ranks of a node on one GPU, so each
    is a node of its own to it: their messages go through sockets."""
    gpus = torch.cuda.device_count()
    if gpus < size:
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


def worst(of_ranks: list[list[Row]]) -> list[Row]:
    """Of each attention the row of the rank that is farthest off."""
    return [max(rows, key=lambda row: row["error"] or 0.0) for rows in zip(*of_ranks, strict=True)]
