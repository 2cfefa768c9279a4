"""Draws `examples/four_ranks.svg`, what happens to a model on 4 ranks: `python -m tests.documents.picture`.

Which tokens a rank holds is asked of the layout that ringopt uses. The picture has a ground of its own, and colours for
light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from ringopt.context_parallel.geometry.layouts import LAYOUTS

FILE = Path(__file__).parents[2] / "examples" / "four_ranks.svg"
RANKS, TOKENS = 4, 16
WIDTH, HEIGHT, TOP, LANE, BAR = 900, 372, 84, 58, 20
# Columns: where each begins, and how wide it is.
BATCH, SHARD, BEFORE, RING, AFTER, LOSS = (62, 160), (250, 70), (348, 104), (480, 104), (612, 104), (744, 138)
STYLE = """\
text{font-family:sans-serif;font-size:12px;fill:#1f2328}.small{font-size:11px;fill:#57606a}.title{font-weight:600}
.ground{fill:#fff}.box{fill:#f6f8fa;stroke:#8c959f}.ring{fill:#fff4e5;stroke:#bc6c00}.line{stroke:#57606a;fill:none}
.travel{stroke:#bc6c00;fill:none;stroke-width:2}.tip{fill:#bc6c00}.end{fill:#57606a}
.r0{fill:#2a6fd6}.r1{fill:#2f8f4e}.r2{fill:#8a57c9}.r3{fill:#c2447a}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9da7b1}.ground{fill:#0d1117}.box{fill:#161b22;stroke:#6e7681}
.ring{fill:#2b2011;stroke:#e3a04a}.line{stroke:#9da7b1}.travel{stroke:#e3a04a}.tip{fill:#e3a04a}.end{fill:#9da7b1}
.r0{fill:#5b9bf5}.r1{fill:#4fb874}.r2{fill:#b18cf0}.r3{fill:#ef7aaa}}"""


def drawn() -> str:
    """The whole file."""
    title = f"What happens to a model on {RANKS} ranks"
    description = (
        f"Every rank passes the same batch of {TOKENS} tokens and keeps {TOKENS // RANKS} of them through all layers; "
        "in attention, keys and values go round a ring; loss and gradients are the same on every rank."
    )
    parts = [*heads(), *(part for rank in range(RANKS) for part in lane(rank)), *ring(), *whole_loss(), *feet()]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-labelledby="title text">\n<title id="title">{title}</title>\n'
        f'<desc id="text">{description}</desc>\n'
        f'<style>\n{STYLE}\n</style>\n<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>\n{body}\n</svg>\n'
    )


def heads() -> Iterator[str]:
    columns = {
        BATCH: ("what each rank passes", f"the whole batch, {TOKENS} tokens"),
        SHARD: ("its shard", f"{TOKENS // RANKS} tokens"),
        BEFORE: ("norm, linear", "token by token"),
        RING: ("ring attention", "Q stays; K, V travel"),
        AFTER: ("linear, MLP", "token by token"),
        LOSS: ("head, loss, backward", "sums over the ranks"),
    }
    for (x, width), (first, second) in columns.items():
        yield text(x + width / 2, 28, first, "title")
        yield text(x + width / 2, 46, second, "small")
    begin, end = BEFORE[0], AFTER[0] + AFTER[1]
    yield f'<path class="line" d="M{begin} 66v-6H{end}v6"/>'
    yield text((begin + end) / 2, 76, "every layer", "small")


def lane(rank: int) -> Iterator[str]:
    y = TOP + LANE * rank + (LANE - BAR) / 2
    middle = y + BAR / 2
    layout = LAYOUTS["zigzag"](TOKENS, RANKS)
    yield text(BATCH[0] - 8, middle + 4, f"rank {rank}", "", "end")
    yield from cells(BATCH, y, [layout.owner(token) for token in range(TOKENS)], rank)
    kept = [token for piece in layout.ranges(rank) for token in piece]
    yield from cells(SHARD, y, [rank] * len(kept), rank)
    for left, right in ((BATCH, SHARD), (SHARD, BEFORE), (BEFORE, RING), (RING, AFTER), (AFTER, LOSS)):
        yield arrow(left[0] + left[1] + 3, right[0] - 3, middle)
    for column, kind, words in ((BEFORE, "box", "n/4 tokens"), (RING, "ring", ""), (AFTER, "box", "n/4 tokens")):
        x, width = column
        yield f'<rect class="{kind}" x="{x}" y="{y - 8}" width="{width}" height="{BAR + 16}" rx="5"/>'
        if words:
            yield text(x + width / 2, middle + 4, words, "small")
    yield text(RING[0] + 32, middle + 4, "Q")
    yield from cells((RING[0] + 42, 50), middle - 6, [rank] * 4, rank, 12)


def cells(column: tuple[int, int], y: float, owners: Iterable[int], rank: int, height: int = BAR) -> Iterator[str]:
    """Tokens as squares in the colour of the rank that keeps them, those of other ranks paler."""
    owners = list(owners)
    x, width = column[0], column[1] / len(owners)
    for place, owner in enumerate(owners):
        pale = "" if owner == rank else ' opacity=".35"'
        where = f'x="{x + place * width:g}" y="{y:g}" width="{width - 1.5:g}" height="{height}"'
        yield f'<rect class="r{owner}" {where} rx="1.5"{pale}/>'


def ring() -> Iterator[str]:
    """K and V: down from rank to rank, and back to the first."""
    x, edge = RING[0] + 16, RING[0] + RING[1]
    middles = [TOP + LANE * rank + LANE / 2 for rank in range(RANKS)]
    for above, below in pairwise(middles):
        yield f'<path class="travel" d="M{x} {above + 4:g}V{below - 11:g}"/>'
        yield f'<path class="tip" d="M{x - 5} {below - 12:g}h10l-5 8z"/>'
    far = edge + 14
    first, last = middles[0] + 12, middles[-1] - 12
    yield f'<path class="travel" stroke-dasharray="4 3" d="M{edge} {last:g}H{far}V{first:g}H{edge + 8}"/>'
    yield f'<path class="tip" d="M{edge + 9} {first - 5:g}v10l-8-5z"/>'


def whole_loss() -> Iterator[str]:
    x, width = LOSS
    yield f'<rect class="box" x="{x}" y="{TOP + 8}" width="{width}" height="{LANE * RANKS - 16}" rx="5"/>'
    for line, words in enumerate(("the same loss and", "the same complete", "gradients on", "every rank")):
        yield text(x + width / 2, TOP + LANE * RANKS / 2 - 22 + 18 * line, words)


def feet() -> Iterator[str]:
    y = TOP + LANE * RANKS + 28
    notes = {
        BATCH: "colours: who keeps a token (zigzag)",
        BEFORE: "nothing is sent",
        RING: "a K/V block in flight",
        AFTER: "nothing is sent",
        LOSS: "parameters: replicated",
    }
    for (x, width), words in notes.items():
        yield text(x + width / 2, y, words, "small")


def arrow(begin: float, end: float, y: float) -> str:
    return f'<path class="line" d="M{begin:g} {y:g}H{end - 5:g}"/><path class="end" d="M{end - 6:g} {y - 4:g}v8l6-4z"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


if __name__ == "__main__":
    FILE.write_text(drawn(), encoding="utf-8")
