"""Which way ranks share a recurrence: by states, or by heads, whichever is predicted to be faster or was asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx
from torch import Tensor

from ringopt.cost.choose import duration
from ringopt.cost.recurrence import ScanCase
from ringopt.cost.site import rates_at
from ringopt.distributed.mesh import Mesh
from ringopt.ir.site import SiteInfo
from ringopt.options import Strategy
from ringopt.report import bytes_text


def choose_way(info: SiteInfo, case: ScanCase, mesh: Mesh, like: Tensor, strategy: Strategy) -> None:
    """Fills in the strategy of a recurrence that can be shared both ways, computed where `like` lies, in its dtype."""
    rates = rates_at(mesh, like)
    found = list(case.predictions(rates))
    if strategy == "ulysses":
        found.sort(key=lambda one: one.strategy != "heads")
    info.predictions, (best, other) = tuple(found), found
    info.strategy = best.strategy
    if best.strategy == "heads":
        info.bytes_sent = heads_bytes(case.moved, case.ranks)
    info.reason = (
        f"strategy {best.strategy} {duration(best.seconds)}, {bytes_text(best.bytes)} sent, predicted (others: "
        f"{other.strategy} {duration(other.seconds)}, {bytes_text(other.bytes)} sent); {rates.source}"
    )
    info.notes.append(info.reason)


def heads_bytes(moved: int, ranks: int) -> int:
    """That a rank sends in the forward, by heads, where `moved` are the bytes of its tokens."""
    return moved * (ranks - 1) // ranks


def in_common(operands: Sequence[fx.Node]) -> str:
    """A note on operands that are gathered, by heads."""
    return f"what all heads have in common goes to all ranks: {', '.join(x.name for x in operands)}"
