"""Tensors that a loop fills part by part, and may read where it wrote a step before.

    y = select_scatter(y, y_t, 1, t)                                   y_t is a result of every step
    y = slice_scatter(y, h_t, 1, 4 * t, 4 * t + 4);  h_t = f(h_t)      h_t is carried, and a result before each step
    h_t = a[:, t] * select(h, 1, t - 1) + ...;  h = select_scatter(h, h_t, 1, t)       h_t is carried
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx as fx

from ringopt.ir.nodes import op_name
from ringopt.recognize.scans.loop import Loop
from ringopt.recognize.scans.operands import Carried, Counted, Operand, Outside, Own
from ringopt.recognize.scans.recurrence import NotRolled
from ringopt.recognize.scans.sources import PartPlaces, TensorParts, places_of

SCATTERS, READS = ("select_scatter", "slice_scatter"), ("select", "slice")


@dataclass(frozen=True)
class Buffer:
    """A carried tensor that is written at `places`; `written` is the place of what is written, `init` the tensor as the
    loop finds it. `before`: it is written as the step before has left it."""

    place: int
    written: int
    places: PartPlaces
    init: fx.Node
    before: bool = False

    @property
    def result(self) -> int:
        """What of every step is written: a place, or, below zero, the inverse of one for its value before the step."""
        return ~self.written if self.before else self.written


@dataclass
class Buffers:
    """Those of a loop, by place; and of the places that read a part of one, what that part is: the value of a step
    that was written there, or a piece of the tensor that the loop found."""

    of: dict[int, Buffer] = field(default_factory=dict)
    stands_for: dict[int, Operand | TensorParts] = field(default_factory=dict)
    init: dict[int, fx.Node] = field(default_factory=dict)  # of values written that are carried, by their place

    @classmethod
    def find(cls, loop: Loop) -> Buffers:
        """Raises NotRolled where one value is written into two tensors that are read again."""
        found = cls()
        for place in loop.init:
            buffer = _buffer_at(loop, place)
            parts = _parts(loop, buffer) if buffer is not None else None
            if buffer is None or parts is None:
                continue
            found.of[place] = buffer
            found.stands_for.update(parts)
            carried = [reader for reader, part in parts.items() if isinstance(part, Carried)]
            if carried and not buffer.before:  # all of them read one part of the tensor that the loop found
                if buffer.written in found.init or buffer.written in loop.init:
                    raise NotRolled("a value is carried in two ways", loop.first[buffer.written])
                found.init[buffer.written] = loop.first[carried[0]]
        return found


def _buffer_at(loop: Loop, place: int) -> Buffer | None:
    node, row = loop.first[place], loop.operands[place]
    if op_name(node) not in SCATTERS or row[0] != Carried(place) or not isinstance(row[1], (Own, Carried)):
        return None
    places = places_of(op_name(node), row[2:])
    if places is None or (places.width and abs(places.step) != places.width):
        return None
    return Buffer(place, row[1].place, places, loop.init[place], before=isinstance(row[1], Carried))


def _parts(loop: Loop, buffer: Buffer) -> dict[int, Operand | TensorParts] | None:
    """What the places that read the buffer read of it; None where one reads it in another way."""
    found: dict[int, Operand | TensorParts] = {}
    for j, row in enumerate(loop.operands):
        reads = [operand for operand in row if operand in (Carried(buffer.place), Own(buffer.place))]
        if not reads or j == buffer.place:
            if j == buffer.place and len(reads) > 1:
                return None
            continue
        part = _part(loop, buffer, j)
        if part is None:
            return None
        found[j] = part
    return found


def _part(loop: Loop, buffer: Buffer, j: int) -> Operand | TensorParts | None:
    row, name = loop.operands[j], op_name(loop.first[j])
    if name not in READS or any(not isinstance(each, (Outside, Counted)) for each in row[1:]):
        return None
    read, wrote = places_of(name, row[1:]), buffer.places
    if read is None or (read.dim, read.step, read.width) != (wrote.dim, wrote.step, wrote.width):
        return None
    behind, off = divmod(read.first - wrote.first, wrote.step)
    if off:
        return None
    if row[0] == Own(buffer.place) and behind == 0:
        return Carried(buffer.written) if buffer.before else Own(buffer.written)
    if row[0] == Carried(buffer.place) and behind == -1 and not buffer.before:
        return Carried(buffer.written)
    if behind >= (0 if row[0] == Carried(buffer.place) else 1):
        return TensorParts(buffer.init, read)  # not yet written
    return None
