"""`ringopt doctor`: what this machine has for sharded attention, and what is set. Reports, sets nothing."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ringopt.tools.common.command import console

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
examples:
  ringopt doctor
  ringopt doctor --json
"""

# Effective settings of the transports, with what holds where they are unset.
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "the interface that the host name resolves to",
    "NCCL_SOCKET_IFNAME": "every interface but lo and docker",
    "NCCL_IB_DISABLE": "0: InfiniBand is used where there is any",
    "NCCL_P2P_DISABLE": "0: GPUs of one machine talk directly",
    "NCCL_P2P_LEVEL": "chosen by NCCL from the topology",
    "NCCL_SHM_DISABLE": "0: shared memory is used where there is no direct way",
    "NCCL_NET_GDR_LEVEL": "chosen by NCCL from the topology",
    "NCCL_MAX_NCHANNELS": "chosen by NCCL",
    "NCCL_DEBUG": "no messages",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3: a failed collective ends the process",
    "TORCH_NCCL_BLOCKING_WAIT": "0: waiting holds up the stream, not the process",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    "OMP_NUM_THREADS": "torchrun sets 1 for several ranks; else all cores",
}

# Names that no longer do anything, or are read with a warning, and what they became.
OBSOLETE = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "nothing: it is the default since torch 2.8",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
}


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="devices, kernels, links and settings of this machine; sets nothing",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    found = examined(os.environ)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    out = console()
    for part, rows in found.items():
        out.print(f"[bold]{part}[/bold]")
        for name, value in rows.items():
            out.print(f"  {name}: {value}", markup=False)
        if not rows:
            out.print("  none")
    return 0


def examined(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By part of the report, by name, as sentences."""
    return {
        "versions": versions(environment),
        "devices": _devices(),
        "kernels": kernels(),
        "links": _links(),
        "rates": _rates(),
        "settings": settings(environment),
        "obsolete": obsolete(environment),
    }


def versions(environment: Mapping[str, str]) -> dict[str, str]:
    """What a report of an error has to name."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import ringopt

    found = {"ringopt": ringopt.__version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    for package in ("torch", "numpy", "transformers", "accelerate", "lightning"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "compiler": compiler(environment)}


def compiler(environment: Mapping[str, str]) -> str:
    """That of C++, which Inductor runs for CPUs."""
    import shutil
    import subprocess

    names = [environment["CXX"]] if "CXX" in environment else ["g++", "clang++", "c++"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return f"none ({', '.join(names)}): Inductor compiles nothing for CPUs without one; CXX names another"
    lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return f"{path}, {lines[0] if lines else 'of unknown version'}"


def _devices() -> dict[str, str]:
    import torch

    from ringopt.tools.benchmarks.lab.machine import this_machine

    machine = this_machine()
    found = {"cpu": f"{machine.cores} cores of {machine.cpu}, {machine.threads} threads, torch {machine.torch}"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        size = card.total_memory / 2**30
        found[f"cuda:{index}"] = f"{card.name}, compute capability {card.major}.{card.minor}, {size:.0f} GiB"
    if len(found) == 1:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no GPU was found"
        found["cuda"] = why
    return found


def kernels() -> dict[str, str]:
    """Of those that return a log-sum-exp, without which results of blocks cannot be merged: for heads of 64 in the
    dtypes of training."""
    import torch

    from ringopt.kernels.choose import KERNELS

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for kernel in KERNELS:
        refusals = {dtype: kernel.supports(dtype, where, 64, 64) for dtype in (torch.float32, torch.bfloat16)}
        able = [str(dtype).removeprefix("torch.") for dtype, refusal in refusals.items() if refusal is None]
        why = dict.fromkeys(refusal.sentence for refusal in refusals.values() if refusal is not None)
        found[kernel.name] = "; ".join([*([f"computes {' and '.join(able)} on {where.type}"] if able else []), *why])
    return found


def _links() -> dict[str, str]:
    import socket

    import torch
    import torch.distributed as dist

    found: dict[str, str] = {}
    for name in ("gloo", "nccl", "mpi"):
        there = dist.is_available() and getattr(dist, f"is_{name}_available")()
        found[name] = "available" if there else "not in this build of torch"
    found["memory"] = memory()
    found["interfaces"] = ", ".join(name for _, name in socket.if_nameindex())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for one in range(count):
        peers = [str(two) for two in range(count) if two != one and torch.cuda.can_device_access_peer(one, two)]
        found[f"cuda:{one}"] = f"reaches GPUs {', '.join(peers)} directly" if peers else "reaches no other GPU directly"
    return found


def memory() -> str:
    """Of other processes on this node."""
    from ringopt.distributed.intra_node import process_vm

    if not process_vm.available():
        return "of other ranks cannot be read (no process_vm_readv): gloo has their messages"
    readers = {0: "", 1: " of ranks with one launcher (Yama)", 2: " of ranks with CAP_SYS_PTRACE (Yama)"}
    if process_vm.scope() not in readers:
        return "of other ranks cannot be read (Yama): gloo has their messages"
    return f"CPU messages on this node are read from the sender's{readers[process_vm.scope()]}"


def _rates() -> dict[str, str]:
    import torch

    from ringopt.errors import OptionError
    from ringopt.hardware.profile import here, path_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = here(device)
    except OptionError as error:
        return {"profile": str(error)}
    if not path_of(device).is_file():
        return {"profile": f"{found.source}; `ringopt bench --calibrate` measures this machine"}
    return {"profile": f"{found.source}, digest {found.digest}, {path_of(device)}"}


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Every environment variable that ringopt reads, with its value or its default."""
    return {
        name: f"{environment[name]} (set)" if name in environment else f"unset: {default}"
        for name, default in SETTINGS.items()
    }


def obsolete(environment: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables that are set under a name that is no longer read, with what became of each."""
    return {
        name: f"is set, and no longer read under this name; it became {now}"
        for name, now in OBSOLETE.items()
        if name in environment
    }
