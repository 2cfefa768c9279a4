"""What a rule of an attention says, as a mask: who sees whom, beside a loop over all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.declared_attention import DeclaredSite, visible
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
