"""What the host knows of the tensors that a mask reads, for as long as they hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ringopt.hardware.to_host import to_host

T = TypeVar("T")

# Bytes of the sources of a mask: of more, each block is read where they are.
COPIED = 1 << 24


class MaskFacts:
    """Which blocks the sources of a mask hide is decided on the host. Small ones are copied there, all at once, and
    what was found of a block is kept: for attentions of other layers, and their backwards, that read the same values.
    Nothing waits for the copy before the first question."""

    def __init__(self, sources: Sequence[Tensor]):
        away = any(x.device.type not in ("cpu", "meta") for x in sources)
        small = sum(x.nbytes for x in sources) <= COPIED
        self._arriving = to_host(sources) if away and small else None  # what is on the host is not held
        self._found: dict[Hashable, Any] = {}

    def numbers(self, sources: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same `sources` where their numbers are read."""
        return sources if self._arriving is None else self._arriving()

    def once(self, question: Hashable, answer: Callable[[], T]) -> T:
        """What `answer` gives, asked the first time."""
        if question not in self._found:
            self._found[question] = answer()
        found: T = self._found[question]
        return found
