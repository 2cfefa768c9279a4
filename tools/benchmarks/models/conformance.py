"""One type of `ringopt bench models`: its process builds the model and runs it, then parts into ranks, which run it
compiled.

A type is named as in transformers (of its causal language models), as "AutoModel/bert" (of another class of its
factory) or as "timm/test_vit" (of another library).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import transformers.generation.utils
import transformers.models.auto.modeling_auto  # noqa: F401  (once for all types)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringopt.backend
from ringopt.errors import first_line
from ringopt.report import Report
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.tensor_bytes import peak_bytes
from ringopt.tools.benchmarks.lab.timing import processor_seconds
from ringopt.tools.benchmarks.libraries import LIBRARIES, models_of
from ringopt.tools.benchmarks.libraries.widened import Widened, widened_ring
from ringopt.tools.benchmarks.models.judged import NOTHING, died, no_answer
from ringopt.tools.benchmarks.models.tiny_transformers import build_auto, build_tiny, reference_of
from ringopt.torch_compat import dynamo
from ringopt.torch_compat import inductor as of_inductor
from ringopt.torch_compat.pytree import tree_leaves

EXACT = 1e-8  # float64, relative to the largest entry of each tensor
INEXACT = 1e-4  # however inexact a program is by itself
TIMES = 10  # as far as the last bit of each weight moves the numbers: statistics of two values lose all others
LEFT = 5  # seconds of those that a type may take: its row is sent whatever Inductor does
SMALL = 1e-4  # of the largest entry of all: what is smaller than that may be rounding alone


# ---- the process of a type -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What every rank runs: a model, the keywords of its forward in call after call and what one process found in each,
    how far apart the same may be, the bytes that a step takes there, where the ranks meet, and the inner backend."""

    model: nn.Module
    calls: Sequence[dict[str, Any]]
    expected: Sequence[Sequence[Tensor | None]]
    exact: float
    bytes: int
    ranks: int
    meet: str
    seconds: float
    inner: str


def judge(answers: Any, kind: str, ranks: int, seconds: float, inner: str) -> None:
    """Sends a row, whatever the model does short of a crash."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # numbers that a program writes down without a type
    library, _, name = kind.rpartition("/")
    try:
        model, inputs = _built(library, name)
        alike = [_alike(model, library, name) for _ in range(3)]
        shake(alike[2])
        with Widened():
            expected, again, shaken = (_numbers(one, inputs) for one in alike)
            calls = [inputs, *_fewer_tokens(alike[0], inputs)]
            found = [expected, *(_numbers(alike[0], later) for later in calls[1:])]
            held = _bytes_of_a_step(alike[0], inputs)
    except Exception as error:
        answers.send(no_answer("not built", _in_words(error)))
        return
    if _distance(again, expected) > EXACT:
        answers.send(no_answer("not built", "the program draws random numbers: nothing to compare with"))
        return
    if library in LIBRARIES:
        facts = {"hf": bool(getattr(model, "_cp_plan", None)) if library == "diffusers" else None, "layers": ""}
    else:
        facts = {"hf": bool(getattr(model, "supports_context_parallel", True)), "layers": _layers(model)}
    with tempfile.TemporaryDirectory() as folder:
        exact = min(max(EXACT, TIMES * _distance(shaken, expected)), INEXACT)
        trial = Trial(model, calls, found, exact, held, ranks, f"file://{folder}/store", seconds, inner)
        row = {**NOTHING, **_on_ranks(trial), **facts}
    if inner == "inductor":
        row["by_inductor"] = _by_inductor(alike[1], inputs, seconds - LEFT - (time.monotonic() - begin))
    answers.send(row)


def shake(model: nn.Module) -> None:
    """Changes the last bit of weights, up, down or not."""
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype == torch.float64:
                parameter.mul_(1 + torch.randint(-1, 2, parameter.shape, generator=dice) * 2.0**-52)


def _fewer_tokens(model: nn.Module, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The call with a shorter sequence, of an odd length; none where there are no tokens, or the model does not take
    it."""
    length = tokens.shape[-1] if (tokens := words_of(inputs)) is not None else 0
    kept = length * 3 // 4 - 1
    if kept < 1:
        return []
    cut = {name: value[:, :kept].contiguous() if _is_along(value, length) else value for name, value in inputs.items()}
    try:
        _numbers(model, cut)
    except Exception:  # of the program itself: a length that it asks for
        return []
    return [cut]


def words_of(inputs: dict[str, Any]) -> Tensor | None:
    """The numbers of its words, by what libraries call them."""
    named = (inputs[name] for name in ("input_ids", "idx", "x") if name in inputs)
    return next((one for one in named if isinstance(one, Tensor) and one.dtype == torch.int64), None)


def _is_along(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length


def _built(library: str, name: str) -> tuple[nn.Module, dict[str, Any]]:
    if library in LIBRARIES:
        built: tuple[nn.Module, dict[str, Any]] = models_of(library).build(name)
        return built
    return build_auto(library, name) if library else build_tiny(name)


def _alike(model: nn.Module, library: str, name: str) -> nn.Module:
    """The same for one process: built anew, for a copy may hold functions that read the weights of the first."""
    return _built(library, name)[0] if library in LIBRARIES else reference_of(model)


def _by_inductor(model: nn.Module, inputs: dict[str, Any], longest: float) -> float | None:
    """Seconds of the processor until Inductor has compiled the unchanged program for one process. In a process of its
    own, which can be ended; None where it fails, or takes more than `longest` seconds of the clock."""
    way = multiprocessing.get_context("fork")
    here, there = way.Pipe(duplex=False)

    def compiling() -> None:
        with of_inductor.fresh_cache(), of_inductor.patched(compile_threads=1):
            begin = processor_seconds()
            _numbers(torch.compile(model), inputs)
            there.send(processor_seconds() - begin)

    process = way.Process(target=compiling)
    process.start()
    there.close()
    try:
        seconds: float | None = here.recv() if here.poll(max(longest, 0)) else None
    except EOFError:  # it has printed why
        seconds = None
    process.kill()
    process.join()
    return seconds


def _on_ranks(trial: Trial) -> Row:
    """What the ranks found: of rank 0, with the largest error of all; the first failure where one fails."""
    way = multiprocessing.get_context("fork")
    pipes, rows = [way.Pipe(duplex=False) for _ in range(trial.ranks)], []
    processes = [way.Process(target=_a_rank, args=(rank, there, trial)) for rank, (_, there) in enumerate(pipes)]
    for process, (_, there) in zip(processes, pipes, strict=True):
        process.start()
        there.close()
    for process, (here, _) in zip(processes, pipes, strict=True):
        try:
            rows.append(here.recv())
        except EOFError:
            process.join()
            rows.append(no_answer("error", died(process.exitcode)))
    if wrong := [row for row in rows if row["verdict"] == "error"]:
        return dict(wrong[0])
    error, memory = (max(row[name] for row in rows) for name in ("error", "memory"))
    return {**rows[0], "error": error, "memory": memory, "verdict": "exact" if error <= trial.exact else "wrong"}


def _a_rank(rank: int, answers: Any, trial: Trial) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(trial.ranks), "LOCAL_RANK": "0"}
    limit = timedelta(seconds=trial.seconds)
    try:
        dist.init_process_group("gloo", init_method=trial.meet, rank=rank, world_size=trial.ranks, timeout=limit)
        begin = processor_seconds()
        # Of many layers, where Dynamo breaks in each; torch's flash kernel is wrong for rows that a finite mask hides.
        with (
            of_inductor.fresh_cache(),
            of_inductor.patched(compile_threads=1),
            dynamo.patched(recompile_limit=64),
            sdpa_kernel(SDPBackend.MATH),
        ):
            # What a model draws with a seed of its own (Reformer's buckets) is then what one process draws.
            ring = widened_ring(inner_backend=trial.inner, on_refusal="ignore", random="torch")
            compiled = torch.compile(trial.model, backend=ring)
            found = _numbers(compiled, trial.calls[0])
            took = processor_seconds() - begin
            graphs = ringopt.backend.reports()
            errors = [_distance(found, trial.expected[0])]
            figures = _figures(Report.merged(graphs, trial.ranks), trial.calls[0])
            for call, expected in zip(trial.calls[1:], trial.expected[1:], strict=True):
                errors.append(_distance(_numbers(compiled, call), expected))
        later = ringopt.backend.reports()[len(graphs) :]
        again = Report.merged(later, trial.ranks).sharded_fraction if later else figures["share"]
        figures["later"] = again if trial.calls[1:] else None
        figures["memory"] = _bytes_of_a_step(compiled, trial.calls[0]) / trial.bytes
        answers.send({**figures, "verdict": "", "compile": took, "error": max(errors)})
    except Exception as error:
        answers.send(no_answer("error", _in_words(error)))
    finally:
        answers.close()
        os._exit(0)  # a rank whose neighbour failed would wait for it


def _numbers(model: Any, inputs: dict[str, Any]) -> list[Tensor | None]:
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    loss = _loss(model, inputs)
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad.detach().clone() for p in model.parameters())]


def _loss(model: Any, inputs: dict[str, Any]) -> Any:
    """Of the model, or of all that it returns."""
    found = model(**inputs)
    loss: Any = getattr(found, "loss", None)
    if loss is not None:
        return loss
    found = found[0] if isinstance(found, tuple) else found
    parts = tree_leaves(found if isinstance(found, (Tensor, list)) else dict(found))
    return sum(part.square().mean() for part in parts if isinstance(part, Tensor) and part.requires_grad)


def _bytes_of_a_step(model: Any, inputs: dict[str, Any]) -> int:
    """The most at once, beside the weights and their gradients, which are there. The least of two steps: a thread of
    gloo may be late to let go of a message."""
    return min(peak_bytes(lambda: _loss(model, inputs).backward()) for _ in range(2))


def _distance(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest difference, relative to the largest entry of its tensor. A tensor of rounding errors, such as the
    gradient of a key's bias, counts as if its entries were SMALL."""
    floor = SMALL * max(float(b.abs().max()) for b in expected[1:] if b is not None and b.numel())
    parts = [0.0]
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            there = b if a is None else a
            parts += [] if there is None else [float(there.abs().max()) / floor]
        elif b.numel():
            parts.append(float((a - b).abs().max()) / max(float(b.abs().max()), floor))
    return math.inf if any(math.isnan(part) for part in parts) else max(parts)


# ---- in words --------------------------------------------------------------------------------------------------------


def _figures(report: Report, inputs: dict[str, Any]) -> Row:
    tokens = found.numel() if (found := words_of(inputs)) is not None else None
    return {
        "share": report.sharded_fraction,
        "bytes": report.bytes_sent / tokens if tokens else None,
        "by_sites": sum(site.bytes_sent for site in report.sites) / tokens if tokens else None,
        "sites": len(report.sites),
        "sharded": sum(site.refusal is None for site in report.sites),
        "graphs": len(ringopt.backend.reports()),
        "reason": _first_reason(report),
    }


def _first_reason(report: Report) -> str:
    """The first reason why something is whole, with its line."""
    breaks = dynamo.counters["graph_break"] if len(ringopt.backend.reports()) > 1 else ()  # else it was healed
    reasons = [f"Dynamo breaks the graph: {next(iter(breaks)).strip().splitlines()[0]}"] if breaks else []
    reasons += [report.refusal] if report.refusal else []
    reasons += [f"{site.refusal} ({_line(site.source)})" for site in report.sites if site.refusal]
    largest = max((gather for gather in report.gathers if gather.op != "output"), key=lambda g: g.bytes, default=None)
    reasons += [f"{largest.op}: {largest.why} ({_line(largest.source)})"] if largest else []
    reasons += [report.shards_nothing] if report.shards_nothing else []
    return reasons[0] if reasons else ""


def _line(source: str) -> str:
    return Path(source).name


def _in_words(error: Exception) -> str:
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"


def _layers(model: Any) -> str:
    """The kinds of its layers, as its configuration names them."""
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return ", ".join(dict.fromkeys(getattr(text, "layer_types", None) or ()))
