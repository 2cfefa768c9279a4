"""A link of known speed for machines where none can be built: messages arrive no sooner than they would on it.

Where `link_lab` shapes real packets, this lets a message of the real transport count as arrived only when a link of
this rate would have carried it: each rank has one link out and one in, which carry one message after the other,
from when it was posted. Who waits sleeps, and leaves the processor to others. Both ends of a message reckon for
themselves, as if they had posted at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ringopt.distributed.mesh import Mesh, Transfer, Work
from ringopt.tools.benchmarks.lab.wrapped import Wrapped


@dataclass
class Late:
    """`work`, not done before `due` on the monotonic clock."""

    work: Work
    due: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.monotonic()))


class EmulatedLink(Wrapped):
    """`mesh` with links of `rate` bytes a second each way and `latency` seconds a message."""

    def __init__(self, mesh: Mesh, rate: float, latency: float = 0.0):
        super().__init__(mesh)
        self.rate, self.latency = rate, latency
        self._free = [0.0, 0.0]  # when the link in, the link out have carried what was posted so far

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        due = max(self._carried(way, [b.nbytes for _, b in posted]) for way, posted in enumerate((receives, sends)))
        return [Transfer(t.what, Late(t.work, due)) for t in self.mesh._post(sends, receives, label)]

    def _carried(self, way: int, sizes: Sequence[int]) -> float:
        start = max(self._free[way], time.monotonic())
        self._free[way] = start + sum(sizes) / self.rate
        return self._free[way] + self.latency * bool(sizes)
