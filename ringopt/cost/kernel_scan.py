"""What it costs to share a recurrence that a kernel computes, by states or by heads.

    states   a rank runs the kernel on its own tokens of all heads: more often, for the map of its tokens
    heads    a rank runs it on all tokens of its own heads: all that has tokens changes ranks, there and back
"""

from __future__ import annotations

from dataclasses import dataclass

from ringopt.hardware.rates import Rates
from ringopt.output.drawn import Prediction

# FLOPs of a token and a number of the state: read, decayed, corrected and written to, with the products within a chunk.
WORK = 8
# Of the rate of attention's tiles. fla's gated delta rule, forward and backward, of 32,768 tokens takes 15.6 ms on an
# H800 (flash-linear-attention, issue 691), taken to be 32 heads of 128 x 128: its kernels are bound by memory.
SHARE = 0.05


@dataclass(frozen=True)
class ScanCase:
    """`state`: numbers of the state of all heads and batches. `sent`: bytes of the maps that a rank tells the others;
    `moved`: bytes of all that has tokens, of this rank's tokens. `columns`: runs of the kernel that make a matrix."""

    state: int
    tokens: int
    sent: int
    moved: int
    columns: int
    ranks: int
    training: bool

    def predictions(self, rates: Rates) -> tuple[Prediction, ...]:
        """Of both, the faster first. A backward takes twice the time of a forward, and computes that again."""
        run = WORK * self.state * self.tokens / self.ranks / (rates.default.rate * SHARE)
        ways = 2 if self.training else 1
        moved = round(self.moved * (self.ranks - 1) / self.ranks) * ways
        states = run * ((2 + self.columns) + (1 + 2 * 2 if self.training else 0))
        heads = run * (1 + (1 + 2 if self.training else 0))
        sent = self.sent * ways
        found = (
            Prediction("states", states + ways * rates.link.latency + sent / rates.link.rate, sent, sent, True),
            Prediction("heads", heads + 2 * ways * rates.link.latency + moved / rates.link.rate, moved, moved, True),
        )
        return tuple(sorted(found, key=lambda one: one.seconds))
