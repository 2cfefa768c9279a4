"""Repeated KV heads are un-repeated: only Hkv heads need to travel.

    k = x[:, :, None].expand(B, Hkv, g, S, D).reshape(B, Hkv * g, S, D)
    v = repeat_interleave(w, g, 1)                                               # [B, Hkv * g, S, D]
    y = attention(q, k, v, ...)
        ->
    y = attention(q, x, w, ...)                                                  # [B, Hkv, S, D]

`ringopt::attention` lets query head h attend with KV head h // g, so a repetition that tiles the heads (h % Hkv) stays.
Found by following one element of k up through views, whatever they are. The operator sums the gradient of x over the
query heads, as the repetition did.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.expr.evaluate import evaluate
from ringopt.expr.terms import Term
from ringopt.ir.constants import LARGEST, Constants
from ringopt.ir.nodes import shape_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.ops import operators
from ringopt.recognize.lift import Cone, coordinates
from ringopt.rewrite import Facts, Rewrite
from ringopt.torch_compat.symbolic_shapes import GuardAsked, without_guards


@dataclass(frozen=True)
class Repeated:
    """An attention of which K or V repeats its heads. `k` and `v` are what they repeat; one that does not, itself."""

    node: fx.Node
    k: fx.Node
    v: fx.Node

    @property
    def heads(self) -> tuple[int, int]:
        """Of K and V, not repeated."""
        return shape_of(self.k)[1], shape_of(self.v)[1]


@dataclass(frozen=True)
class StripRepeatKv(Rewrite[fx.Node, Repeated]):
    """Hands attention the KV heads before they are repeated (GQA), so that only those are sent."""

    name = "strip_repeat_kv"
    reads = ("values",)
    writes = ("relied_on", "sites")
    optional = True
    lost = "KV heads that the program repeats travel as often as they are repeated"

    def subjects(self, facts: Facts) -> Iterable[fx.Node]:
        return facts.context.sites

    def match(self, node: fx.Node, facts: Facts) -> Repeated | None:
        if node.target is not operators.attention.default:
            return None
        call = AttentionCall.of(node)
        k, v = (unrepeated(operand, facts.constants) for operand in (call.k, call.v))
        return Repeated(node, k or call.k, v or call.v) if k or v else None

    def check(self, found: Repeated, facts: Facts) -> Refusal | None:
        of_keys, of_values = found.heads
        if of_keys != of_values:
            sentence = f"KV heads travel as they are repeated: K has {of_keys} of its own, V {of_values}"
            return Refusal(sentence, found.node)
        return None

    def rewrite(self, found: Repeated, facts: Facts) -> None:
        call = AttentionCall.of(found.node)
        call.replace(k=found.k, v=found.v).write(found.node)
        facts.context.sites[found.node].notes.append(f"{call.heads[1]} KV heads repeat {found.heads[0]}, which travel")

    def refuse(self, found: Repeated, refusal: Refusal, facts: Facts) -> None:
        facts.context.sites[found.node].notes.append(refusal.sentence)


def unrepeated(operand: fx.Node, constants: Constants) -> fx.Node | None:
    """The [B, Hkv, S, D] node whose heads `operand` [B, H, S, D] repeats, each H / Hkv times in a row; None without,
    and where an open size would have to be a number to tell."""
    sizes: Iterable[Any] = filter(is_open, shape_of(operand))
    shape_env = next((size.node.shape_env for size in sizes), None)
    try:
        with without_guards(shape_env) if shape_env is not None else nullcontext():
            return climbed(operand, constants)
    except GuardAsked:
        return None


def climbed(operand: fx.Node, constants: Constants) -> fx.Node | None:
    """The same. Raises GuardAsked."""
    shape = shape_of(operand)
    cone = Cone(constants, dict(zip("bhsd", shape, strict=True)))
    node, index = operand, cone.index(shape, "bhsd")
    while (found := cone.view(node, index)) is not None:
        node, index = found
        if repeats(node, index, shape, cone):
            return node
    return None


def repeats(node: fx.Node, index: tuple[Term, ...], shape: tuple[int, ...], cone: Cone) -> bool:
    """Whether element (b, h, s, d) is read at [b, h // groups, s, d] of fewer heads."""
    heads = shape_of(node)[1] if len(index) == 4 else 0
    if not heads or not all(map(same, shape_of(node), (shape[0], heads, *shape[2:]))):
        return False
    if heads >= shape[1] or shape[1] % heads:
        return False
    here = cone.index(shape, "bhsd")
    if any(index[dim] is not here[dim] for dim in (0, 2, 3)):
        return False
    return is_head_group(index[1], shape[1] // heads, cone)


def is_head_group(term: Term, groups: int, cone: Cone) -> bool:
    """Whether `term` is h // groups at every head."""
    if term.axes - {"h"} or not cone.is_known(term) or cone.sizes["h"] > LARGEST:
        return False
    place = coordinates(["h"], cone.sizes)
    return bool((evaluate(term, place, cone.known) == place["h"] // groups).all())
