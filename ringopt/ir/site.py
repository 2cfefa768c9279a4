"""What is known of one attention of a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch.fx as fx

from ringopt.ir.nodes import module_path, source_line
from ringopt.ir.placement import Sharded
from ringopt.output.drawn import Prediction


@dataclass(frozen=True)
class Latents:
    """What K and V of a site are made of, token by token.

    cut             values that K and V come from, with where their rows are, and how many numbers a token has of each
    consts          what is read whole beside them: weights
    body            the text of (rows of all of `cut` side by side, *consts) -> K, V
    numbers, whole  of a token: of `cut`, and of K and V
    flops           to make K and V of a token
    """

    cut: tuple[tuple[fx.Node, Sharded, int], ...]
    consts: tuple[fx.Node, ...]
    body: str
    numbers: int
    whole: int
    flops: int


@dataclass
class SiteInfo:
    """One attention site; the passes fill it in, the report shows it. `masked`: the program passes a mask; `source`:
    its line of source; `not_dilated`: why the dilation of the options is not applied; `whole`: the side with too few
    tokens to shard, which is replicated; `by_heads`: tokens stand in the place of its heads (each query has keys of
    its own), and are sharded instead; `reason`: the note that explains the choice of the strategy; `kernel_there`: that
    of the hardware which a report is made for; `latents`: what travels in the place of K and V, None where these
    travel; `predictions`: of the strategies that were compared, the cost model's choice first, in `training` of
    both directions."""

    module: str
    form: str
    pattern: str = "full"
    masked: bool = False
    source: str = ""
    strategy: str = "none"
    layout: str = "none"
    kernel: str = "none"
    kernel_there: str = ""
    refusal: str | None = None
    not_dilated: str | None = None
    bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)
    reason: str = ""
    whole: Literal["", "queries", "keys"] = ""
    by_heads: bool = False
    latents: Latents | None = None
    predictions: tuple[Prediction, ...] = ()
    training: bool = False

    @property
    def shown_kernel(self) -> str:
        """The kernel that the report names."""
        return self.kernel_there or self.kernel

    @classmethod
    def at(cls, node: fx.Node, form: str, pattern: str, masked: bool) -> SiteInfo:
        """Of attention that the program has where `node` comes from."""
        return cls(module_path(node), form, pattern, masked, source_line(node))
