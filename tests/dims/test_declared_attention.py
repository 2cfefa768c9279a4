"""What a rule of an attention says, as a mask: who sees whom, beside a loop over all pairs. And what the rule leaves
open."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.declared_attention import DeclaredSite, contradiction, gradient_of, unsaid, visible
from ringopt.ir.autograd_function import CustomGradient
from ringopt.ir.nodes import value_of
from ringopt.rules.declare import AttentionRule

QUERIES, KEYS = 4, 6
MASK = torch.arange(KEYS * QUERIES).view(QUERIES, KEYS) % 4 != 1


@dataclass(frozen=True)
class Case:
    """`plain`: scaled_dot_product_attention says it without a mask of its own; `begins`: the ends of documents."""

    rule: AttentionRule
    plain: bool
    keys: int = KEYS
    mask: Tensor | None = None
    ends: tuple[list[int], list[int]] | None = None


PACKED = {"layout": "SHD", "segments": ("q_ends", "k_ends")}
CASES: dict[str, Case] = {
    "all": Case(AttentionRule(), plain=True),
    "causal, as many": Case(AttentionRule(causal=True), plain=True, keys=QUERIES),
    "causal, first": Case(AttentionRule(causal=True, align="first"), plain=True),
    "causal, last": Case(AttentionRule(causal=True, align="last"), plain=False),
    "before": Case(AttentionRule(window=(1, -1), align="first"), plain=False),
    "after, last": Case(AttentionRule(window=(None, 1), align="last"), plain=False),
    "both": Case(AttentionRule(window=(2, 0), align="last"), plain=False),
    "a window that is causal": Case(AttentionRule(causal=True, window=(1, 3), align="last"), plain=False),
    "a mask and causal": Case(AttentionRule(causal=True, align="first", mask="m"), plain=False, mask=MASK),
    "a mask": Case(AttentionRule(mask="m"), plain=True, mask=MASK),
    "a mask and a window": Case(AttentionRule(window=(1, 1), align="first", mask="m"), plain=False, mask=MASK),
    "numbers and causal": Case(
        AttentionRule(causal=True, align="last", mask="m"), plain=False, mask=torch.arange(24.0).view(QUERIES, KEYS)
    ),
    "documents": Case(AttentionRule(**PACKED), plain=False, ends=([0, 1, 4], [0, 4, 6])),
    "documents, causal": Case(
        AttentionRule(**PACKED, causal=True), plain=False, keys=QUERIES, ends=([0, 1, 4], [0, 1, 4])
    ),
}


def site_of(case: Case) -> tuple[fx.Graph, DeclaredSite]:
    """A call with these facts; values are tensors with numbers, so that what is written is computed."""
    graph, packed = fx.Graph(), case.rule.layout == "SHD"
    given: dict[str, Any] = {}
    ends = zip(("q_ends", "k_ends"), map(torch.tensor, case.ends or ()), strict=False)
    sizes = {"q": QUERIES, "k": case.keys, "v": case.keys}
    shapes = {name: (size, 2, 3) if packed else (1, 2, size, 3) for name, size in sizes.items()}
    for name, value in (*((name, torch.zeros(shape)) for name, shape in shapes.items()), ("m", case.mask), *ends):
        if value is not None:
            given[name] = graph.placeholder(name)
            given[name].meta["val"] = value
    return graph, DeclaredSite(given["q"], case.rule, given)


def is_seen(case: Case, query: int, key: int) -> bool:
    """By what the fields of AttentionRule say, one pair at a time."""
    rule = case.rule
    own = query + (case.keys - QUERIES if rule.align == "last" else 0)
    before, after = (-1 if x is None else x for x in rule.window or (-1, -1))
    if (rule.causal and key > own) or (not rule.causal and after >= 0 and key > own + after):
        return False
    if before >= 0 and key < own - before:
        return False
    if case.ends is not None:
        document = [sum(place >= end for end in ends) for place, ends in zip((query, key), case.ends, strict=True)]
        return document[0] == document[1]
    return True


@pytest.mark.parametrize("name", CASES)
def test_who_sees_whom(name: str) -> None:
    case = CASES[name]
    graph, site = site_of(case)
    assert site.plain == case.plain
    if case.plain and (case.mask is not None or not case.rule.causal):
        return
    expected = torch.tensor([[is_seen(case, q, k) for k in range(case.keys)] for q in range(QUERIES)])
    if case.mask is not None:
        hidden = torch.zeros(()) if case.mask.dtype == torch.bool else torch.tensor(float("-inf"))
        expected = torch.where(expected, case.mask, hidden.to(case.mask.dtype))
    assert torch.equal(value_of(visible(graph, site)), expected)


# ---- what keeps an operator as it is ---------------------------------------------------------------------------------
FITS = {"q": (2, 4, 5, 3), "k": (2, 2, 6, 3), "v": (2, 2, 6, 7)}


def shaped(rule: AttentionRule, result: tuple[int, ...], **shapes: tuple[int, ...]) -> DeclaredSite:
    """A call with operands of these shapes, and a result of that one."""
    graph = fx.Graph()
    given = {name: valued(graph.placeholder(name), torch.zeros(shape)) for name, shape in shapes.items()}
    node = valued(graph.call_function(torch.ops.prims.sin.default, tuple(given.values())), torch.zeros(result))
    return DeclaredSite(node, rule, given)


def valued(node: fx.Node, value: Any) -> fx.Node:
    node.meta["val"] = value
    return node


@pytest.mark.parametrize(
    "change",
    [
        {"k": (1, 2, 6, 3)},
        {"v": (1, 2, 6, 7)},
        {"v": (2, 2, 5, 7)},
        {"k": (2, 2, 6, 4)},
        {"v": (2, 1, 6, 7)},
        {"k": (2, 3, 6, 3), "v": (2, 3, 6, 7)},
        {"k": (2, 6, 3)},
        {"result": (2, 4, 5, 3)},
    ],
)
def test_shapes_that_contradict_the_rule(change: dict[str, Any]) -> None:
    rule, fits = AttentionRule(layout="BHSD"), {"result": (2, 4, 5, 7), **FITS}
    assert contradiction(shaped(rule, **fits)) == ""
    assert contradiction(shaped(rule, **{**fits, **change})).startswith("its rule says BHSD")


def test_packed_sequences_need_their_ends() -> None:
    shapes = {"q": (5, 4, 3), "k": (6, 2, 3), "v": (6, 2, 7), "result": (5, 4, 7)}
    assert contradiction(shaped(AttentionRule(layout="SHD"), **shapes)) == "its rule says SHD and no segments"
    assert contradiction(shaped(AttentionRule(**PACKED), **shapes)) == ""


# ---- an autograd.Function around it ----------------------------------------------------------------------------------
RULE = AttentionRule(layout="BHSD", backward="prims::cos")
RULE_OPS = (torch.ops.prims.cos.default, torch.ops.aten.clone.default)


@dataclass
class Around:
    """An operator that gives (out, lse), read by a Function that keeps both; `backward`: the operators of its
    backward."""

    rule: AttentionRule = RULE
    backward: tuple[Any, ...] = RULE_OPS

    def __post_init__(self) -> None:
        self.graph = fx.Graph()
        self.given = {name: valued(self.graph.placeholder(name), torch.zeros(FITS[name])) for name in FITS}
        out, lse = torch.zeros(2, 4, 5, 7), torch.zeros(2, 4, 5)
        node = valued(self.graph.call_function(torch.ops.prims.sin.default, tuple(self.given.values())), (out, lse))
        self.out, self.lse = (
            valued(self.graph.call_function(operator.getitem, (node, i)), x) for i, x in enumerate((out, lse))
        )
        self.site = DeclaredSite(node, self.rule, self.given)

    def function(self, outputs: list[fx.Node], inputs: list[fx.Node] | None = None) -> fx.Node:
        graph = fx.Graph()
        x = graph.placeholder("gradient")
        for op in self.backward:
            x = graph.call_function(op, (x,))
        graph.output([x])
        taken = list(self.given.values()) if inputs is None else inputs
        return self.graph.call_function(
            CustomGradient(fx.GraphModule({}, graph)), (outputs, taken, [self.out, self.lse])
        )

    def copied(self, x: fx.Node, op: Any = torch.ops.aten.clone.default) -> fx.Node:
        return valued(self.graph.call_function(op, (x,)), x.meta["val"])


def test_the_function_whose_backward_is_declared() -> None:
    around = Around()
    function = around.function([around.out])
    assert gradient_of(around.site) is function and unsaid(around.site) == ""
    around.graph.output(around.lse)
    assert unsaid(around.site) == "its result 1 is read, which a sharded attention does not give"


def test_a_function_may_take_and_give_copies() -> None:
    around = Around()
    q, k, v = map(around.copied, around.given.values())
    around.given.update(q=q, k=around.copied(k, torch.ops.aten.detach.default), v=v)
    function = around.function([around.copied(around.copied(around.out))])
    function.args = (function.args[0], [q, k, v], function.args[2])
    assert gradient_of(around.site) is function


UNNAMED = "an autograd.Function keeps its results for a backward that the rule does not name"
SINE, SINES = torch.ops.prims.sin.default, torch.ops.aten.sin.default


@pytest.mark.parametrize(
    "around, outputs",
    [
        (Around(AttentionRule(layout="BHSD")), lambda x: [x.out]),
        (Around(backward=(SINE,)), lambda x: [x.out]),
        (Around(backward=(*RULE_OPS, SINES)), lambda x: [x.out]),
        (Around(), lambda x: [x.copied(x.out, SINES)]),
        (Around(), lambda x: [x.out, x.copied(x.out)]),
    ],
)
def test_functions_that_are_not_the_attention(around: Around, outputs: Any) -> None:
    around.function(outputs(around))
    assert unsaid(around.site) == UNNAMED


def test_functions_of_which_something_else_is_read() -> None:
    few, twice, lse = Around(), Around(), Around()
    few.function([few.out], [few.given["q"]])
    assert unsaid(few.site) == UNNAMED
    for _ in range(2):
        twice.function([twice.out])
    assert unsaid(twice.site) == UNNAMED
    lse.function([lse.lse])
    assert unsaid(lse.site) == "its result 1 is read, which a sharded attention does not give"
