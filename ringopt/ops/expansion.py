"""What `ringopt::ring_attention` is told where K and V are made of what travels in their place, as text.

    {"body": {...}, "sources": 1, "heads": 16, "key_dim": 192, "value_dim": 128, "flops": 8388608}

The body (ringopt/scans/body.py) takes rows of z and constants, and gives K and V; so it is part of every cache key, is
compared over the ranks, and travels in files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from torch import Tensor

from ringopt.context_parallel.executor.expand import Expansion
from ringopt.cost.simulate import Heads
from ringopt.scans.body import from_text


@dataclass(frozen=True)
class ExpansionCall:
    """`body`: the text of (z [rows, L], *consts) -> K, V; `sources`: how many of the operator's sources are those of
    the mask: the others are the constants; `heads`, `key_dim`, `value_dim`: of K and V; `flops`: to make a row."""

    body: str
    sources: int
    heads: int
    key_dim: int
    value_dim: int
    flops: int

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def of(self, sources: Sequence[Tensor], learned: Sequence[int]) -> Expansion:
        """With the constants among the operator's `sources`. Raises NoBody."""
        wanted = tuple(number - self.sources for number in learned if number >= self.sources)
        return Expansion(from_text(self.body).module, sources[self.sources :], wanted, self.value_dim)

    def expanded(self, travelling: Heads) -> Heads:
        """The sizes of an attention over K and V, from those of one over what travels."""
        latent = travelling.kv_heads * (travelling.key_dim + travelling.value_dim)  # of all batch rows
        whole = replace(travelling, kv_heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim)
        return replace(whole, latent=latent, latent_flops=self.flops)


@lru_cache(maxsize=1024)
def expansion_of(text: str) -> ExpansionCall:
    """Raises ValueError for a text that is none."""
    try:
        return ExpansionCall(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"a text tells of no expansion of K and V ({error}): {text[:80]!r}") from error
