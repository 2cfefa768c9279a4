"""What is right on this device: kernels against matrix products in float32, sums of tiles, and attention on virtual
ranks against that of one rank in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.merge_lse import merge_
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import plan_of
from ringopt.distributed.mesh import Mesh
from ringopt.errors import OptionError
from ringopt.expr.mask import Mask
from ringopt.expr.terms import applied, axis, load, number, score
from ringopt.kernels import fused
from ringopt.kernels.base import HIDDEN, Kernel, TileInputs, WholeRows
from ringopt.kernels.choose import KERNELS, choose_kernel
from ringopt.kernels.math import Math
from ringopt.tools.benchmarks.gpu.stream_mesh import StreamMesh
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row

DIM = 64
WRONG = 3e-2  # in 16 bits, relative to the largest entry
STRATEGIES = ("ring", "gather", "ring_q", "gather_q", "ulysses")
MASKS = ("causal", "window", "padding", "documents", "softcap", "dropout")


def verdict(part: str, what: str, error: float) -> Row:
    """`right` or `wrong`, by how far the numbers are apart."""
    found = "right" if error <= WRONG else "wrong"
    return {"part": part, "what": what, "verdict": found, "error": error, "figure": "", "why": ""}


def skipped(part: str, what: str, why: str) -> Row:
    """What could not be run here."""
    return {"part": part, "what": what, "verdict": "not run", "error": None, "figure": "", "why": why}


def made(*sizes: int, device: torch.device, seed: int) -> Tensor:
    """[B, H, S, D] in bfloat16 as a projection leaves it, tokens first. The same numbers on any device."""
    batch, heads, rows, dim = sizes
    x = torch.randn(batch, rows, heads, dim, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16).transpose(1, 2)


# ---- kernels ---------------------------------------------------------------------------------------------------------
def kernels(device: torch.device, tokens: int) -> Iterator[Row]:
    """Every adapter on full, causal and masked tiles, forward and backward."""
    for kernel in KERNELS:
        for dim in (DIM, 2 * DIM):
            what = f"{kernel.name}, heads of {dim}"
            refusal = kernel.supports(torch.bfloat16, device, dim, dim)
            if refusal is not None:
                yield skipped("kernels", what, refusal.sentence)
            else:
                yield verdict("kernels", what, of_kernel(kernel, device, tokens, dim))


@torch.no_grad()
def of_kernel(kernel: Kernel, device: torch.device, tokens: int, dim: int) -> float:
    """The largest error of any tile."""
    keys, far = tokens + tokens // 2 + 3, 0.0
    for causal, masked in ((False, False), (True, False), (False, True)):
        if masked and not kernel.masks:
            continue
        length = tokens if causal else keys
        q, k, v, dout = (
            made(2, heads, rows, dim, device=device, seed=i)
            for i, (heads, rows) in enumerate(((4, tokens), (2, length), (2, length), (4, tokens)))
        )
        mask = hiding(tokens, length, q) if masked else None
        wide = mask.float() if mask is not None else None
        exact = TileInputs(q.float(), k.float(), v.float(), dim**-0.5, wide, causal)
        out, lse = Math().forward(exact)
        grads = Math().backward(exact, WholeRows(dout.float(), out, lse))
        tile = TileInputs(q, k, v, dim**-0.5, mask, causal)
        found, its = kernel.forward(tile)
        if not torch.equal(its == HIDDEN, lse == HIDDEN):
            return torch.inf
        back = kernel.backward(tile, WholeRows(dout, out.to(q.dtype), lse))
        seen = lse != HIDDEN
        far = max(far, distance([found.float(), its[seen], *map(Tensor.float, back)], [out, lse[seen], *grads]))
    return far


def hiding(queries: int, keys: int, like: Tensor) -> Tensor:
    """A mask of padding, in which the first rows see nothing."""
    mask = like.new_zeros(1, 1, queries, keys)
    mask[..., keys - keys // 4 :] = HIDDEN
    mask[:, :, : queries // 8] = HIDDEN
    return mask


# ---- sums ------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def merging(device: torch.device, tokens: int) -> Iterator[Row]:
    """Results of tiles merged in one launch, against one after the other."""
    parts = [made(2, 4, tokens, DIM, device=device, seed=i) for i in range(4)]
    lses = [x[..., 0].float().contiguous() * 3 for x in parts]
    for part, lse in zip(parts, lses, strict=True):
        lse[:, :, : tokens // 3] = HIDDEN
        part[:, :, : tokens // 3] = 0.0
    if not fused.usable(parts[0]):
        yield skipped("sums", "merged in one launch", f"Triton is not at hand on {device}: they take several launches")
        return
    out, lse = torch.empty_like(parts[0], dtype=torch.float32), torch.empty_like(lses[0])
    fused.merge_parts_(out, lse, [], parts, lses, [0] * 4)
    whole, its = torch.zeros_like(out, dtype=torch.float64), torch.full_like(lse, HIDDEN, dtype=torch.float64)
    for part, of_part in zip(parts, lses, strict=True):
        merge_(whole, its, part, of_part.double())
    seen = its != HIDDEN
    yield verdict("sums", "merged in one launch", distance([out, lse[seen]], [whole.float(), its[seen].float()]))


# ---- attention on virtual ranks --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Site:
    """An attention, its operands whole."""

    mask: str
    strategy: str
    tokens: int
    heads: tuple[int, int] = (8, 8)

    @property
    def pattern(self) -> str:
        return {"window": f"window({self.tokens // 5})", "padding": "full"}.get(self.mask, "causal")

    @property
    def layout(self) -> str:
        return "contiguous" if self.mask in ("window", "padding") else "zigzag"

    def operands(self, device: torch.device) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        heads, kv_heads = self.heads
        sizes = (heads, kv_heads, kv_heads, heads)
        return [made(1, each, self.tokens, DIM, device=device, seed=i) for i, each in enumerate(sizes)]

    def terms(self, device: torch.device) -> tuple[Mask, list[Tensor]]:
        """What is done to the scores, and what that reads."""
        if self.mask == "padding":
            there = torch.arange(self.tokens, device=device) < self.tokens * 3 // 4
            return Mask(visible=load(0, [axis("b"), axis("k")], torch.bool)), [there[None]]
        if self.mask == "documents":
            one, other = (load(0, [axis("b"), axis(each)], torch.int64) for each in "qk")
            numbers = (torch.arange(self.tokens, device=device) * 3) // self.tokens
            return Mask(visible=applied("eq", [one, other], torch.bool)), [numbers[None]]
        if self.mask == "softcap":
            half = applied("mul", [score(torch.float32), number(0.5, torch.float32)], torch.float32)
            capped = applied("tanh", [half], torch.float32)
            return Mask(score=applied("mul", [capped, number(2.0, torch.float32)], torch.float32)), []
        return Mask(), []

    def on(self, mesh: Mesh, ranks: int, kernel: Kernel | None, whole: Sequence[Tensor]) -> list[Tensor]:
        """out, dq, dk, dv of the rank's rows. Raises OptionError where the strategy cannot do it."""
        q, k, v, dout = whole
        mask, sources = self.terms(q.device)
        sharded = ShardedPattern(self.pattern, self.tokens, self.tokens, ranks, self.layout, self.layout)
        plan = plan_of(sharded, self.strategy if ranks > 1 else "ring", self.heads, mask)
        exchange, trade = (plan.whole, plan) if isinstance(plan, HeadExchange) else (plan, None)
        used = kernel or choose_kernel("auto", q.dtype, q.device, DIM, DIM)[0]
        dropped = 0.2 if self.mask == "dropout" else 0.0
        site = Attention(exchange, mask, used, DIM**-0.5, dropout_p=dropped, heads=trade)
        own = layout_of(self.layout, self.tokens, ranks).ranges(mesh.rank)
        q, k, v, dout = (torch.cat([x[:, :, rows.start : rows.stop] for rows in own], 2) for x in whole)
        seed = torch.tensor(7, device=q.device) if dropped else None
        given = Operands(q, k, v, sources, seed=seed)
        with torch.no_grad():
            out, lse = attend(site, mesh, given)
            return [out, *attend_backward(site, mesh, dout, Saved(given, out, lse))[:3]]

    def of_rank(self, whole: Sequence[Tensor], rank: int, ranks: int) -> list[Tensor]:
        """The rank's rows."""
        own = layout_of(self.layout, self.tokens, ranks).ranges(rank)
        return [torch.cat([x[:, :, rows.start : rows.stop] for rows in own], 2).float() for x in whole]

    def exact(self, device: torch.device) -> list[Tensor]:
        """By one rank in float32, written out."""
        alone, wide = StreamMesh(1, device), [x.float() for x in self.operands(device)]
        return alone.run(lambda mesh: self.on(mesh, 1, Math(), wide))[0]


def sites(tokens: int) -> Iterator[Site]:
    """Every strategy under every mask."""
    for mask in MASKS:
        for strategy in (*STRATEGIES, *(["halo"] if mask == "window" else [])):
            yield Site(mask, strategy, tokens)


def ranks(device: torch.device, tokens: int, size: int, step: Callable[[], None]) -> Iterator[Row]:
    """Virtual ranks, in bfloat16."""
    for site in sites(tokens):
        what = f"{site.mask}, {site.strategy}, {size} ranks"
        try:
            whole = site.operands(device)
            found = StreamMesh(size, device).run(partial(site.on, ranks=size, kernel=None, whole=whole))
        except OptionError as error:
            yield skipped("ranks", what, str(error))
            continue
        finally:
            step()
        exact = site.exact(device)
        parts = [site.of_rank(exact, rank, size) for rank in range(size)]
        far = max(distance([x.float() for x in mine], its) for mine, its in zip(found, parts, strict=True))
        yield verdict("ranks", what, far)
