"""One rank's part of `ringopt bench exchange`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import LAYOUTS, layout_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.cost.choose import Case, choose_layout, choose_strategy
from ringopt.cost.simulate import Heads
from ringopt.distributed.agreed_rates import agreed_rates
from ringopt.distributed.lookup import process_mesh
from ringopt.distributed.mesh import Mesh, register
from ringopt.distributed.process import ProcessMesh
from ringopt.errors import OptionError
from ringopt.hardware.rates import Rates
from ringopt.tools.benchmarks.lab.inserted import inserted
from ringopt.tools.benchmarks.lab.names import OURS, TORCH
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.peers import Run, all_gather, torch_ring
from ringopt.tools.benchmarks.lab.result import MODES, Row
from ringopt.tools.benchmarks.workers.overlap_rank import Mute, Times, begin_rank, nothing, together

DIM = 64
LONG, MOST = 0.3, 60  # seconds of timed calls of each, and the most calls
SAMPLED = 64  # queries whose outputs and gradients are compared


def on_a_rank(rank: int, ranks: int, patterns: list[str], length: int, heads: int, repeats: int) -> list[Row]:
    """The rows of one rank at one length, for every pattern, inference and training."""
    begin_rank()
    problem = Problem(length, heads, process_mesh())
    return [problem.row(pattern, mode, training, repeats) for pattern in patterns for mode, training in MODES.items()]


@dataclass(frozen=True)
class Entrant:
    """`run` on this rank's rows in `layout`."""

    run: Run
    layout: str


class Problem:
    """Operands of `length` rows, the same on all ranks. Gradients are compared for a loss of SAMPLED rows, so that the
    dense reference is small at any length."""

    def __init__(self, length: int, heads: int, mesh: ProcessMesh):
        self.length, self.mesh, self.silent = length, mesh, Mute(mesh)
        register(self.silent)
        torch.manual_seed(0)
        self.q, self.k, self.v, self.dout = (torch.randn(1, heads, length, DIM) for _ in range(4))
        self.sampled = torch.randperm(length)[:SAMPLED].sort().values
        self.few = torch.zeros_like(self.dout)
        self.few[:, :, self.sampled] = self.dout[:, :, self.sampled]

    def row(self, pattern: str, mode: str, training: bool, repeats: int) -> Row:
        heads = Heads.of(self.q, self.k, self.v, "flash_cpu")
        case = Case(pattern, self.length, self.length, heads, training)
        rates = agreed_rates(self.mesh)
        entrants, same = self.ours(case, rates)
        entrants["all-gather"] = self.all_gather(pattern)
        if pattern in ("full", "causal") and not training:
            entrants |= {who: self.torch_ring(pattern == "causal", rotation) for who, rotation in TORCH.items()}
        expected = self.dense(pattern)
        errors = {who: self.error(entrant, expected, training) for who, entrant in entrants.items()}
        layout, chosen = self.by_auto(case, rates)
        entrants["blocks"] = Entrant(self.operator(pattern, chosen, layout, self.silent), layout)
        runs: dict[str, Callable[[], object]] = {who: self.call(entrant, training) for who, entrant in entrants.items()}
        if pattern in ("full", "causal"):
            runs["SDPA"] = self.on_one_process(pattern == "causal", training)
        times = self.times(runs, repeats)
        seconds = {who: time.seconds for who, time in times.items()}
        return {
            "pattern": pattern, "length": self.length, "heads": heads.q_heads, "mode": mode, "chosen": chosen,
            "layout": layout, "same": same,
            "seconds": seconds | {who: seconds[other] for who, other in same.items()}, "errors": errors,
        }  # fmt: skip

    def times(self, runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
        """Of at least `repeats` calls each, and of as many as LONG takes: what lasts a millisecond is often late."""
        first = torch.tensor(sum(time.seconds for time in together(runs, 1).values()) / len(runs))
        longest = float(max(self.mesh.all_gather(first, "repeats")))
        return together(runs, min(MOST, max(repeats, round(LONG / longest))))

    # ---- who takes part ----------------------------------------------------------------------------------------------
    def ours(self, case: Case, rates: Rates) -> tuple[dict[str, Entrant], dict[str, str]]:
        """Each strategy in the layout that is best for it; and of those whose plan is that of another, the other."""
        entrants: dict[str, Entrant] = {}
        same: dict[str, str] = {}
        plans: dict[Any, str] = {}
        for who in OURS:
            layout, strategy = choose_layout([case], self.mesh.size, who, tuple(LAYOUTS), rates)[0], who
            if who == "auto":
                layout, strategy = self.by_auto(case, rates)
            try:
                plan = case.plan(self.mesh.size, layout, strategy)
            except OptionError:
                continue  # the strategy is none for this pattern
            first = plans.setdefault(steps_of(plan), who)
            if first != who:
                same[who] = first
                continue
            entrants[who] = Entrant(self.operator(case.pattern, strategy, layout, self.mesh), layout)
        return entrants, same

    def by_auto(self, case: Case, rates: Rates) -> tuple[str, str]:
        """The layout and the strategy of auto."""
        layout, _why = choose_layout([case], self.mesh.size, "auto", tuple(LAYOUTS), rates)
        return layout, choose_strategy(case, self.mesh.size, layout, rates).strategy

    def operator(self, pattern: str, strategy: str, layout: str, mesh: Mesh) -> Run:
        """What the compiler inserts."""
        sharded = ShardedPattern.of_self_attention(pattern, self.length, self.mesh.size, layout)
        return inserted(sharded, strategy, DIM**-0.5, mesh.name)

    def all_gather(self, pattern: str) -> Entrant:
        mine = layout_of("contiguous", self.length, self.mesh.size).ranges(self.mesh.rank)[0]
        mask = None if pattern == "full" else self.seen(pattern, torch.arange(mine.start, mine.stop))
        return Entrant(all_gather(mask, at_once=True), "contiguous")

    def torch_ring(self, causal: bool, rotation: str) -> Entrant:
        return Entrant(torch_ring(self.mesh.group, causal, rotation), "zigzag" if causal else "contiguous")

    def on_one_process(self, causal: bool, training: bool) -> Callable[[], object]:
        """All rows on the first rank, while the others wait."""
        whole = (self.q, self.k, self.v, self.dout if training else None)
        return nothing if self.mesh.rank else lambda: call(partial(sdpa, causal), *whole)

    # ---- calls and numbers -------------------------------------------------------------------------------------------
    def rows(self, x: Tensor, layout: str) -> Tensor:
        pieces = layout_of(layout, self.length, self.mesh.size).ranges(self.mesh.rank)
        return torch.cat([x[:, :, rows.start : rows.stop] for rows in pieces], 2)

    def call(self, entrant: Entrant, training: bool) -> Callable[[], list[Tensor]]:
        q, k, v, dout = (self.rows(x, entrant.layout) for x in (self.q, self.k, self.v, self.dout))
        return lambda: call(entrant.run, q, k, v, dout if training else None)

    def error(self, entrant: Entrant, expected: list[Tensor], training: bool) -> float:
        """Of the sampled rows of the output that are here; in training of the gradients that they lead to."""
        q, k, v, few = (self.rows(x, entrant.layout) for x in (self.q, self.k, self.v, self.few))
        out, *gradients = call(entrant.run, q, k, v, few if training else None)
        wanted = [self.rows(x, entrant.layout) for x in expected]
        here = few.abs().amax((0, 1, 3)) > 0
        pairs = [(out[:, :, here], wanted[0][:, :, here]), *zip(gradients, wanted[1:], strict=False)]
        found, right = zip(*[(a.double(), b) for a, b in pairs if b.numel()], strict=True) if pairs else ((), ())
        return distance(found, right)

    def dense(self, pattern: str) -> list[Tensor]:
        """In float64: outputs (of the sampled rows, else 0), and the gradients of q, k and v."""
        q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
        scores = q[:, :, self.sampled] @ k.transpose(2, 3) * DIM**-0.5
        weights = scores.masked_fill(~self.seen(pattern, self.sampled), -torch.inf).softmax(-1)
        out = torch.zeros_like(q).index_copy(2, self.sampled, weights @ v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.few.double())]

    def seen(self, pattern: str, queries: Tensor) -> Tensor:
        whole, rows = pattern_of(pattern, self.length, self.length), range(self.length)
        return torch.cat([seen(whole, range(query, query + 1), rows) for query in queries.tolist()])


def sdpa(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA on one process, the reference."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def call(run: Run, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None) -> list[Tensor]:
    """The output, and with `dout` the gradients of q, k and v."""
    if dout is None:
        with torch.no_grad():
            return [run(q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def steps_of(plan: Plan) -> Any:
    """The same for plans that do the same."""
    if not isinstance(plan, Exchange):
        return plan
    return plan.q_layout, *((plan.forward(rank), plan.backward(rank)) for rank in range(plan.ranks))
