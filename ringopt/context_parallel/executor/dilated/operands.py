"""What dilated attention is given on one rank, and what its tiles have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.geometry.dilation import Kept
from ringopt.context_parallel.plan.dilated import DilatedPlan
from ringopt.kernels.base import HIDDEN, Kernel


@dataclass(frozen=True)
class DilatedAttention:
    """What is computed, and by which plan and kernel."""

    plan: DilatedPlan
    kernel: Kernel
    scale: float
    dropout_p: float = 0.0

    @property
    def causal(self) -> bool:
        return self.plan.dilation.causal

    def zero_keys(self, kept: Kept, rows: int) -> int:
        """Keys of zeros that torchscale adds to a segment that keeps `rows` rows."""
        adds = self.plan.dilation.torchscale_mixing and not self.causal
        return kept.padded - rows if adds else 0


@dataclass(frozen=True)
class Operands:
    """The rank's rows, as the layout gives them: q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local,
    Dv]. `seen` [B, S]: which keys of the whole sequence are no padding. `sinks` [1|B, Hq] and `seed` as in ring
    attention (operands.py)."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward."""

    given: Operands
    out: Tensor
    lse: Tensor


def dropout_of(attention: DilatedAttention, given: Operands) -> Dropout:
    """The dropout of an attention. Raises ValueError where `given` has no seed."""
    if given.seed is None:
        raise ValueError(f"dropout_p is {attention.dropout_p}, and there is no seed to draw from")
    return Dropout(attention.dropout_p, given.seed.to(given.q.device))


def additive(seen: Tensor, q: Tensor) -> Tensor | None:
    """[B, 1, queries, keys] of [B, keys], a view that is one row of keys; None where all are seen."""
    if bool(seen.all()):
        return None
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, HIDDEN)
    return mask[:, None, None].expand(-1, 1, q.shape[2], -1)
