"""`ringopt::tabulate`: a term over b, h and rows as a tensor, in plain ops, so that gradients reach its sources."""

from __future__ import annotations

import json
from functools import lru_cache

import torch
from torch import Tensor

from ringopt.expr.evaluate import evaluate
from ringopt.expr.mask import ScoreBlock
from ringopt.expr.terms import Term, loads_terms
from ringopt.ops.attention import LIBRARY

LIBRARY.define("tabulate(Tensor[] sources, str term, str rows, SymInt[] sizes) -> Tensor")


@lru_cache(maxsize=1024)
def parsed(text: str) -> Term:
    """The term of a text, cached."""
    return loads_terms(json.loads(text))[0]


def tabulate(sources: list[Tensor], term: str, rows: str, sizes: list[int]) -> Tensor:
    """[sizes[0], sizes[1], sizes[2], 1]: the element at batch row b, head h and row `rows` ("q" or "k"). Where `term`
    does not depend on an axis, its size is 1."""
    device = sources[0].device if sources else torch.device("cpu")
    place = ScoreBlock(sizes[0], sizes[1], torch.arange(sizes[2], device=device), range(1)).coordinates(device)
    value = evaluate(parsed(term), {"b": place["b"], "h": place["h"], rows: place["q"]}, sources, device)
    return value.expand(*sizes, 1)


LIBRARY.impl("tabulate", tabulate, "CompositeImplicitAutograd")
