"""Why a rewrite was not done: a value, so that it can be counted, printed and tested."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True)
class Refusal:
    """`sentence` is the reason, for the user; `node` is the graph value to blame, where there is one."""

    sentence: str
    node: fx.Node | None = None


class GraphRefused(Exception):
    """A pass cannot make its invariant hold: the whole graph stays as it was, and the report says why."""

    def __init__(self, refusal: Refusal):
        self.refusal = refusal
        super().__init__(refusal.sentence)
