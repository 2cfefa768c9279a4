"""What an attention does to its scores beyond its structural pattern, as terms over b, h, q, k (ringopt/expr/terms.py).

    score     a score modifier, a function of the scaled score: 30 * tanh(score / 30)
    bias      an additive mask or bias on top of it
    visible   a boolean mask: where it is False, the query does not see the key (its score is -inf)
    nan       a query that sees no key is NaN, as softmax makes it; without, 0, as SDPA does
    stops     no gradient reaches the score of a hidden key (masked_fill); without, NaN scores have NaN gradients (an
              additive mask)

What is added to hide a key belongs into `bias`, however it was spelled: masked_fill(score, c, -1e9) is the score
where(c, 0, score) and the bias where(c, -1e9, 0).

There is a fifth axis r: the index of the query in the shard of its rank (on one device r is q). A source that is read
at r in some dim is sharded along it as the queries are.

The text of a mask is an argument of the attention operators, so it is part of every cache key and of an exported
program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ringopt.expr.evaluate import Sources, evaluate
from ringopt.expr.terms import (
    Apply,
    Load,
    Score,
    Term,
    axes_of,
    axis,
    children,
    constant,
    dumps,
    loads,
    loads_terms,
    walk,
)
from ringopt.expr.value_ranges import bounds

Kind = Literal["empty", "full", "partial"]

# Scores of a few hundred survive the addition of a number nearer to 0 than this, even in float32.
FAR = 1e4


@dataclass(frozen=True)
class ScoreBlock:
    """A block of the scores [B, H, Q, K]: the size of the batch; that of the heads, or which of them; queries and keys
    by their global positions, in any order. `local`: coordinates of r, `queries` by default."""

    batch: int
    heads: int | range
    queries: range | Tensor
    keys: range | Tensor
    local: range | None = None

    def coordinates(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """int64 coordinates along each axis, shaped to broadcast."""
        local = self.queries if self.local is None else self.local
        axes = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self.keys, "r": local}
        found = {}
        for (name, numbers), dim in zip(axes.items(), (0, 1, 2, 3, 2), strict=True):
            sizes = [-1 if other == dim else 1 for other in range(4)]
            found[name] = _numbers(numbers, device).to(device=device, dtype=torch.int64).view(sizes)
        return found


def _numbers(numbers: int | range | Tensor, device: torch.device | None) -> Tensor:
    if isinstance(numbers, range):
        return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
    # A size may be symbolic (the batch of a rank), which no range can be.
    return numbers if isinstance(numbers, Tensor) else torch.arange(numbers, device=device)


@dataclass(frozen=True)
class Mask:
    """See the module. Sources are numbered: `Load.source` is an index into the list of tensors that comes with a
    mask."""

    visible: Term | None = None
    bias: Term | None = None
    score: Term | None = None
    nan: bool = False
    stops: bool = False

    @staticmethod
    def parse(text: str) -> Mask:
        """The inverse of `text`; "" is the mask that changes nothing. Runs no tensor operation."""
        return _parse(text)

    @cached_property
    def text(self) -> str:
        """Deterministic JSON; "" where the scores stay as they are."""
        given = (("visible", self.visible), ("bias", self.bias), ("score", self.score))
        parts = {name: term for name, term in given if term is not None}
        if not parts and not self.nan:
            return ""
        flags = {name: True for name, flag_set in (("nan", self.nan), ("stops", self.stops)) if flag_set}
        data = {"parts": list(parts), "terms": dumps(*parts.values())} | flags
        return json.dumps(data, separators=(",", ":"))

    @property
    def terms(self) -> tuple[Term | None, ...]:
        return self.visible, self.bias, self.score

    @property
    def asks(self) -> frozenset[str]:
        """The axes of its coordinates: those it depends on other than through the score itself."""
        return frozenset().union(
            *(term.axes for term in walk(*self.terms) if not isinstance(term, Score) and not children(term))
        )

    def is_as_large_as_scores(self, b: int, h: int) -> bool:
        """Whether a dense mask would have the size of the scores [b, h, queries, keys]: nothing is broadcast."""
        sizes = {"b": b, "h": h}
        return {"q", "k", *(axis for axis in sizes if sizes[axis] > 1)} <= axes_of([self.visible, self.bias])

    @property
    def of_keys(self) -> bool:
        """Whether it is a key padding mask: which keys are seen depends on the batch alone, and nothing is added."""
        return self.bias is None and self.score is None and axes_of([self.visible]) <= {"b", "k"}

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the tensors that are read."""
        return tuple(sorted({load.source for load in loads(*self.terms)}))

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Numbers of the floating tensors that a gradient of the scores reaches."""
        return tuple(sorted({load.source for load in _reached(self.bias, self.score)}))

    @cached_property
    def row_dims(self) -> dict[int, int]:
        """Source -> the dim in which it is sharded as the queries are. Raises ValueError where loads disagree about
        that, or read it at other tokens than the query's."""
        found: dict[int, int] = {}
        for load in loads(*self.terms):
            dims = [dim for dim, index in enumerate(load.index) if "r" in index.axes]
            if dims and (len(dims) > 1 or load.index[dims[0]] is not axis("r")):
                raise ValueError(f"source {load.source} holds the rows of a rank and is not read at r in one dim")
            if dims and found.setdefault(load.source, dims[0]) != dims[0]:
                raise ValueError(
                    f"source {load.source} holds the rows of a rank in dim {found[load.source]} and {dims[0]}"
                )
        for load in loads(*self.terms):
            if load.source in found and "r" not in load.axes:
                raise ValueError(f"source {load.source} holds the rows of a rank and is read at other rows as well")
        return found

    @property
    def far(self) -> float | None:
        """A constant of `score` at least FAR from 0, or None. A query with no other scores would have an LSE that
        rounds its scores away: over several ranks such a constant has to be a bias, whose level is known."""
        args = [arg for term in walk(self.score) for arg in (term, *(term.args if isinstance(term, Apply) else ()))]
        numbers = (constant(arg) for arg in args)
        return next((float(x) for x in numbers if x is not None and FAR <= abs(x) < math.inf), None)

    def kind(self, spans: Mapping[str, range], sources: Sources) -> Kind:
        """The kind of the block `spans` ("b", "h", "q", "k" -> nonempty range), without computing it.

        "empty": no query of it sees a key of it. "full": every query sees every key and nothing is added. Sound: from
        intervals of the loaded values, never from a sample. Reads at most a block of each source; one that a mapping
        lacks may hold anything. `score` does not count: see `modifies`.
        """
        spans = {"r": spans["q"], **spans}
        low, high = bounds(self.visible, spans, sources) if self.visible is not None else (True, True)
        if not high:
            return "empty"
        added = self.bias is not None and constant(_chosen(self.bias, spans, sources)) != 0
        return "full" if low and not added else "partial"

    def modifies(self, spans: Mapping[str, range], sources: Sequence[Tensor]) -> bool:
        """Whether `score` may change a score of the block `spans`; sound, as `kind` is."""
        if self.score is None:
            return False
        return not isinstance(_chosen(self.score, {"r": spans["q"], **spans}, sources), Score)

    def modified(self, scores: Tensor, block: ScoreBlock, sources: Sequence[Tensor]) -> Tensor:
        """The score modifier applied to the scaled scores of `block`, in their shape and dtype; `scores` without one.
        Differentiable in `scores` and in `differentiable` sources."""
        if self.score is None:
            return scores
        place = block.coordinates(scores.device)
        found = evaluate(self.score, {**place, "score": scores}, sources, scores.device)
        return found.to(scores.dtype).expand(scores.shape)

    def additive(
        self, block: ScoreBlock, sources: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """The mask that is added to `block` [1 or b, 1 or h, queries, keys] in `dtype`: -inf where hidden, else the
        bias.

        The bits are those of the program's own mask at these places; gradients reach `differentiable` sources. A dim
        that the mask does not depend on is a view of stride 0.
        """
        given = [x for x in (block.queries, block.keys, *sources) if isinstance(x, Tensor)]
        device = device or (given[0].device if given else torch.device("cpu"))
        place = block.coordinates(device)
        total = torch.zeros((), dtype=dtype, device=device)
        if self.bias is not None:
            total = evaluate(self.bias, place, sources, device).to(dtype)
        if self.visible is not None:
            seen = evaluate(self.visible, place, sources, device)
            total = torch.where(seen, total, torch.full((), -math.inf, dtype=dtype, device=device))
        axes = axes_of([self.visible, self.bias])
        return total.expand([place[name].numel() if name in axes or name in "qk" else 1 for name in "bhqk"])


@lru_cache(maxsize=1024)
def _parse(text: str) -> Mask:
    if not text:
        return Mask()
    data = json.loads(text)
    flags = {name: data.get(name, False) for name in ("nan", "stops")}
    return Mask(**dict(zip(data["parts"], loads_terms(data["terms"]), strict=True)), **flags)


def _chosen(term: Term, spans: Mapping[str, range], sources: Sources) -> Any:
    """The branch of where(c, x, y) that a block takes, if c holds everywhere in it, or nowhere; else the term."""
    while isinstance(term, Apply) and term.op == "where" and isinstance(condition := term.args[0], Term):
        low, high = bounds(condition, spans, sources)
        if low == high:
            term = term.args[1 if low else 2]  # type: ignore[assignment]
        else:
            break
    return term


def _reached(*terms: Term | None) -> set[Load]:
    """Floating loads that a gradient of `terms` reaches: `detach` and ops of integers stop it."""
    stack, seen = [term for term in terms if term is not None], set[Term]()
    while stack:
        term = stack.pop()
        if term in seen or not term.dtype.is_floating_point or (isinstance(term, Apply) and term.op == "detach"):
            continue
        seen.add(term)
        stack.extend(children(term) if not isinstance(term, Load) else ())
    return {term for term in seen if isinstance(term, Load)}
