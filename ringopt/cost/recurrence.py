"""What it costs to share a recurrence, by states or by heads.

states   a rank runs its own steps of all heads: more often, for the map of its steps
heads    a rank runs all steps of its own heads: all that has tokens changes ranks, there and back
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
# What changes ranks is laid out for them, and again when it is there; each time it is read and written.
COPIES = 4


def kernel_work(state: int, tokens: int) -> float:
    """FLOPs, at the rate of attention's tiles, that take as long as a kernel does, of `state` numbers of all heads and
    batches."""
    return WORK * state * tokens / SHARE


@dataclass(frozen=True)
class ScanCase:
    """`work`: FLOPs of all steps, `carried`: of what they carry alone. `sent`: bytes of the maps that a rank tells the
    others; `moved`: bytes of all that has tokens, of this rank's tokens. `columns`: runs of the recurrence that make a
    matrix."""

    work: float
    carried: float
    sent: int
    moved: int
    columns: int
    ranks: int
    training: bool

    def predictions(self, rates: Rates) -> tuple[Prediction, ...]:
        """Of both, the faster first. A backward takes twice the time of a forward, and makes the states again."""
        run, part = (flops / self.ranks / rates.default.rate for flops in (self.work, self.carried))
        learns, ways = int(self.training), 1 + int(self.training)
        moved = round(self.moved * (self.ranks - 1) / self.ranks) * ways
        states = run * (1 + 2 * learns) + part * (1 + self.columns + 3 * learns)
        heads = run * (1 + 2 * learns) + part * learns + COPIES * self.moved * ways / rates.touch
        sent = self.sent * ways
        found = (
            Prediction("states", states + ways * rates.link.latency + sent / rates.link.rate, sent, sent, True),
            Prediction("heads", heads + 2 * ways * rates.link.latency + moved / rates.link.rate, moved, moved, True),
        )
        return tuple(sorted(found, key=lambda one: one.seconds))
