"""Loops of a graph that are recurrences over a sequence, and not over layers, experts or taps of a filter.

A loop is over a sequence if its iterations take one part of a tensor after the other, and that tensor is more than
parameters; it is a recurrence if something that it carries is made of what it carried before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from ringopt.ir.nodes import op_name
from ringopt.ir.notes import OF_PROGRAM, PARAMETER
from ringopt.recognize.scans.buffers import Buffers
from ringopt.recognize.scans.loop import Loop, loop_in
from ringopt.recognize.scans.operands import Carried, Counted, Each, Operand, Outside, Own, token
from ringopt.recognize.scans.periods import Repeat, calls_of, stretches
from ringopt.recognize.scans.recurrence import NotRolled, reads_what_it_carries
from ringopt.recognize.scans.roll import Rolled, rolled
from ringopt.recognize.scans.sources import part_of_split, pieces_of, places_of


def loops(graph: fx.Graph) -> list[Loop]:
    """Recurrences. None overlaps another, but one of more steps that goes on with what an inner one carries stands
    before that, which is for when no scan can be made of it."""
    calls, weights = calls_of(graph), of_program(graph)
    taken, found = bytearray(len(calls)), list[Loop]()
    seen: list[Repeat] = []
    place = {node: i for i, node in enumerate(calls)}
    for stretch in sorted(stretches(list(map(token, calls))), key=lambda each: (each.period, each.start)):
        free = taken.find(1, stretch.start, stretch.end) < 0
        if any(stretch.within(each) for each in seen):
            continue
        inner = [] if free else inner_loops(found, stretch, place)
        loop = loop_in(calls, stretch) if free or inner else None
        if loop is None:
            continue
        if free:
            seen.append(stretch)  # what is a loop of this period is one of twice the period too
        if not is_over_sequence(loop, weights) or (recurrence := judged(loop)) is None:
            continue
        if free:
            found.append(loop)
        elif isinstance(recurrence, Rolled) and all(goes_on(loop, each) for each in inner):
            found.insert(0, loop)
        else:
            continue
        for node in loop.nodes():
            taken[place[node]] = 1
    return found


def inner_loops(found: Sequence[Loop], stretch: Repeat, place: dict[fx.Node, int]) -> list[Loop]:
    """Those in a stretch, if each has fewer steps than it has periods and none is there in part."""
    some = [loop for loop in found if any(stretch.start <= place[node] < stretch.end for node in loop.nodes())]
    most = (stretch.end - stretch.start) // stretch.period
    whole = all(stretch.start <= place[node] < stretch.end for loop in some for node in loop.nodes())
    return some if whole and all(loop.steps < most for loop in some) else []


def goes_on(outer: Loop, inner: Loop) -> bool:
    """Whether something that the inner loop computes is made of what the outer one carries."""
    at = {node: j for iteration in outer.iterations for j, node in enumerate(iteration) if node is not None}
    places = {at.get(node, -1) for node in inner.nodes()}
    return -1 not in places and any(_carried_by(outer, each) for each in places)


def judged(loop: Loop) -> Rolled | NotRolled | None:
    """The recurrence that a loop is, or why it could not be made one; None where it is none."""
    try:
        found = rolled(loop)
        return found if reads_what_it_carries(found.recurrence) else None
    except NotRolled as problem:
        return problem if is_recurrent(loop) else None


def is_recurrent(loop: Loop) -> bool:
    """Whether something that is carried is made of itself, other than by writing parts of it."""
    try:
        buffers = Buffers.find(loop)
    except NotRolled:
        return True
    made_of = {place: _carried_by(loop, place) - set(buffers.of) for place in loop.init}
    for place in set(made_of) - set(buffers.of):
        reached, front = set[int](), {place}
        while front:
            front = set().union(*(made_of[each] for each in front)) - reached
            reached |= front
        if place in reached and not _writes_parts_of_itself(loop, place):
            return True
    return False


def _carried_by(loop: Loop, place: int) -> set[int]:
    """The carried values that one is made of in a step."""
    found, seen, stack = set[int](), set[int](), [place]
    while stack:
        for operand in loop.operands[each := stack.pop()]:
            if isinstance(operand, Carried):
                found.add(operand.place)
            elif isinstance(operand, Own) and operand.place not in seen:
                seen.add(operand.place)
                stack.append(operand.place)
        seen.add(each)
    return found


def _writes_parts_of_itself(loop: Loop, place: int) -> bool:
    """A tensor that is filled and read in a way that is not known."""
    return op_name(loop.first[place]) in ("select_scatter", "slice_scatter") and _carried_by(loop, place) == {place}


def is_over_sequence(loop: Loop, weights: set[fx.Node]) -> bool:
    """Whether iterations take parts of a tensor in their order, and none has parameters of its own."""
    parts = False
    for node, row in zip(loop.first, loop.operands, strict=True):
        for operand in row:
            if isinstance(operand, Each):
                if any(value in weights for value in operand.values):
                    return False
                behind = _behind(operand.values)
                parts = parts or (behind is not None and behind not in weights)
        tensor = row[0] if row else None
        if isinstance(tensor, Own):
            tensor = Outside(loop.first[tensor.place]) if _is_fixed(loop, tensor.place) else None
        if isinstance(tensor, Outside) and isinstance(tensor.value, fx.Node) and tensor.value not in weights:
            parts = parts or _takes_part(node, tensor.value, row)
    return parts


def _behind(values: Sequence[fx.Node]) -> fx.Node | None:
    """A tensor of which the values are made, each of one part."""
    pieces = pieces_of(values)
    if pieces is not None:
        return pieces.tensor
    columns = zip(*(value.all_input_nodes for value in values), strict=False)
    found = (pieces_of(column) for column in columns)
    return next((pieces.tensor for pieces in found if pieces is not None), None)


def _takes_part(node: fx.Node, tensor: fx.Node, row: Sequence[Operand]) -> bool:
    """Whether a place takes another part of a tensor in every iteration."""
    name = op_name(node)
    if name == "getitem":
        return isinstance(row[1], Counted) and part_of_split(tensor, row[1]) is not None
    return name in ("select", "slice", "narrow") and places_of(name, row[1:]) is not None


def _is_fixed(loop: Loop, place: int) -> bool:
    """Whether a place has one value in all iterations."""
    row = loop.operands[place]
    return all(isinstance(o, Outside) or (isinstance(o, Own) and _is_fixed(loop, o.place)) for o in row)


def of_program(graph: fx.Graph) -> set[fx.Node]:
    """Values that are made of parameters, buffers and constants alone."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            known = bool(node.meta.get(PARAMETER) or node.meta.get(OF_PROGRAM))
        else:
            known = node.op == "get_attr" or all(arg in found for arg in node.all_input_nodes)
        if known and node.op != "output":
            found.add(node)
    return found
