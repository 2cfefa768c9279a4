"""Which node of one graph is which node of another.

Names say little: a rewrite takes them over, a new trace counts them anew. Four kinds of evidence, strongest first:

1. inputs of the program that have one name, then those of one shape in order
2. structure: equal operator, arguments and operands down to the inputs (a Merkle hash), in one module, at last in any
3. neighbours: what stands at the same argument of two matched readers, or reads the same of two matched values
4. provenance: equal operator, module path and source line; of several the only one whose surroundings are equal too,
   the one of the same name, then in the order of the module (longest common blocks)

What is then left at the same argument of matched readers, but with another operator, was replaced. Anything else was
added or removed. (Hashes first, then what surrounds a match: GumTree, Falleri et al. 2014.)
"""

from __future__ import annotations

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Item(Protocol):
    """What alignment reads of a node. `inputs` are names, one for each place in `arguments`."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def arguments(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def module(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def shape(self) -> str: ...
    @property
    def placement(self) -> str: ...


# Operators that hand on a value in another place: who reads the result reads the value behind it.
HANDS_ON = (
    "ringopt::scatter", "ringopt::gather", "ringopt::copy_to_group", "ringopt::leave_to_wrapper",
    "ringopt::reduce_from_group",
)  # fmt: skip
LISTED = "ringopt::copy_all_to_group"  # of several values, each by getitem
PARTED = ("ringopt::ring_attention", "ringopt::dilated_attention", "ringopt::dropout")  # and getitem of these


@dataclass
class Side:
    """One graph by name. `reads` and `users` look through operators that hand a value on: operands of a node, and
    (reader, argument number) of a value."""

    items: dict[str, Item]
    reads: dict[str, list[str]] = field(default_factory=dict)
    users: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, items: Sequence[Item]) -> Side:
        side = cls({item.name: item for item in items})
        for item in items:
            side.reads[item.name] = [side.behind(name) for name in item.inputs]
            if not side.hands_on(item):
                for position, name in enumerate(side.reads[item.name]):
                    side.users[name].append((item.name, position))
        return side

    def behind(self, name: str) -> str:
        """The value that `name` hands on, or `name`."""
        item = self.items[name]
        if item.op == "getitem" and self.items[item.inputs[0]].op == LISTED:
            return self.reads[item.inputs[0]][int(item.arguments.split(", ")[1])]
        return self.reads[name][0] if self.hands_on(item) else name

    def hands_on(self, item: Item) -> bool:
        parted = item.op == "getitem" and self.items[item.inputs[0]].op in (*PARTED, LISTED)
        return parted or item.op in (*HANDS_ON, LISTED)


@dataclass
class Alignment:
    """`pairs` are one and the same node, `replaced` have each other's place; both from names before to names after."""

    before: Side
    after: Side
    pairs: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def match(self, before: str, after: str) -> None:
        self.pairs[before] = after
        self.taken.add(after)

    def replace(self, before: str, after: str) -> None:
        self.replaced[before] = after
        self.taken.add(after)

    def free_before(self, name: str) -> bool:
        return name not in self.pairs and name not in self.replaced

    def left(self) -> tuple[list[Item], list[Item]]:
        before = [item for name, item in self.before.items.items() if self.free_before(name)]
        return before, [item for name, item in self.after.items.items() if name not in self.taken]

    def counterpart(self, before: str) -> str | None:
        return self.pairs.get(before, self.replaced.get(before))


def align(before: Sequence[Item], after: Sequence[Item]) -> Alignment:
    """In time that grows with the number of nodes, but for subsequences inside one module."""
    found = Alignment(Side.of(before), Side.of(after))
    match_inputs(found)
    match_structure(found, by_module=True)
    match_neighbours(found, strictly=True)
    match_surroundings(found)
    match_names(found)
    match_in_order(found, lambda item: (item.op, item.source, item.arguments))
    match_in_order(found, lambda item: (item.op, item.source))
    match_structure(found, by_module=False)
    match_neighbours(found)
    match_in_order(found, lambda item: item.op)
    match_neighbours(found)
    match_replaced(found)
    return found


def match_inputs(found: Alignment) -> None:
    """Inputs and the output: by what the program calls them; inputs of another name by shape, in order."""
    before, after = ([item for item in side if item.op in ("input", "output")] for side in found.left())
    by_call = {called(item): item.name for item in after}
    for item in before:
        if called(item) in by_call:
            found.match(item.name, by_call[called(item)])
    others_before, others_after = ([item for item in side if item.op == "input"] for side in found.left())
    in_order(found, others_before, others_after, lambda item: (item.shape, item.arguments.rpartition(".")[2]))
    others_before, others_after = ([item for item in side if item.op == "input"] for side in found.left())
    in_order(found, others_before, others_after, lambda item: item.shape)


def called(item: Item) -> tuple[str, str]:
    """What the program calls an input; outputs (of the program, of nested graphs) have fixed names."""
    return item.op, item.arguments if item.op == "input" else item.name


def match_structure(found: Alignment, by_module: bool) -> None:
    """Equal down to the inputs, of several equal ones in order; `by_module`: in modules of one name only."""
    same_input = {after: before for before, after in found.pairs.items()}
    before = hashes(found.before, lambda name: name)
    after = hashes(found.after, lambda name: same_input.get(name, f"only after: {name}"))
    free = defaultdict[Hashable, list[str]](list)
    left_before, left_after = found.left()
    for item in reversed(left_after):
        free[after[item.name], item.module if by_module else ""].append(item.name)
    for item in left_before:
        waiting = free.get((before[item.name], item.module if by_module else ""), [])
        if waiting and item.op != "output":
            found.match(item.name, waiting.pop())


def hashes(side: Side, input_name: Callable[[str], str]) -> dict[str, str]:
    """A Merkle hash of each node: operator, arguments and the hashes of its operands, inputs by `input_name`."""
    found: dict[str, str] = {}
    for name, item in side.items.items():
        parts = [item.op, item.arguments, *(found[value] for value in item.inputs)]
        hashed = ["input", input_name(name)] if item.op == "input" else parts
        found[name] = hashlib.blake2b("\0".join(hashed).encode(), digest_size=12).hexdigest()
    return found


def match_surroundings(found: Alignment) -> None:
    """Of several nodes of one provenance (cos and sin of a rotary embedding are made in one line) those that differ
    from the others by what they read and by who reads them, at last by one of these, two steps around, and are alone in
    that on both sides."""
    for steps in (2, 1):
        for looks in ((True, True), (False, True), (True, False)):
            mine = alone(found.before, steps, looks, {before: before for before in found.pairs})
            yours = alone(found.after, steps, looks, {after: before for before, after in found.pairs.items()})
            for colour, name in mine.items():
                if colour in yours:
                    found.match(name, yours[colour])


def alone(side: Side, steps: int, looks: tuple[bool, bool], anchors: Mapping[str, str]) -> dict[Hashable, str]:
    """Nodes by provenance and surroundings (colour refinement, Weisfeiler and Leman 1968) where one has these; nodes
    of `anchors` are known by name. `looks`: at what a node itself reads, and at who reads it."""
    colours: dict[str, Hashable] = {name: anchors.get(name, provenance(item)) for name, item in side.items.items()}
    free = [name for name, item in side.items.items() if name not in anchors and item.op not in ("input", "output")]
    for left in reversed(range(steps)):
        up, down = looks if not left else (True, True)
        around = dict(colours)
        for name in free:
            reads = [colours[x] for x in side.reads[name]] if up else []
            users = [(colours[user], place) for user, place in side.users.get(name, ())] if down else []
            around[name] = hash((colours[name], *reads, *sorted(map(hash, users))))
        colours = around
    names = defaultdict[Hashable, list[str]](list)
    for name in free:
        names[colours[name]].append(name)
    return {colour: same[0] for colour, same in names.items() if len(same) == 1}


def match_names(found: Alignment) -> None:
    """A rewrite keeps names of what it does not touch. Alone a name says nothing: provenance has to agree."""
    before, after = found.left()
    free = {(item.name, *provenance(item)): item.name for item in after}
    for item in before:
        name = free.get((item.name, *provenance(item)))
        if name is not None:
            found.match(item.name, name)


def provenance(item: Item) -> tuple[str, ...]:
    """Evidence 4 of the module: operator, arguments, module path and source line."""
    return item.op, item.arguments, item.module, item.source


def match_in_order(found: Alignment, token: Callable[[Item], Hashable]) -> None:
    """The longest common subsequence of the tokens of each module."""
    left_before, left_after = found.left()
    before, after = _items_by_module(left_before), _items_by_module(left_after)
    for module, items in before.items():
        in_order(found, items, after.get(module, []), token)


def _items_by_module(items: Iterable[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        if item.op not in ("input", "output"):
            found.setdefault(item.module, []).append(item)
    return found


def in_order(
    found: Alignment, before: Sequence[Item], after: Sequence[Item], token: Callable[[Item], Hashable]
) -> None:
    """Matches the longest common blocks of two sequences whose elements compare by `token` (difflib)."""
    if not before or not after:
        return
    matcher = difflib.SequenceMatcher(None, [token(item) for item in before], [token(item) for item in after], False)
    for start, other, length in matcher.get_matching_blocks():
        for step in range(length):
            found.match(before[start + step].name, after[other + step].name)


def match_neighbours(found: Alignment, strictly: bool = False) -> None:
    """Spreads from every matched pair to operands and readers of the same operator; `strictly`: and arguments, module
    and source."""
    waiting = list(found.pairs.items())
    while waiting:
        before, after = waiting.pop()
        for one, other in [*operands(found, before, after), *readers(found, before, after)]:
            mine, yours = found.before.items[one], found.after.items[other]
            same = provenance(mine) == provenance(yours) if strictly else mine.op == yours.op
            if same and found.free_before(one) and other not in found.taken:
                found.match(one, other)
                waiting.append((one, other))


def operands(found: Alignment, before: str, after: str) -> Iterable[tuple[str, str]]:
    """In order; operators that replace each other may read more of them."""
    return zip(found.before.reads[before], found.after.reads[after], strict=False)


def readers(found: Alignment, before: str, after: str) -> Iterable[tuple[str, str]]:
    """Readers that are the only one of their operator and arguments at their place."""
    mine, yours = _unambiguous_readers(found.before, before), _unambiguous_readers(found.after, after)
    return [(name, yours[key]) for key, name in mine.items() if key in yours]


def _unambiguous_readers(side: Side, value: str) -> dict[Hashable, str]:
    readers = defaultdict[Hashable, list[str]](list)
    for name, position in side.users[value]:
        readers[side.items[name].op, side.items[name].arguments, position].append(name)
    return {key: names[0] for key, names in readers.items() if len(names) == 1}


def match_replaced(found: Alignment) -> None:
    """What is left at the same argument of matched readers; then its operands likewise."""
    waiting = list(found.pairs.items())
    while waiting:
        before, after = waiting.pop()
        for one, other in operands(found, before, after):
            items = found.before.items[one], found.after.items[other]
            if not found.free_before(one) or other in found.taken or any(item.op == "input" for item in items):
                continue
            found.replace(one, other)
            waiting.append((one, other))
