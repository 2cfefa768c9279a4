"""Tokens picked by numbers that are known only when the program runs, worked on, and put back where they were.

    rows = where(mask)[0]                      each rank finds its own tokens in its rows of `mask`,
    y = expert(x[rows])                  ->    works on them one by one,
    out = out.index_add(0, rows, y)            and adds them to its own rows: nobody else has anything to do with it

    parts = split(sorted, counts)              the same, if `counts` are those of a rank's own rows, which is for the
    out = cat([f(x) for f, x in ...])    ->    reader to see (ringopt/sharding/handlers/moe_routing.py)

The graph is read from its inputs on: every value is the same on all ranks, has its tokens along one dim, or has picked
ones. Whatever does not fit is no such stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ringopt.dims.op_families import COPIES, RESHAPES, SPLITS
from ringopt.dims.rule import Rule
from ringopt.dims.rules import rule_of
from ringopt.dims.searches import beginnings, bools, is_search, sized_by
from ringopt.ir.nodes import named, op_name, outputs_of, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded

KEEPS_NUMBERS = (*RESHAPES, *COPIES, "unsqueeze", "detach")


@dataclass(frozen=True)
class Rows:
    """A value has tokens along `dim`: all (`pick` None), or those that `pick` names, in its order. `numbers`: its
    elements say which tokens; `matrix`: it has a column for each dim of a mask, of which `dim` is told by `column`."""

    dim: int
    pick: object = None
    numbers: bool = False
    column: int | None = None


State = Rows | None


@dataclass(frozen=True)
class TokensPicked:
    """The dim of tokens of each input (-1: it has none) and of the output; `counts`: the input that has the numbers of
    tokens of the pieces that another is split into, -1 if none is."""

    along: tuple[int, ...]
    out: int
    counts: int = -1


class Mixed(Exception):
    """Tokens meet, or cannot be told apart."""


class Wanted(Exception):
    """An input has to have its tokens along a dim."""

    def __init__(self, node: fx.Node, dim: int):
        self.node, self.dim = node, dim


def tokens_picked(graph: fx.Graph) -> list[TokensPicked]:
    """What `graph`, of one output, is along tokens: a proof for each dim of the output that they may be (of a mask of
    [B, S] both), none where there is none."""
    inputs = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        proofs = dict[int, TokensPicked]()
        for dim in beginnings(node):
            mask = node.args[0] if op_name(node) != "index" else bools(node)[0]
            found = Reading(graph, inputs).begun(mask, dim)
            if found is not None:
                proofs.setdefault(found.out, found)
        if proofs:
            return list(proofs.values())
    return []


class Reading:
    """One attempt; `places` has the inputs that have tokens."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[fx.Node]):
        self.graph, self.inputs = graph, list(inputs)
        self.places: dict[fx.Node, int] = {}
        self.counts: set[fx.Node] = set()
        self.states: dict[fx.Node, State] = {}

    def begun(self, mask: fx.Node, dim: int) -> TokensPicked | None:
        """With the tokens of `mask` along `dim`."""
        first: Callable[[], object] = lambda: self.demand(mask, dim)  # noqa: E731
        for _ in range(4 * len(self.inputs) + 4):
            try:
                self.states = {}
                first()
                self.read()
            except Wanted as wanted:
                if wanted.node in self.places:
                    return None
                self.places[wanted.node] = wanted.dim
                continue
            except Mixed:
                return None
            return self.found()
        return None

    def found(self) -> TokensPicked | None:
        (out,) = outputs_of(self.graph)
        state = self.states.get(out)
        if state is None or state.pick is not None or state.numbers or len(self.counts) > 1:
            return None
        if self.counts & self.places.keys():
            return None
        counts = self.inputs.index(next(iter(self.counts))) if self.counts else -1
        return TokensPicked(tuple(self.places.get(x, -1) for x in self.inputs), state.dim, counts)

    def read(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.states[node] = Rows(self.places[node]) if node in self.places else None
            elif node.op == "call_function":
                self.states[node] = self.of(node)

    def demand(self, node: fx.Node, dim: int) -> None:
        """Has the inputs that `node` is made of hold tokens where it is to have them along `dim`."""
        if node.op == "placeholder":
            if self.places.get(node) == dim:
                return
            raise Wanted(node, dim)
        rule, operands = rule_of(node), list(tensor_args(node))
        wanted = rule.pull(place(node, dim)) if rule is not None and len(rule.operands) == len(operands) else None
        if wanted is None:
            raise Mixed
        for operand, at in zip(operands, wanted, strict=True):
            if at is not None:
                self.demand(operand, at.dim)

    # ---- what a node makes of tokens ---------------------------------------------------------------------------------
    def of(self, node: fx.Node) -> State:
        if op_name(node) in SPLITS and sized_by(node) is not None:
            return self.split(node)
        if all(self.states[x] is None for x in node.all_input_nodes):
            return None
        special = getattr(self, SPECIAL.get(op_name(node), ""), None)
        found: State | bool = special(node) if special is not None else False
        return found if isinstance(found, Rows) else self.by_rule(node)

    def by_rule(self, node: fx.Node) -> State:
        """Token by token: all operands have the tokens that the rule wants of them."""
        rule, operands = rule_of(node), list(tensor_args(node))
        if rule is None or len(rule.operands) != len(operands):
            raise Mixed
        having = [(i, x, state) for i, x in enumerate(operands) if (state := self.states[x]) is not None]
        if not having:
            raise Mixed
        if len({state.pick for _, _, state in having}) != 1 or any(state.column is not None for *_, state in having):
            raise Mixed
        numbers = any(state.numbers for *_, state in having)
        if numbers and op_name(node) not in KEEPS_NUMBERS:
            raise Mixed
        out = rule.push(having[0][0], place(having[0][1], having[0][2].dim))
        if out is None:
            raise Mixed
        self.all_have(rule, operands, out, having[0][2].pick)
        return Rows(out.dim, having[0][2].pick, numbers)

    def all_have(self, rule: Rule, operands: Sequence[fx.Node], out: Sharded, pick: object) -> None:
        wanted = rule.pull(out)
        if wanted is None:
            raise Mixed
        for operand, at in zip(operands, wanted, strict=True):
            state = self.states[operand]
            if at is None and state is None:
                continue
            if at is not None and state is None and pick is None:
                self.demand(operand, at.dim)
            if at is None or state is None or state.dim != at.dim or state.pick != pick:
                raise Mixed

    def search(self, node: fx.Node) -> State:
        """A column of numbers for each dim of the mask."""
        mask = node.args[0]
        if not is_search(node):
            return None
        state = self.states[mask]
        if state is None or state.pick is not None or state.numbers:
            raise Mixed
        return Rows(0, mask, column=state.dim)

    def column(self, node: fx.Node) -> State:
        """An element of where(mask), a column of nonzero(mask)."""
        state = self.states[node.args[0]]
        if state is None or state.column is None:
            return None
        if op_name(node) == "unbind":
            if named(node, "dim") % 2 != 1:
                raise Mixed
            return state
        if op_name(node) == "select" and named(node, "dim") % 2 != 1:
            raise Mixed
        return Rows(0, state.pick, numbers=node.args[-1] == state.column)

    def vector(self, node: fx.Node) -> State:
        """The only column of nonzero(mask) as a vector."""
        state = self.states[node.args[0]]
        if state is None or state.column is None or len(shape_of(node)) != 1 or shape_of(node.args[0])[1] != 1:
            return None
        return Rows(0, state.pick, numbers=True)

    def size(self, node: fx.Node) -> State:
        """How many tokens there are: for shapes only, which follow from what has them."""
        state = self.states[node.args[0]]
        if state is None or node.args[1] != state.dim or state.pick is None or state.column is not None:
            raise Mixed
        return replace(state, numbers=True, column=-1)

    def index(self, node: fx.Node) -> State:
        """Tokens picked out of all."""
        x, at = node.args[0], list(node.args[1])
        picked = self.picked(x, at)
        return None if picked is None else Rows(picked[1], picked[0])

    def picked(self, x: fx.Node, at: Sequence[fx.Node | None]) -> tuple[object, int] | None:
        """By what tokens are picked out of `x` by indices, and the dim of the result that they are; None where it is
        not tokens that are picked."""
        dim, found, before = 0, list[tuple[object, int, int]](), list[int]()
        for index in at:
            if index is None:
                dim += 1
                continue
            state = self.states[index]
            before.append(dim)
            if state is None:
                self.search_in_tokens(index, dim, self.states[x])
            if value_of(index).dtype in (torch.bool, torch.uint8):
                if state is not None and state.pick is not None:
                    raise Mixed
                if state is None:
                    dim += len(shape_of(index))
                    continue
                found.append((index, dim, dim + state.dim))
                dim += len(shape_of(index))
                continue
            if state is not None and (state.numbers or state.pick is not None):
                if len(shape_of(index)) != 1 or state.column is not None:
                    raise Mixed
                found.append((state.pick, before[0], dim if state.numbers else -1))
            elif state is not None:
                return None
            dim += 1
        if not found or not any(where >= 0 for *_, where in found):
            return None
        if before != list(range(before[0], before[0] + len(before))) or len({pick for pick, *_ in found}) != 1:
            raise Mixed  # else torch puts the picked dim first
        ((place_of, along),) = {(first, where) for _, first, where in found if where >= 0}
        self.has_all(x, along)
        return found[0][0], place_of if len(before) else 0

    def search_in_tokens(self, index: fx.Node, dim: int, x: State) -> None:
        """Where an index picks among tokens that are spread, what it is found in has to be spread as well."""
        if x is None or x.pick is not None:
            return
        if value_of(index).dtype in (torch.bool, torch.uint8):
            if dim <= x.dim < dim + len(shape_of(index)):
                self.demand(index, x.dim - dim)
        elif x.dim == dim and op_name(index) in ("getitem", "select"):
            found, column = index.args[0], index.args[-1]
            found = found.args[0] if op_name(found) == "unbind" else found
            if is_search(found):
                self.demand(found.args[0], column)

    def has_all(self, x: fx.Node, dim: int) -> None:
        """`x` has all tokens along `dim`."""
        state = self.states[x]
        if state is None:
            self.demand(x, dim)
        if state is None or state.dim != dim or state.pick is not None or state.numbers:
            raise Mixed

    def put(self, node: fx.Node) -> State:
        """Picked tokens written, or added, to where they are among all."""
        x, at, values = node.args[:3]
        picked = self.picked(x, list(at))
        if picked is None:
            return None
        pick, dim = picked
        consumed = sum(len(shape_of(i)) if value_of(i).dtype in (torch.bool, torch.uint8) else 1 for i in at if i)
        state, behind = self.states[values], len(shape_of(x)) - consumed + 1 - dim
        if state is not None and (state.pick != pick or state.numbers or len(shape_of(values)) - state.dim != behind):
            raise Mixed
        if state is None and len(shape_of(values)) >= behind and shape_of(values)[-behind] != 1:
            raise Mixed
        return self.states[x]

    def add(self, node: fx.Node) -> State:
        """index_add, index_copy."""
        x, dim, index, source = node.args[:4]
        state, values = self.states[index], self.states[source]
        if state is None or not state.numbers:
            return None
        dim %= len(shape_of(x))
        self.has_all(x, dim)
        if values is None or values.pick != state.pick or values.dim != dim or values.numbers:
            raise Mixed
        return self.states[x]

    def select(self, node: fx.Node) -> State:
        """index_select."""
        x, dim, index = node.args[:3]
        state = self.states[index]
        if state is None or not state.numbers:
            return None
        self.has_all(x, dim % len(shape_of(x)))
        return Rows(dim % len(shape_of(x)), state.pick)

    def loss(self, node: fx.Node) -> State:
        """Of each token, where it is not reduced."""
        first, target, *rest = (self.states[x] for x in tensor_args(node))
        if named(node, "reduction") or first != target or any(rest) or first is None or first.dim or first.numbers:
            raise Mixed
        return first

    # ---- pieces of rows that are sorted ------------------------------------------------------------------------------
    def split(self, node: fx.Node) -> State:
        """Each piece has its own tokens."""
        x, dim = node.args[0], named(node, "dim") % len(shape_of(node.args[0]))
        counts = sized_by(node)
        if counts is None or shape_of(counts) != (len(node.args[1]),):
            raise Mixed
        self.has_all(x, dim)
        self.counts.add(counts)
        return Rows(dim, ("pieces", counts))

    def piece(self, node: fx.Node) -> State:
        state = self.states[node.args[0]]
        if state is not None and state.column is not None:
            return self.column(node)
        whole = op_name(node.args[0]) in SPLITS and sized_by(node.args[0]) is not None
        if state is None or not whole:
            return None
        assert isinstance(state.pick, tuple)
        return replace(state, pick=(*state.pick, node.args[1]))

    def cat(self, node: fx.Node) -> State:
        """All pieces, in their order."""
        parts, dim = list(node.args[0]), named(node, "dim") % len(shape_of(node))
        states = [self.states[x] for x in parts]
        if not all(isinstance(s, Rows) and s.dim == dim and isinstance(s.pick, tuple) for s in states):
            return None
        picks = [s.pick for s in states if isinstance(s, Rows) and isinstance(s.pick, tuple)]
        (counts,) = {pick[1] for pick in picks} if len({pick[1] for pick in picks}) == 1 else (None,)
        if counts is None or [pick[2:] for pick in picks] != [(i,) for i in range(shape_of(counts)[0])]:
            raise Mixed
        return Rows(dim)


SPECIAL = {
    "where": "search", "nonzero": "search", "nonzero_numpy": "search", "getitem": "piece", "unbind": "column",
    "select": "column", "sym_size": "size", "index": "index", "index_put": "put", "index_add": "add",
    "index_copy": "add", "index_select": "select", "cat": "cat", **dict.fromkeys(RESHAPES, "vector"),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss"), "loss"),
    **dict.fromkeys(("huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"), "loss"),
}  # fmt: skip


def place(node: fx.Node, dim: int) -> Sharded:
    """All of a dim."""
    return Sharded(dim, 1, shape_of(node)[dim], 1)
