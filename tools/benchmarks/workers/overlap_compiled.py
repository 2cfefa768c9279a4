"""A small compiled model over a link of known speed, with and without its exchange started early.

K and V are made first, then what needs neither: queries by a wide layer, and a branch beside the attention. The model
is compiled twice, as the passes order it and as it is written; products are slept through like the blocks of attention,
where these are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.backend import inner
from ringopt.calls import call_over_ranks
from ringopt.distributed.mesh import Mesh, register
from ringopt.drivers.compile import transform
from ringopt.kernels.choose import choose_kernel
from ringopt.ops import ring
from ringopt.ops.traits import attends
from ringopt.options import Options
from ringopt.runtime.graph_boundary import examples
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.sleeping import FLOPS, Sleeping
from ringopt.tools.benchmarks.lab.wrapped import Wrapped
from ringopt.tools.benchmarks.workers.overlap_rank import DIM, HEADS, OverlapCase, Rank
from ringopt.torch_compat.tensors import TorchDispatchMode

WIDTH = HEADS * DIM
WIDER = 8 * WIDTH
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Model(nn.Module):
    """An attention between products that its exchange can hide behind; `side` is independent of it."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        # A constant added to all keys changes no softmax: the gradient of a bias would be rounding errors.
        self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q, self.side = (
            nn.Sequential(nn.Linear(WIDTH, WIDER), nn.ReLU(), nn.Linear(WIDER, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for of in (self.q, self.k, self.v))
        side = self.side(x)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(out.transpose(1, 2).flatten(2)) + side  # type: ignore[no-any-return]


class SleptProducts(TorchDispatchMode):
    """Products of matrices take the time of a processor that does FLOPS and itself none, and give zeros."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op not in PRODUCTS:
            return op(*args, **(kwargs or {}))
        a, b = args[-2:]
        time.sleep(2 * a.shape[0] * a.shape[1] * b.shape[1] / FLOPS)
        return a.new_zeros(a.shape[0], b.shape[1])


class Hoisted(Rank):
    """One rank's part of the model: its attention is that of the case."""

    def __init__(self, case: OverlapCase, mesh: Mesh):
        super().__init__(case, mesh)
        self.place = Wrapped(mesh)  # so that one compiled program runs over whichever mesh stands in it
        register(self.place)
        torch.manual_seed(0)
        self.model = Model(case.pattern == "causal")
        self.x, self.cotangent = torch.randn(1, case.length, WIDTH), torch.randn(1, case.length, WIDTH)
        self.early, self.written = (compiled(self.model, self.x, self.place, early) for early in (True, False))
        self.outs = {run: run() for run in (self.early, self.written)}

    def run(self, mesh: Mesh, backward: bool) -> list[Tensor]:
        return self.through(self.early, mesh, backward, self.case.slept)

    def others(self, link: Mesh, backward: bool) -> dict[str, Callable[[], object]]:
        return {"written": lambda: self.through(self.written, link, backward, self.case.slept)}

    def through(self, run: Callable[[], Tensor], mesh: Mesh, backward: bool, slept: bool) -> list[Tensor]:
        self.place.mesh = mesh
        with ExitStack() as stack:
            if slept:
                stack.enter_context(patch.object(ring, choose_kernel.__name__, lambda *_: (Sleeping(), "")))
                stack.enter_context(SleptProducts())  # type: ignore[no-untyped-call]
            if not backward:
                return [run()]
            leaves, cotangent = list(self.model.parameters()), self.own(self.cotangent)
            return list(torch.autograd.grad(self.outs[run], leaves, cotangent, retain_graph=True))

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of `x` [1, n, WIDTH]."""
        return self.rows(x.unsqueeze(1)).squeeze(1)

    def error(self, backward: bool) -> float:
        expected = self.model(self.x)
        if not backward:
            found = self.through(self.early, self.mesh, False, False)
            return distance([x.detach() for x in found], [self.own(expected.detach())])
        found = self.through(self.early, self.mesh, True, False)
        for grad in found:  # their mean over the ranks is the gradient (sync_gradients=False)
            dist.all_reduce(grad)
        grads = torch.autograd.grad(expected, list(self.model.parameters()), self.cotangent)
        return distance([grad / self.mesh.size for grad in found], list(grads))


def compiled(model: Model, x: Tensor, mesh: Mesh, early: bool) -> Callable[[], Tensor]:
    """Gives this rank's rows. Gradients of parameters stay as they are: nothing but the exchange is on the link.

    The graph is called as it is made, for Dynamo does not enter a function under a mode that stands in for products."""
    options = Options(
        strategy="gather",  # what "auto" takes where so much stands before: all is under way behind it
        layout="zigzag" if model.causal else "contiguous",
        outputs="local",
        sync_gradients=False,
        inner_backend="aot_eager",
    )
    runs: list[Callable[[], Any]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        made = transform(gm, inputs, options, mesh)
        assert made.graph is not None, made.report
        for node in made.graph.graph.nodes:
            if attends(node) and not early:
                call_over_ranks(node).replace(early="").write(node)
        starts = [call_over_ranks(node).early for node in made.graph.graph.nodes if attends(node)]
        assert starts and all(map(bool, starts)) == early, starts
        run = inner(made.graph, examples(inputs, made.given), options, None, made.budget)
        runs.append(lambda: run(*inputs))
        return run

    torch.compiler.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    return lambda: runs[0]()[0]
