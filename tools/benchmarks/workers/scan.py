"""A layer that is a recurrence: on one process, compiled by ringopt and by Inductor as written, and over ranks, with
its scan on shards and with its scan gathered."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch import Tensor

import ringopt
from ringopt import backend as ring_backend
from ringopt.distributed.traffic import Traffic, record_traffic
from ringopt.ir.site import SiteInfo
from ringopt.sharding.recurrences import scans
from ringopt.sharding.recurrences.scans import scan_site
from ringopt.tools.benchmarks.lab.link_lab import LabError, as_ranks
from ringopt.tools.benchmarks.lab.numbers import distance, numbers, weights
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.timing import interleaved
from ringopt.tools.benchmarks.models.recurrent_layers import DIM, Loop, layer_of, map_sizes
from ringopt.tools.benchmarks.workers.overlap_rank import begin_rank, nothing, together
from ringopt.tools.common.resident import STATUS, reset_peak, resident

Step = Callable[[], list[Tensor]]
Layer = tuple[str, int]  # its name, and how many heads it has
MESSAGES = ("maps of a scan", "gradients of a scan")
# Of ranks: their scan by its states, by heads (all-to-all), gathered; and each its share of the tokens as a program of
# its own, which nothing that shares a sequence can beat.
WAYS = ("states", "heads", "gathered", "apart")


class Trial(NamedTuple):
    """A layer of so many heads, its loop spelled so; `repeats` timed steps of each. `folder` has its numbers by eager
    in float64, and what Inductor keeps of one process, which one of the ranks compiles too."""

    layer: Layer
    length: int
    repeats: int
    inner: str
    loop: Loop
    folder: str

    @property
    def right(self) -> Path:
        return Path(self.folder, "right.pt")


def row_of(
    layer: Layer, length: int, ranks: int, repeats: int, longest: float, inner: str, *, as_written: bool = True
) -> Row:
    """Of one layer and length. A backend that takes longer than `longest` seconds, or fails, has None in its places and
    the reason under "failed"; so has the program as written where it is not asked for: then a loop is torch's scan, for
    Dynamo takes minutes to trace hundreds of chunks. Raises LabError where ringopt fails."""
    row: Row = {"layer": layer[0], "heads": layer[1], "length": length, "ranks": ranks, "failed": None}
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(layer, length, repeats, inner, "written" if as_written else "scan", folder)
        as_ranks(1, keep_expected, trial, timeout=longest)
        (ours,) = as_ranks(1, alone, trial, "ring", timeout=longest)
        theirs: dict[str, Any] = dict.fromkeys(ours)
        try:
            if as_written:
                (theirs,) = as_ranks(1, alone, trial, inner, timeout=longest)
        except LabError as error:
            row["failed"] = str(error)
        backends = {"ring": "ring"} | ({"plain": inner} if theirs["error"] is not None else {})
        (seconds,) = as_ranks(1, by_turns, trial, backends, timeout=longest)
        found = as_ranks(ranks, over_ranks, trial, timeout=longest)
    row |= {f"{who}_seconds": seconds.get(who) for who in ("ring", "plain")}
    row |= {f"{who}_{key}": value for who, one in (("ring", ours), ("plain", theirs)) for key, value in one.items()}
    slowest = {key: max(one[key] for one in found) for key in (*(f"{way}_seconds" for way in WAYS), "states_error")}
    most = {key: max(one[key] or 0 for one in found) or None for key in ("states_bytes", "gathered_bytes")}
    sent = {key: sum(one[key] for one in found) for key in ("sent", "formula")}
    alone_seconds = found[0]["alone_seconds"]
    faster = {f"faster_{way}": alone_seconds / slowest[f"{way}_seconds"] for way in WAYS}
    return row | slowest | most | sent | faster | {"alone_seconds": alone_seconds}


# ---- one process -----------------------------------------------------------------------------------------------------
def alone(_rank: int, _ranks: int, trial: Trial, backend: str) -> dict[str, Any]:
    """Seconds of the first call, nodes of the graphs, bytes, and the error. Nothing is in a cache."""
    torch.set_num_threads(1)
    with cache_of(trial, backend):
        return measured(trial, backend)


def by_turns(_rank: int, _ranks: int, trial: Trial, backends: dict[str, str]) -> dict[str, float]:
    """Seconds of a step of each, one after the other in one process, with what Inductor has in its caches: beside
    each other in time, for a machine is not as fast in every minute."""
    torch.set_num_threads(1)
    steps = dict[str, Step]()
    for who, backend in backends.items():
        with cache_of(trial, backend):
            steps[who] = step_of(trial, backend)
            steps[who]()
    return interleaved(steps, trial.repeats)


def cache_of(trial: Trial, backend: str) -> AbstractContextManager[Any]:
    """Where Inductor keeps what it compiles."""
    return patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(Path(trial.folder, backend))})


def measured(trial: Trial, backend: str) -> dict[str, Any]:
    """The same, with what Inductor has in its cache."""
    torch.compiler.reset()
    step = step_of(trial, backend)
    begin = time.perf_counter()
    with counted() as nodes:
        found = step()
    compiled = time.perf_counter() - begin
    error = distance(found, torch.load(trial.right))
    return {"compile": compiled, "bytes": peak(step), "error": error, **nodes}


def step_of(trial: Trial, backend: str) -> Step:
    """The layer forward and backward on one process."""
    model, x = drawn(trial)
    leaves = [x.requires_grad_(), *model.parameters()]
    run = ring(model, trial.inner) if backend == "ring" else torch.compile(model, backend=backend)
    return lambda: numbers(run, (x,), leaves)


def ring(model: nn.Module, inner: str, **options: Any) -> Any:
    """The layer under backend="ring". A program for each length: Inductor fails on Mamba2's open ones."""
    return torch.compile(model, backend="ring", dynamic=False, options={"inner_backend": inner, **options})


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many nodes a program has as it comes to ringopt, and as ringopt hands it on."""
    nodes = {"written": 0, "nodes": 0}

    def noting(key: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            nodes[key] += len(gm.graph.nodes)
            return original(gm, *args, **kwargs)

        return noted

    transform, inner = (getattr(ring_backend, name) for name in ("transform", "inner"))
    with (
        patch.object(ring_backend, "transform", noting("written", transform)),
        patch.object(ring_backend, "inner", noting("nodes", inner)),
    ):
        yield nodes


def drawn(trial: Trial) -> tuple[nn.Module, Tensor]:
    """The layer, and what goes in."""
    x = torch.randn(1, trial.length, trial.layer[1] * DIM, generator=torch.Generator().manual_seed(1))
    return layer_of(*trial.layer, trial.loop), x


def keep_expected(_rank: int, _ranks: int, trial: Trial) -> None:
    """Computed once, for all who are compared with it."""
    torch.set_num_threads(os.cpu_count() or 1)
    torch.save(expected(trial), trial.right)


def expected(trial: Trial) -> list[Tensor]:
    """In eager, with 64 bits, not written chunk by chunk: autograd would copy the whole for each."""
    model, x = drawn(trial._replace(loop="stacked"))
    model, x = model.double(), x.double().requires_grad_()
    return [part.float() for part in numbers(model, (x,), [x, *model.parameters()])]


def peak(step: Step) -> int | None:
    """Bytes of a call above what was resident before it; None on a system without /proc."""
    if not STATUS.exists():
        return None
    before = reset_peak()
    step()
    return resident("VmHWM") - before


# ---- over ranks ------------------------------------------------------------------------------------------------------
def over_ranks(rank: int, ranks: int, trial: Trial) -> dict[str, Any]:
    """Seconds of each of WAYS, and of rank 0 alone while the others wait."""
    begin_rank()
    meshes = dist.device_mesh.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "alone"))
    with cache_of(trial, "ring"):
        one = nothing if rank else way_of("alone", trial, meshes["alone"])
        one()
        runs = {way: way_of(way, trial, meshes["all"]) for way in WAYS if way != "apart"}
        runs["apart"] = way_of("alone", trial._replace(length=trial.length // ranks), meshes["alone"])
        with record_traffic() as traffic:
            found = runs["states"]()
    wanted, of_x, *of_parameters = torch.load(trial.right)
    error = distance(found, [ringopt.shard(wanted, 1), ringopt.shard(of_x, 1), *of_parameters])
    bytes_held = {f"{way}_bytes": peak(run) for way, run in runs.items()}
    times = together({**runs, "alone": one}, trial.repeats)
    seconds = {f"{way}_seconds": time.seconds for way, time in times.items()}
    sent = {"sent": sent_for_scans(traffic), "formula": formula_of(trial.layer, ranks)}
    return {**seconds, **bytes_held, "states_error": error, **sent}


def way_of(way: str, trial: Trial, mesh: Any) -> Step:
    """A step of the layer, compiled: this rank's rows of the output, of the gradient of x, and those of parameters."""
    model, x = drawn(trial)
    # (What Dynamo has compiled is used again for equal options.)
    refusals = "ignore" if way == "gathered" else "error"
    strategy = "ulysses" if way == "heads" else "auto"
    run = ring(model, trial.inner, mesh=mesh, outputs="local", on_refusal=refusals, strategy=strategy)
    rows = x if way == "alone" else ringopt.shard(x, 1).clone()
    seed = weights(x) if way == "alone" else ringopt.shard(weights(x), 1).clone()
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        leaf = rows.detach().requires_grad_()
        out = run(leaf if way == "alone" else ringopt.from_rows(leaf, 1))
        return [out.detach(), *torch.autograd.grad(out, [leaf, *parameters], seed)]

    if way != "gathered":
        return step
    with patch.object(scans, scan_site.__name__, gathered):
        step()
    return step


def gathered(node: fx.Node, *args: Any) -> SiteInfo:
    """What a scan is that ranks do not share: everything it reads is gathered, and all run all of its steps."""
    info = SiteInfo.at(node, "scan", "gathered", False)
    info.refusal, info.layout = "gathered to be compared with", "none"
    return info


def sent_for_scans(traffic: Traffic) -> int:
    """Bytes that this rank has sent for its scans."""
    return sum(event.bytes for event in traffic.events if event.label in MESSAGES)


def formula_of(layer: Layer, ranks: int) -> int:
    """Those by the sizes of the states: a state for each segment, and a gradient of one; matrices for segments between
    the first and the last."""
    matrix, state = map_sizes(*layer)
    return 4 * (ranks - 1) * ((matrix if ranks > 2 else 0) + 2 * state)
