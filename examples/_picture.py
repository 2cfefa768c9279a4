"""Who keeps, receives and computes which rows of dilated attention, as SVG: one row of bars a rank, one bar a pattern.

A bar is the whole sequence as head 0 has it; other heads keep rows beside these. Blue are the rows that the rank keeps
of its own, orange those that it receives, the darker the denser; white lines are the edges of segments, where they are
not too many to be seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringopt.context_parallel.plan.dilated import DilatedPlan, TermPlan, dilated_plan_of

WIDTH, LEFT, BAR, GAP = 720, 120, 12, 4
BINS = 240
OWN, RECEIVED = "#1f5fbf", "#e07b00"


def draw(pattern: str, length: int, heads: int, ranks: int, layout: str) -> str:
    layout = layout if ranks > 1 else "contiguous"  # a rank alone has none
    plan = dilated_plan_of(pattern, length, (heads, heads), ranks, layout, "auto")
    every = sum(plan.pairs(rank) for rank in range(ranks))
    parts, y = [text(LEFT, 18, f"{pattern}, {length:,} rows, {heads} heads, {ranks} ranks, {layout}", 13)], 34
    for rank in range(ranks):
        received = sum(len(part.term.kv_heads) * len(from_others(part, rank)) for part in plan.terms)
        share = plan.pairs(rank) / every
        told = f"rank {rank} computes {share:.0%} of all pairs and receives {received:,} rows, of all heads"
        parts.append(text(LEFT, y + 10, told))
        y += 18
        for number, (w, r) in enumerate(zip(plan.dilation.segment_lengths, plan.dilation.dilation_rates, strict=True)):
            parts += [text(LEFT - 8, y + 10, f"{w:,} : {r}", anchor="end"), *bar(plan, number, rank, length, y)]
            y += BAR + GAP
        y += 10
    for x, colour, words in ((LEFT, OWN, "kept of its own"), (LEFT + 130, RECEIVED, "received")):
        parts += [f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>', text(x + 14, y + 9, words)]
    parts.append(text(LEFT + 230, y + 9, "rows of head 0, the darker the denser"))
    sizes = f'width="{LEFT + WIDTH + 20}" height="{y + 24}"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} font-family="sans-serif">'
    return f"{svg}{ground}{''.join(parts)}</svg>\n"


def bar(plan: DilatedPlan, number: int, rank: int, length: int, y: int) -> Iterable[str]:
    """Of one pattern."""
    rate, segment = plan.dilation.dilation_rates[number], min(plan.dilation.segment_lengths[number], length)
    kinds = ((part, (part.term.kept.rate, part.term.kept.segment)) for part in plan.terms if 0 in part.term.heads)
    part = next(part for part, kind in kinds if kind == (rate, segment))
    yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{BAR}" fill="#eee"/>'
    yield from cells(own(part, rank), length, y, OWN)
    yield from cells(from_others(part, rank), length, y, RECEIVED)
    if length // segment <= BINS // 2:
        for edge in range(segment, length, segment):
            x = LEFT + WIDTH * edge / length
            yield f'<path d="M{x:.1f} {y}v{BAR}" stroke="white" stroke-width="1"/>'


def own(part: TermPlan, rank: int) -> list[int]:
    kept, rows = part.term.kept, part.layout.ranges(rank)
    return [row for piece in rows for row in piece if row % kept.segment % kept.rate == kept.offset]


def from_others(part: TermPlan, rank: int) -> list[int]:
    """Rows whose keys come from other ranks."""
    if part.exchange is None:
        return []
    rows = [row for number in part.cut for row in part.term.kept.rows(number)]
    held = {number for piece in part.exchange.kv_pieces(rank) for number in piece}
    return [rows[number] for need in part.exchange.needs(rank) for number in need if number not in held]


def cells(rows: Iterable[int], length: int, y: int, colour: str) -> Iterable[str]:
    """Darker where more of the rows are among `rows`."""
    counts, full = [0] * BINS, [0] * BINS
    for row in range(length):
        full[row * BINS // length] += 1
    for row in rows:
        counts[row * BINS // length] += 1
    for number, count in enumerate(counts):
        if count:
            shade, x = 0.2 + 0.8 * count / full[number], LEFT + WIDTH * number / BINS
            place = f'x="{x:.1f}" y="{y}" width="{WIDTH / BINS + 0.2:.1f}" height="{BAR}"'
            yield f'<rect {place} fill="{colour}" opacity="{shade:.2f}"/>'


def text(x: int, y: int, words: str, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{words}</text>'
