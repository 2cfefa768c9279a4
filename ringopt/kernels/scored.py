"""Attention whose scores are changed or whose weights are dropped, a launch for each tile where Triton is at hand on a
GPU (triton_scored.py). The reference, and what takes the rest, is math.py."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ringopt.expr.mask import Mask
from ringopt.expr.simplify import apply
from ringopt.expr.terms import axis, load, score
from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.fused import LIBRARY, dense, usable
from ringopt.kernels.math import Math, Modifier, reduced
from ringopt.kernels.score_program import FLOATS, scores_program
from ringopt.torch_compat.fake_tensors import FakeTensor

WIDEST = 256

CALL = (
    "Tensor? mask, Tensor[] sources, Tensor? seed, str program, int[] place, int[] band, float scale, int least, "
    "float keep"
)
LIBRARY.define(f"scored_attention(Tensor q, Tensor k, Tensor v, {CALL}) -> (Tensor, Tensor)")
LIBRARY.define(
    "scored_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{CALL}, bool learns) -> (Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class Drop:
    """Dropped weights: a hash of `seed` and the place below `least` drops one, the others count `keep` times."""

    seed: Tensor
    least: int
    keep: float


@dataclass(frozen=True)
class TilePlace:
    """Of a tile: its global rows, those of the queries on the rank, and the first head."""

    queries: range
    keys: range
    local: range
    head: int

    @property
    def numbers(self) -> list[int]:
        ends = ((rows.start, rows.step) for rows in (self.queries, self.keys, self.local))
        return [*(number for pair in ends for number in pair), self.head]


def refusal_of_scored(q: Tensor, value_dim: int, mask: Mask, sources: Sequence[Tensor]) -> Refusal | None:
    """None, or why tiles of these queries are not computed so."""
    if not usable(q) or q.dtype not in FLOATS:
        return Refusal("it takes Triton, a GPU, and 32 bits at most")
    if max(q.shape[3], value_dim) > WIDEST:
        return Refusal(f"heads of {max(q.shape[3], value_dim)}, and {WIDEST} fit into the memory of a kernel")
    if any(source.device != q.device for source in sources):
        return Refusal("the mask reads what is on another device")
    if isinstance(found := scores_program(mask, True), Refusal):
        return found
    tried = isinstance(q, FakeTensor) or works(q.device, q.dtype, q.shape[3], value_dim)
    return None if tried else Refusal("it does not work on this device")


class Scored(Kernel):
    """One tile at `place`, over `sources`: `mask.score`, and with `whole` the rest of the mask as well. `drop`: dropped
    weights."""

    name = "scored"

    def __init__(self, mask: Mask, sources: Sequence[Tensor], place: TilePlace, drop: Drop | None, whole: bool):
        self.sources, self.place, self.drop = sources, place, drop
        program = scores_program(mask, whole) if mask.score is not None or whole else ""
        assert isinstance(program, str), program
        self.program = program

    @property
    def bands(self) -> bool:
        return True

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        return None

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = map(dense, (tile.q, tile.k, tile.v))
        out, lse = torch.ops.ringopt_kernels.scored_attention(q, k, v, *self._call(tile))
        return out, lse

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        return self._gradients(tile, rows, learns=False)[:3]

    def backward_with_mask(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `backward` of a tile that is not empty and has a mask, and the gradient of that, in its shape."""
        assert tile.mask is not None
        dq, dk, dv, dmask = self._gradients(tile, rows.visible(), learns=True)
        return dq, dk, dv, reduced(dmask, tile.mask.shape)

    def _gradients(self, tile: TileInputs, rows: WholeRows, learns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dout, q, k, v, out = map(dense, (rows.dout, tile.q, tile.k, tile.v, rows.out))
        call = *self._call(tile), learns
        found: tuple[Tensor, Tensor, Tensor, Tensor]
        found = torch.ops.ringopt_kernels.scored_attention_backward(dout, q, k, v, out, rows.lse, *call)
        return found

    def _call(self, tile: TileInputs) -> tuple[object, ...]:
        band = tile.band or ((-tile.q.shape[2], 1) if tile.causal else ())
        drop = (self.drop.seed, self.drop.least, self.drop.keep) if self.drop is not None else (None, 0, 1.0)
        seed, least, keep = drop
        sources = list(self.sources) if self.program else []
        return tile.mask, sources, seed, self.program, self.place.numbers, list(band), tile.scale, least, keep


@cache
def works(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the kernels give the numbers of matrix products here: tried once for heads of these sizes, on capped
    scores. Where they do not, a warning says why, and attention with such scores takes many launches."""
    float32 = torch.float32
    twice = apply("mul", [score(float32), load(0, [axis("h")], float32)], float32)
    mask = Mask(score=apply("tanh", [twice], float32))
    try:
        made = torch.Generator(device).manual_seed(0)
        dims = (key_dim, key_dim, value_dim, value_dim)
        q, k, v, dout = (torch.randn(1, 2, 96, dim, device=device, generator=made).to(dtype) for dim in dims)
        by_head = torch.tensor([1.0, 2.0], device=device)
        tile = TileInputs(q, k, v, key_dim**-0.5, causal=True)
        right = Math(modifier=Modifier(lambda scores, rows: (scores * by_head.view(-1, 1, 1)).tanh()))
        kernel = Scored(mask, [by_head], TilePlace(range(96), range(96), range(96), 0), None, whole=True)
        expected, found = right.forward(tile), kernel.forward(tile)
        rows = WholeRows(dout, expected[0].to(dtype), expected[1])
        pairs = zip((*expected, *right.backward(tile, rows)), (*found, *kernel.backward(tile, rows)), strict=True)
        worked = all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs)
        why = "their numbers are wrong"
    except Exception as error:
        worked, why = False, f"{type(error).__name__}: {error}"
    if not worked:
        warnings.warn(f"kernels for changed scores do not work on {device}, and are not used: {why}", stacklevel=2)
    return worked


def _forward(q: Tensor, k: Tensor, v: Tensor, *call: object) -> tuple[Tensor, Tensor]:
    from ringopt.kernels.triton_scored import forward

    with torch.cuda.device_of(q):
        return forward(q, k, v, *call)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ringopt.kernels.triton_scored import backward

    with torch.cuda.device_of(q):
        return backward((dout, out, lse), q, k, v, *call[:-1], learns=call[-1])


def _forward_sizes(q: Tensor, k: Tensor, v: Tensor, *call: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_sizes(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
    *_, learns = rest
    return dq, dk, dv, q.new_empty((*q.shape[:3], k.shape[2]) if learns else (0,), dtype=torch.float32)


for key in ("CUDA", "CPU"):  # on the CPU Triton's interpreter runs them, in tests
    LIBRARY.impl("scored_attention", _forward, key)
    LIBRARY.impl("scored_attention_backward", _backward, key)
LIBRARY.impl("scored_attention", _forward_sizes, "Meta")
LIBRARY.impl("scored_attention_backward", _backward_sizes, "Meta")
