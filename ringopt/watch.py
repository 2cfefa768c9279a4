"""A compiled graph that took the numbers of some buffers for granted is compiled anew when they change.

A causal mask is often kept as a buffer of ones and zeros. Reading it while compiling turns it into a pattern; a model
that loads or writes another mask later must not go on with the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from ringopt.distributed.same import bytes_of, digest

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


class Watched:
    """`make(inputs)` gives the compiled graph and the places of the buffers it relies on.

    Looking costs nothing where no buffer was written: every tensor counts its writes. Where one was, its numbers are
    compared.
    """

    def __init__(self, make: Callable[[Sequence[Any]], tuple[Compiled, Collection[int]]], inputs: Sequence[Any]):
        self.make = make
        self.run, places = make(inputs)
        self.note(inputs, places)

    def note(self, inputs: Sequence[Any], places: Collection[int]) -> None:
        self.seen = {i: state(inputs[i]) for i in places}
        self.digests = {i: digest(bytes_of(inputs[i])) for i in places}

    def __call__(self, *inputs: Any) -> Any:
        touched = [i for i, before in self.seen.items() if before is None or state(inputs[i]) != before]
        if any(digest(bytes_of(inputs[i])) != self.digests[i] for i in touched):
            log.warning("a buffer that a mask was read from has changed: the graph is compiled anew")
            self.run, places = self.make(inputs)
            self.note(inputs, places)
        for i in touched:
            self.seen[i] = state(inputs[i])
        return self.run(*inputs)


def state(buffer: Tensor) -> tuple[int, int] | None:
    """Changes with every write; None for a tensor that does not count them."""
    return None if buffer.is_inference() else (buffer.data_ptr(), buffer._version)
