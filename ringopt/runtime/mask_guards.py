"""A compiled graph that took the numbers of some inputs for granted is compiled anew when they change.

A causal mask is often kept as a buffer of ones and zeros. Reading it while compiling turns it into a pattern; a model
that loads or writes another mask later must not go on with the old one. The block tables of flex_attention may change
with every batch, as long as they say what mask_mod says: for them the claim is asked again, and only where it has
become false is the graph compiled anew, which refuses it.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch import Tensor

from ringopt.distributed.consistency import bytes_of, digests_of
from ringopt.frontend.flex_block_masks import Claim, is_hollow
from ringopt.output.printable import logger
from ringopt.torch_compat.tensors import version_of

log = logger(__name__)

Compiled = Callable[..., Any]
State = tuple["weakref.ref[Tensor]", int, int]
Made = tuple[Compiled, Sequence[int], Sequence[Claim]]
Make = Callable[[Sequence[Any], bool], Made]


class Watched:
    """`make(inputs, anew)` gives the compiled graph, the places of the buffers it relies on, and the claims it makes.
    The first one serves all sizes that Dynamo lets through; one made anew, when no guard can be added any more, serves
    those of its inputs.

    Every tensor counts its writes, but not those through `.data`, numpy or a pointer. So where none was counted, a
    checksum of memory on the host is compared (a few per cent of the attention that has the mask); elsewhere that would
    wait for the device, and such a write is not seen. Where anything was written, the numbers are compared.
    """

    def __init__(self, make: Make, inputs: Sequence[Any]):
        self.make = make
        self.sizes: list[Any] | None = None
        self.note(make(inputs, False), inputs)

    def note(self, made: Made, inputs: Sequence[Any]) -> None:
        self.run, self.buffers, self.claims = made
        read = (i for claim in self.claims for i in claim.places)
        self.seen = {i: state(inputs[i]) for i in (*self.buffers, *read)}
        self.digests = {i: numbers(inputs[i]) for i in self.seen}
        self.checksums = {i: checksum(inputs[i]) for i in self.seen}

    def __call__(self, *inputs: Any) -> Any:
        touched = [
            i
            for i, before in self.seen.items()
            if not is_untouched(before, inputs[i]) or checksum(inputs[i]) != self.checksums[i]
        ]
        found = {i: numbers(inputs[i]) for i in touched}
        changed = {i for i, now in found.items() if now != self.digests[i]}
        reason = self.broken(changed, inputs)
        if reason:
            log.warning("%s: the graph is compiled anew", reason)
        if reason or (self.sizes is not None and self.sizes != _sizes(inputs)):
            self.note(self.make(inputs, True), inputs)
            self.sizes = _sizes(inputs)
        for i in touched:
            if i in self.seen:
                self.seen[i], self.digests[i], self.checksums[i] = state(inputs[i]), found[i], checksum(inputs[i])
        return self.run(*inputs)

    def broken(self, changed: Set[int], inputs: Sequence[Any]) -> str:
        """What no longer holds; "" where all does."""
        if any(i in changed for i in self.buffers):
            return "a buffer that a mask was read from has changed"
        if any(not changed.isdisjoint(claim.places) and not claim.holds(inputs) for claim in self.claims):
            return "the block tables of flex_attention no longer say what mask_mod says"
        return ""


def _sizes(inputs: Sequence[Any]) -> list[Any]:
    return [x.shape if isinstance(x, Tensor) else x for x in inputs]


def numbers(value: Tensor) -> list[int] | None:
    """A digest; None for a tensor of a dry run, which has no numbers."""
    return None if is_hollow(value) else digests_of([value], value.device)[0].tolist()


def checksum(value: Tensor) -> int:
    """Of the memory of a tensor on the host; 0 for any other."""
    if is_hollow(value) or value.device.type != "cpu" or not value.numel():
        return 0
    if not value.is_contiguous():
        return zlib.crc32(bytes_of(value))
    # Not by numpy(), which forbids the memory to be resized from then on.
    return zlib.crc32((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))


def state(value: Tensor) -> State | None:
    """What another tensor, or the same after a write, does not have; None for a tensor that does not count writes."""
    return None if value.is_inference() else (weakref.ref(value), value.data_ptr(), version_of(value))


def is_untouched(before: State | None, value: Tensor) -> bool:
    """Whether `value` is the very tensor: the memory of one that is gone may hold the next."""
    if before is None:
        return False
    known, *rest = before
    return known() is value and rest == [value.data_ptr(), version_of(value)]
