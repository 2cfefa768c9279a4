"""Whether the step of a scan is affine in what it carries, by reading its graph.

    prove_affine(text, kinds) -> AffineStep | Refusal

A step that is affine makes of any run of steps one map S -> M S + U, so ranks need of each other's steps M and U only.
Some steps are not affine at once, and are when some of what they carry is known: a sum that is scaled by a running
maximum. So the carried values are put in levels: each depends on itself and on those of earlier levels. Values of a
level that depend on each other are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch.fx as fx

from ringopt.ir.refusal import Refusal
from ringopt.scans.body import Body, NoBody
from ringopt.scans.linear_part import LINEAR, MAX_PLUS, LinearPart, NotAffine
from ringopt.scans.state_axes import Axis, state_axes
from ringopt.scans.trace import Kinds, OperandKind, in_own_thread, sized


@dataclass(frozen=True, eq=False)
class Stage:
    """One carried value.

    place    its number among the carries
    earlier  the numbers of those that it reads, or that these read, which are known when it is asked for
    form     "linear": S' = L S + b. "max-plus": S' = max(S + d, k), for each element by itself
    step     (S, *earlier, *xs, *consts) -> (S', *earlier')
    linear   the same without what S is no part of
    axes     of the dims of S
    """

    place: int
    earlier: tuple[int, ...]
    kind: OperandKind
    form: Literal["linear", "max-plus"]
    step: fx.GraphModule
    linear: fx.GraphModule
    axes: tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class AffineStep:
    """A step that is affine, level by level. One that is not has no levels: its states are handed on as they are."""

    text: str
    kinds: Kinds
    levels: tuple[tuple[Stage, ...], ...]


def in_levels(text: str, kinds: Kinds) -> AffineStep:
    """Of any step; without levels where it is not affine."""
    found = prove_affine(text, kinds)
    return found if isinstance(found, AffineStep) else AffineStep(text, kinds, ())


def prove_affine(text: str, kinds: Kinds) -> AffineStep | Refusal:
    """Of the body `text` on operands of such kinds (`ScanCall.kinds`)."""
    return _prove(text, kinds)


@lru_cache(maxsize=1024)
def _prove(text: str, kinds: Kinds) -> AffineStep | Refusal:
    try:
        body = sized(text, kinds)
        return AffineStep(text, kinds, tuple(in_own_thread(lambda: list(_levels(body, kinds)))))
    except NoBody as error:
        return error.refusal
    except NotAffine as error:
        return Refusal(f"a step is not affine in what it carries: {error}", error.node)


def _levels(body: Body, kinds: Kinds) -> Sequence[tuple[Stage, ...]]:
    reads, done, levels = _reads(body), list[int](), list[tuple[Stage, ...]]()
    for place, kind in enumerate(kinds[: body.carries]):
        if not kind.floats:
            raise NotAffine(f"carry {place} is {kind.dtype}", body.outputs[place])
    while len(done) < body.carries:
        left = [place for place in range(body.carries) if place not in done]
        ready = [place for place in left if reads[place] <= {*done, place}]
        if not ready:
            raise NotAffine(f"carries {', '.join(map(str, left))} need each other", body.outputs[left[0]])
        levels.append(tuple(_stage(body, place, reads, kinds[place]) for place in ready))
        done += ready
    return levels


def _reads(body: Body) -> list[set[int]]:
    """Of each carry, which carries its next value is made of, in any number of steps."""
    of: dict[fx.Node, set[int]] = {}
    for place, node in enumerate(body.inputs):
        of[node] = {place} if place < body.carries else set()
    for node in body.module.graph.nodes:
        if node.op == "call_function":
            of[node] = set().union(*(of[arg] for arg in node.all_input_nodes))
    direct = [of[out] for out in body.outputs[: body.carries]]
    found = [set(each) for each in direct]
    for _ in direct:
        found = [each.union(*(direct[place] for place in each)) for each in found]
    return found


def _stage(body: Body, place: int, reads: list[set[int]], kind: OperandKind) -> Stage:
    earlier = tuple(sorted(reads[place] - {place}))
    step = part_of(body, (place, *earlier))
    form: Literal["linear", "max-plus"] = "linear"
    try:
        linear = LinearPart(step).by(LINEAR)
    except NotAffine as error:
        try:
            linear = LinearPart(step).by(MAX_PLUS)
        except NotAffine:
            raise error from None
        form = "max-plus"
    axes = state_axes(linear)
    if form == "max-plus" and "mixed" in axes:
        raise NotAffine("a maximum of what a step carries at other places", body.outputs[place])
    return Stage(place, earlier, kind, form, step, linear, axes)


def part_of(body: Body, places: Sequence[int]) -> fx.GraphModule:
    """`(*carries of these places, *xs, *consts) -> (*their new values)`."""
    inputs, graph = body.inputs, fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in (*(inputs[place] for place in places), *inputs[body.carries :]):
        values[node] = graph.node_copy(node)
    wanted, stack = set(values), [body.outputs[place] for place in places]
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack += node.all_input_nodes
    for node in body.module.graph.nodes:
        if node in wanted and node not in values:
            values[node] = graph.node_copy(node, lambda arg: values[arg])
    graph.output(tuple(values[body.outputs[place]] for place in places))
    return fx.GraphModule(body.module, graph)
