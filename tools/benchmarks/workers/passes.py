"""One rank of `ringopt bench passes`, and Inductor on a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from ringopt.distributed.lookup import process_mesh
from ringopt.drivers.compile import transform
from ringopt.options import Options
from ringopt.tools.benchmarks.lab.numbers import distance, numbers
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.timing import processor_seconds
from ringopt.tools.benchmarks.models.decoder import WORDS, Decoder
from ringopt.torch_compat import inductor as of_inductor

LENGTH = 128


def made(layers: int) -> tuple[Decoder, Tensor]:
    """A decoder with random weights, and token ids [1, LENGTH]."""
    torch.manual_seed(0)
    return Decoder(layers), torch.randint(0, WORDS, (1, LENGTH))


def step(run: Any, model: Decoder, ids: Tensor) -> list[Tensor]:
    """The loss and the gradients of the parameters."""
    return numbers(run, [ids], model.parameters())


def sharded(rank: int, ranks: int, depths: Sequence[int], repeats: int) -> list[Row]:
    """A row for each number of layers: what the passes take, and how far the sharded graph is from the model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return [of_decoder(layers, repeats) for layers in depths]


def of_decoder(layers: int, repeats: int) -> Row:
    """CPU seconds that sharding a decoder takes, the median of `repeats`, and the size of its graph."""
    (model, ids), seconds, sizes = made(layers), [], []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        for _ in range(repeats + 1):
            begin = time.process_time()
            flat = transform(gm, inputs, Options(), process_mesh()).graph
            seconds.append(time.process_time() - begin)
        assert flat is not None
        sizes.append(len(flat.graph.nodes))
        return flat

    torch.compiler.reset()
    found = step(torch.compile(model, backend=backend, fullgraph=True), model, ids)
    taken = statistics.median(seconds[1:])  # the first turn is for warming up
    far = distance(found, step(model, model, ids))
    return {"layers": layers, "nodes": sizes[0], "passes": taken, "node": taken / sizes[0], "error": far}


def inductor(rank: int, ranks: int, depths: Sequence[int]) -> list[float]:
    """Processor seconds until a first step is compiled, forward and backward, by the C++ compiler too."""
    torch.set_num_threads(1)
    return [compiling(layers) for layers in depths]


def compiling(layers: int) -> float:
    """CPU seconds until Inductor has compiled a decoder, its first step less a second one."""
    (model, ids), begun = made(layers), []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        begun.append(processor_seconds())
        return of_inductor.compile_fx(gm, inputs)

    torch.compiler.reset()
    with of_inductor.fresh_cache(), of_inductor.patched(compile_threads=1):
        run = torch.compile(model, backend=backend, fullgraph=True)
        step(run, model, ids)
        first = processor_seconds()
        step(run, model, ids)
    return (first - begun[0]) - (processor_seconds() - first)
