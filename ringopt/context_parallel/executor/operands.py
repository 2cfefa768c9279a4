"""What an attention is given on one rank, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Pair, wide_zeros
from ringopt.context_parallel.executor.expand import Expansion
from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.plan.concurrency import KVSizes
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.distributed.mesh import Mesh
from ringopt.expr.mask import Mask
from ringopt.kernels.base import HIDDEN, Kernel


@dataclass(frozen=True)
class Attention:
    """What is computed, and by which plan and kernel. The plan was proved where it was made: what runs it believes it.

    learned     numbers of the `sources` whose gradients are asked for
    dropout_p   probability with which a weight is dropped
    first_head  number of the first query head that is given: mask and dropout know heads by number
    heads       where rows are traded for heads, the plan of that; `exchange` is then the one between nodes
    """

    exchange: Exchange
    mask: Mask
    kernel: Kernel
    scale: float
    learned: tuple[int, ...] = ()
    dropout_p: float = 0.0
    first_head: int = 0
    heads: HeadExchange | None = None

    @property
    def nan_rows(self) -> bool:
        """Whether there may be rows that are NaN because they see no key."""
        pattern, parts = self.exchange.pattern, any(term is not None for term in self.mask.terms)
        return self.mask.nan and (parts or pattern.blind)


@dataclass(frozen=True)
class Operands:
    """The rank's rows, as the layouts give them: q [B, Hq, Sq_local, D], k [B, Hkv, Sk_local, D], v [B, Hkv, Sk_local,
    Dv].

    sources   what the mask reads
    sinks     [1|B, Hq]: one more logit in the softmax of every row, that leads to no value
    seed      of dropout: int64 without dims, the same on all ranks
    expansion where k and v are what K and V are made of, how: k is [1, 1, Sk_local, L], and v of no numbers
    facts     what the host knows of the sources, where others read them too
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sources: Sequence[Tensor] = ()
    sinks: Tensor | None = None
    seed: Tensor | None = None
    expansion: Expansion | None = None
    facts: MaskFacts | None = None

    @property
    def value_dim(self) -> int:
        return self.v.shape[3] if self.expansion is None else self.expansion.value_dim

    def read(self, learned: Sequence[int]) -> list[Tensor]:
        """What has a gradient beside q, k, v and sinks: the `learned` sources, then constants of the expansion."""
        return [*(self.sources[i] for i in learned), *(self.expansion.learned if self.expansion is not None else ())]


def kv_sizes(k: Tensor, v: Tensor, mask: Mask) -> KVSizes:
    """KV heads, and bytes a token of one of them over all batches; a mask is not cut into heads."""
    token_bytes = k.shape[0] * (k.shape[3] + v.shape[3]) * k.element_size()
    return KVSizes(k.shape[1], token_bytes, cut=not mask.text, device=k.device.type)


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward; `out` and `lse` are over all keys."""

    given: Operands
    out: Tensor
    lse: Tensor


# ---- gradients -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AttentionGrads:
    """In the accumulator's dtype. Of the learned sources and the sinks, this rank's part."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsources: Sequence[Tensor]
    dsinks: Tensor | None = None

    @classmethod
    def zeros(cls, given: Operands, learned: Sequence[int]) -> AttentionGrads:
        dq, dk, dv, *parts = map(wide_zeros, (given.q, given.k, given.v, *(given.sources[i] for i in learned)))
        return cls(dq, dk, dv, parts, wide_zeros(given.sinks) if given.sinks is not None else None)

    def rounded(self, given: Operands, learned: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """dq, dk, dv and the other gradients, that of the sinks last, in the dtypes of what they are gradients of."""
        extras = rounded_parts(self.dsources, self.dsinks, given, learned)
        return self.dq.to(given.q.dtype), self.dk.to(given.k.dtype), self.dv.to(given.v.dtype), extras


class HomeKVGrads:
    """dK and dV of the rank's own rows, all heads: zeros that are made when they are first needed, after the rows that
    travel in a backward have left."""

    def __init__(self, k: Tensor, v: Tensor):
        self._k, self._v = k, v

    @cached_property
    def pair(self) -> Pair:
        return wide_zeros(self._k), wide_zeros(self._v)

    def of(self, heads: range) -> Pair:
        """Views of some heads."""
        dk, dv = self.pair
        return dk[:, heads.start : heads.stop], dv[:, heads.start : heads.stop]


@dataclass(frozen=True)
class Totals:
    """Sums in the accumulator's dtype, to which blocks add in place: dQ, the gradients of learned sources, what `home`
    gives when it is first needed: dK and dV of the rank's own rows; and gradients of constants of the expansion."""

    dq: Tensor
    dsources: Sequence[Tensor]
    home: Callable[[], Pair]
    dconsts: Sequence[Tensor] = ()


def rounded_parts(
    parts: Sequence[Tensor], dsinks: Tensor | None, given: Operands, learned: Sequence[int]
) -> list[Tensor]:
    """Gradients of what is read beside (Operands.read) and of the sinks, in the dtypes of these."""
    found = [part.to(x.dtype) for part, x in zip(parts, given.read(learned), strict=True)]
    if dsinks is not None and given.sinks is not None:
        found.append(dsinks.to(given.sinks.dtype))
    return found


# ---- rows that see no key, where the mask makes these NaN ------------------------------------------------------------
def without_nan(attention: Attention, dout: Tensor, saved: Saved) -> tuple[Tensor, Saved]:
    """Zeros in place of rows that are NaN because they see no key, where no gradient reaches their scores."""
    if not (attention.nan_rows and attention.mask.stops):
        return dout, saved
    hidden = (saved.lse == HIDDEN).unsqueeze(-1)
    return dout.masked_fill(hidden, 0.0), replace(saved, out=saved.out.masked_fill(hidden, 0.0))


def spread_nan(dq: Tensor, parts: Sequence[Tensor], hidden: Tensor) -> None:
    """In place: the weights of the rows `hidden` [B, Hq, Sq_local] are NaN for all keys."""
    dq.masked_fill_(hidden.unsqueeze(-1), torch.nan)
    for part in parts:
        part.masked_fill_(hidden.any(), torch.nan)


def spread_nan_to_keys(grads: Sequence[Tensor], mesh: Mesh, hidden: Tensor) -> None:
    """The same for gradients of keys and values, and rows of any rank."""
    batch, kv_heads = grads[0].shape[:2]
    heads = hidden.any(-1).view(batch, kv_heads, -1).any(-1)
    heads = mesh.all_reduce(heads.to(mesh.device, torch.int32), "nan").to(hidden.device) > 0
    for grad in grads:
        grad.masked_fill_(heads[:, :, None, None], torch.nan)
