"""The subgraph that makes a mask becomes a pattern, a term over (b, h, q, k), and the small tensors it reads.

    mask = (k <= q) & attention_mask[:, None, None, :]           # [B, 1, n, n]
    y = attention(q, k, v, mask, [], ..., "full", "")
        ->
    y = attention(q, k, v, None, [attention_mask], ..., "causal", '{"parts": ["visible"], ...}')

Before: functional graph, every attention a `ringopt::attention` node.
After: no [n, n] mask is computed for a site, or the site keeps its mask and a refusal that says why. Equal numbers:
conditions and biases are the program's own ops (ringopt/graph/cone.py), and what does not depend on an input is
compared with the mask of the program here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringopt.attention.patterns import pattern_of
from ringopt.graph.cone import Cone, Unreadable
from ringopt.graph.constants import Constants
from ringopt.graph.mask import places
from ringopt.graph.nodes import requires_grad, shape_of
from ringopt.graph.peel import HIDES_FLOAT16, peel
from ringopt.graph.reading import Reading, reading_of
from ringopt.graph.refusal import Refusal
from ringopt.graph.term_readers import evaluate
from ringopt.graph.terms import Term
from ringopt.pipeline import Context, Pass

# A mask of more elements is compared at some blocks of BLOCK x BLOCK instead of whole.
WHOLE, BLOCK, BLOCKS = 1 << 22, 64, 12


class ClassifyMask(Pass):
    name = "classify_mask"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        reader = Reader(gm.graph, context)
        for node, info in context.sites.items():
            if node.target is not torch.ops.ringopt.attention.default:
                continue
            if node.args[3] is None or node.args[7] != "full":
                continue
            found = reader.read(node)
            if isinstance(found, Refusal):
                info.pattern, info.refusal = "mask", found.sentence
                continue
            q, k, v, _given, _sources, sinks, seed, _pattern, _mask, *how = node.args
            node.args = (q, k, v, None, list(found.sources), sinks, seed, found.pattern, found.mask.text, *how)
            info.pattern = found.name


class Reader:
    """Reads the masks of one graph; sites that share a mask share its reading."""

    def __init__(self, graph: fx.Graph, context: Context):
        self.constants = Constants(graph, context.values, context.relied_on)
        self.carries = requires_grad(graph)
        self.found: dict[tuple[object, ...], Reading | Refusal] = {}

    def read(self, site: fx.Node) -> Reading | Refusal:
        q, k, given = site.args[0], site.args[1], site.args[3]
        sizes = dict(zip("bhqk", (*shape_of(q)[:3], shape_of(k)[2]), strict=True))
        key = (given, *sizes.values())
        if key not in self.found:
            self.found[key] = self.reading(given, Cone(self.constants, sizes))
        return self.found[key]

    def reading(self, given: fx.Node, cone: Cone) -> Reading | Refusal:
        learned: Callable[[fx.Node], bool] = self.carries.__getitem__
        try:
            term = cone.element(given)
        except Unreadable as problem:
            return problem.refusal
        peeled = peel(term, cone, learned)
        reading = reading_of(peeled.conditions, peeled.bias, learned)
        return check(reading, given, term, cone) or reading


# ---- the reading against the mask of the program ---------------------------------------------------------------------
def check(reading: Reading, given: fx.Node, term: Term, cone: Cone) -> Refusal | None:
    """Of a mask that no input reaches. A difference would be a fault of ringopt; the site then keeps its mask."""
    if not cone.is_known(term) or any(source not in cone.known for source in reading.sources):
        return None
    whole = cone.constants.get(given) if math.prod(shape_of(given)) <= WHOLE else None
    with unset_fake_temporarily(), torch.no_grad():
        for rows, keys in blocks(cone.sizes, whole is not None):
            place = places(cone.sizes["b"], cone.sizes["h"], rows, keys)
            original = whole if whole is not None else evaluate(term, place, cone.known)
            if not agree(original, additive(reading, rows, keys, term.dtype, cone)):
                return Refusal(
                    f"the mask read as {reading.name} differs from the program's own in queries {rows.start} to "
                    f"{rows.stop - 1}, keys {keys.start} to {keys.stop - 1}: a fault of ringopt, please report it",
                    given,
                )
    return None


def blocks(sizes: Mapping[str, int], whole: bool) -> list[tuple[range, range]]:
    """All rows and keys, or some blocks: on the diagonal, at the corners and anywhere, the same on every rank."""
    q, k = sizes["q"], sizes["k"]
    if whole:
        return [(range(q), range(k))]
    draw = random.Random(0)
    starts = [(0, 0), (q - BLOCK, k - BLOCK), (0, k - BLOCK), (q - BLOCK, 0)]
    starts += [(place, place) for place in (draw.randrange(min(q, k)) for _ in range(BLOCKS))]
    starts += [(draw.randrange(q), draw.randrange(k)) for _ in range(BLOCKS)]
    return [(stretch(i, q), stretch(j, k)) for i, j in starts]


def stretch(start: int, length: int) -> range:
    return range(max(start, 0), min(max(start, 0) + BLOCK, length))


def additive(reading: Reading, rows: range, keys: range, dtype: torch.dtype, cone: Cone) -> Tensor:
    """The mask as the pattern and the terms say it: -inf where hidden."""
    kind = dtype if dtype.is_floating_point else torch.float32
    sources = [cone.known[source] for source in reading.sources]
    total = reading.mask.block(cone.sizes["b"], cone.sizes["h"], rows, keys, sources, kind)
    pattern = pattern_of(reading.pattern, cone.sizes["q"], cone.sizes["k"])
    seen = torch.tensor([[key in pattern.span(row) for key in keys] for row in rows])
    return total.masked_fill(~seen, -math.inf)


def agree(original: Tensor, found: Tensor) -> bool:
    hidden = found == -math.inf
    if original.dtype == torch.bool:
        return bool((original == ~hidden).all())
    same = (original == found) | (original.isnan() & found.isnan())
    return bool(torch.where(hidden, original <= HIDES_FLOAT16, same).all())
