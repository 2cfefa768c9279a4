"""What an attention costs the busiest rank, in closed form: FLOPs, bytes, messages, memory, seconds.

For any length and any number of ranks, where a plan has to be unrolled; exact in FLOPs and bytes where the length
divides evenly (volume.py), and tests hold the rest against unrolled plans. Symbols, beside those of volume.py:

    F, o   FLOP/s of a tile, and seconds that each costs beside its FLOPs        F_b, o_b   the same backward
    W, L   bytes/s of the link, seconds a message                                s          seconds a step
    V, U   the same within a node of g ranks, where W and L are those between nodes
    T      exchanges that take turns, by heads (context_parallel/plan/concurrency.py)
    Q      the part of a rank's queries that a strip of a forward tile has (context_parallel/plan/tiling.py)
    Z      the fewest queries of a strip of a window

A step takes the longer of computing and exchanging. The ring has a step for each hop, and so has its backward, where
keys must come once before anything can be computed with them; a gather has one step for all that travels; ulysses
trades rows for heads before and after it computes. Memory is that of cost/memory.py where a rank has so many rows
that what a kernel works in is nothing beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import sympy
from sympy import Expr, Integer, Max, Min, Piecewise, ceiling, floor, log

from ringopt.cost.volume import (
    HeadVolume,
    batch,
    g,
    gradient_itemsize,
    itemsize,
    k_dim,
    kv_heads,
    n,
    p,
    q_heads,
    r,
    v_dim,
    volume_of,
    w,
)
from ringopt.errors import OptionError

LEGEND = (
    "n tokens, p ranks, r the rank, g ranks of a node, w keys of a window",
    "B sequences, Hq and Hkv heads, Dk and Dv their sizes, e and e_acc bytes of an element and of one of a gradient",
    "F FLOP/s of a tile and o seconds beside (F_b, o_b: backward), s seconds a step",
    "W bytes/s of the link and L seconds a message (V, U: within a node)",
    "T exchanges that take turns, Q the part of the queries that a strip has, Z the fewest queries of a strip",
)

F, o, F_b, o_b, W, L, V, U, s, Q = sympy.symbols("F o F_b o_b W L V U s Q", nonnegative=True)
T, Z = sympy.symbols("T Z", integer=True, positive=True)

ONE, ZERO = Integer(1), Integer(0)
SHARD = n / p
PAIR = 2 * batch * q_heads * (k_dim + v_dim)
PAIR_BACK = 2 * batch * q_heads * (3 * k_dim + 2 * v_dim)
ROW = batch * kv_heads * (k_dim + v_dim) * itemsize
ROW_BACK = batch * kv_heads * (k_dim + v_dim) * gradient_itemsize
SUMS = SHARD * batch * q_heads * (v_dim + 1) * gradient_itemsize
RESULTS = SHARD * batch * q_heads * (v_dim * itemsize + gradient_itemsize)
DQ, OUT = SHARD * batch * q_heads * k_dim, SHARD * batch * q_heads * v_dim * itemsize
HOME = SHARD * ROW_BACK
# Sums of the rank's own rows: there from the start where several exchanges take turns, for some begin with them.
EARLY = Piecewise((HOME, T > 1), (0, True))
NARROW = Piecewise((1, itemsize < gradient_itemsize), (0, True))
# Messages to each other rank of those that trade rows for heads: log-sum-exps of another dtype have their own.
TRADED = 2 + NARROW
# What a strip of the queries gives.
TILE = (RESULTS + 2 * SHARD * batch * q_heads * gradient_itemsize) * Q
WIDE = NARROW * SUMS * Q  # the results of a strip as they are merged
MASK = 11  # bytes an element while the mask of a window is made


SYMBOLS = (
    *(n, p, w, g, r, batch, q_heads, kv_heads, k_dim, v_dim, itemsize, gradient_itemsize),
    *(F, o, F_b, o_b, W, L, V, U, s, Q, T, Z),
)  # fmt: skip


@dataclass(frozen=True)
class Formulas:
    """Of the busiest rank; bytes are those of rank r.

    leaving          of the bytes of a forward, those that leave the node at most; leaving_backward: of a backward
    memory           bytes at once in the forward, at most, beside its own q, k, v
    saved            bytes of results that the backward needs
    memory_backward  bytes at once in the backward, beside what is saved and the gradient that comes in
    """

    pairs: Expr
    flops: Expr
    flops_backward: Expr
    bytes: Expr
    bytes_backward: Expr
    leaving: Expr
    leaving_backward: Expr
    messages: Expr
    memory: Expr
    saved: Expr
    memory_backward: Expr
    seconds: Expr
    seconds_backward: Expr

    def at(self, numbers: Mapping[Expr, float]) -> dict[str, float]:
        """Every formula with numbers in the place of its symbols, all but r; of bytes, the most that a rank sends."""
        ranks, node = int(numbers[p]), int(numbers.get(g, 1))
        known = {**dict.fromkeys(SYMBOLS, 0.0), **numbers}
        extreme = (0, 1, node, ranks // 2, ranks - 1 - node, ranks - 2, ranks - 1)
        corners = {rank for rank in extreme if 0 <= rank < ranks}
        found = [compiled(self)(*({**known, r: rank}[symbol] for symbol in SYMBOLS)) for rank in corners]
        columns = zip(*found, strict=True)
        return {field.name: float(max(values)) for field, values in zip(fields(self), columns, strict=True)}

    def __str__(self) -> str:
        return "\n".join(
            f"{field.name:>17} = {sympy.factor_terms(getattr(self, field.name))}" for field in fields(self)
        )


@lru_cache(maxsize=256)
def compiled(formulas: Formulas) -> Callable[..., list[float]]:
    """The formulas as one Python function of the values of SYMBOLS."""
    given = [getattr(formulas, field.name) for field in fields(formulas)]
    function: Callable[..., list[float]] = sympy.lambdify(SYMBOLS, given, modules="math")
    return function


@dataclass(frozen=True)
class Work:
    """Pairs of query and key on the busiest rank: with its own keys (`home`) and, in each of `hops` steps, with `rows`
    that came (`away`). Windows are computed in `strips`, each with `waste` times the pairs that are seen and a mask of
    `masked` elements; a tile has `at_once` keys. A gather has `gathered` rows on their way, coming and going. `merged`:
    of the heads, those of which the results of a tile are merged at once: all where queries meet own keys in several
    tiles, else those of an exchange."""

    home: Expr
    away: Expr
    hops: Expr
    rows: Expr
    strips: Expr = ONE
    waste: Expr = ONE
    masked: Expr = ZERO
    at_once: Expr = SHARD
    gathered: Expr = 2 * (n - SHARD)
    merged: Expr = ZERO


@lru_cache(maxsize=256)
def formulas_of(pattern: str, layout: str, strategy: str) -> Formulas:
    """For a pattern "full", "causal", "window" or "window,both"; symbol w is the width of a window.

    Raises OptionError where no closed form is known.
    """
    if strategy == "ulysses":
        return ulysses(pattern)
    if strategy == "hybrid":
        return hybrid(pattern, layout)
    if strategy not in ("ring", "halo", "gather"):
        raise OptionError(f"no closed form is known for strategy {strategy!r}")
    volume, work = volume_of(pattern, layout, strategy), work_of(pattern, layout)
    alone, pairs = sympy.Eq(p, 1), work.home + work.hops * work.away
    sent, back = (Piecewise((0, alone), (size, True)) for size in (volume.forward_bytes, volume.backward_bytes))
    # Where rows go round, the last rank of a node sends all to the next node; a gather goes to every rank.
    part = others() if strategy == "gather" else ONE
    return Formulas(
        pairs=pairs,
        flops=PAIR * pairs,
        flops_backward=PAIR_BACK * pairs,
        bytes=sent,
        bytes_backward=back,
        leaving=sent * part,
        leaving_backward=back * part,
        messages=work.hops,
        saved=RESULTS,
        **(gather if strategy == "gather" else ring)(work),
    )


def work_of(pattern: str, layout: str) -> Work:
    """Raises OptionError for windows on zigzag."""
    if pattern == "full":
        return Work(SHARD**2, SHARD**2, p - 1, SHARD, merged=ONE / T)
    if pattern == "causal" and layout == "contiguous":
        return Work(SHARD * (SHARD + 1) / 2, SHARD**2, p - 1, SHARD, gathered=n - SHARD)
    if pattern == "causal":
        chunk = SHARD / 2
        return Work(
            chunk**2 + chunk * (chunk + 1), 2 * chunk**2, p - 1, SHARD, gathered=3 * (n - SHARD) / 2, merged=ONE
        )
    if layout != "contiguous":
        raise OptionError(f"no closed form is known for {pattern} on {layout}")
    sides = 1 if pattern == "window" else 2
    reach = Min(w - 1, n - SHARD)
    hops = Min(p - 1, ceiling(reach / SHARD))
    home = sides * ramp(SHARD) - (sides - 1) * SHARD
    seen = sides * Min(w, n) * SHARD - (sides - 1) * SHARD
    strip = strip_of(sides)
    return Work(
        home,
        (seen - home) / Max(hops, 1),
        hops,
        sides * Min(reach, SHARD),
        ceiling(SHARD / strip),
        1 + (strip - 1) / (sides * w),
        Min(strip * Min(strip + sides * w, SHARD), 1 << 22),
        Min(strip + sides * w, SHARD),
        2 * sides * reach,
    )


def strip_of(sides: int) -> Expr:
    """Queries of a strip of the plan, halved as long as that saves an eighth of strip + sides * w keys a query."""
    whole = Min(SHARD, Max(512, w / 4))
    pays, fits = floor(log(3 * whole / Max(sides * (w - 1), 1), 2)) + 1, floor(log(whole / Z, 2))
    return whole / 2 ** Max(0, Min(pays, fits))


def ramp(rows: Expr) -> Expr:
    """The sum of min(t + 1, w) over t < rows."""
    full = Min(w, rows)
    return full * (full + 1) / 2 + (rows - full) * w


def ring(work: Work) -> dict[str, Expr]:
    """One step a hop: the home block hides the first, each block the next one's keys."""
    keys, sums = work.rows * ROW, work.rows * ROW_BACK
    home, away, home_back, away_back = tiles(work)
    some, more = Min(work.hops, 1), Max(work.hops - 1, 0)
    apart = Piecewise((2 * keys + 3 * sums, work.hops > 1), (0, True))
    passing = Max(2 * keys + EARLY, 2 * sums + HOME, apart + EARLY)
    return {
        "memory": forward_memory(2 * keys * some, work),
        "memory_backward": backward_memory(passing, work),
        "seconds": Max(home, some * link(keys)) + more * Max(away, link(keys)) + some * away + (work.hops + 1) * s,
        "seconds_backward": some * link(keys)
        + more * Max(away_back, link(keys + sums))
        + some * Max(away_back, link(sums))
        + Max(home_back, some * link(sums))
        + (work.hops + 1 + some) * s,
    }


def gather(work: Work) -> dict[str, Expr]:
    """One step for all that travels, one with what came; backward the sums go home under the home block."""
    keys, sums = work.hops * work.rows * ROW, work.hops * work.rows * ROW_BACK
    home, away, home_back, away_back = tiles(work)
    some = Min(work.hops, 1)
    return {
        "memory": forward_memory(work.gathered * ROW, work),
        "memory_backward": backward_memory(
            Max(
                work.gathered * ROW + EARLY,
                work.gathered * (ROW / 2 + ROW_BACK) + EARLY,
                work.gathered * ROW_BACK + HOME,
            ),
            work,
        ),
        "seconds": Max(home, link(keys, work.hops)) + work.hops * away + (1 + some) * s,
        "seconds_backward": link(keys, work.hops)
        + work.hops * away_back
        + Max(home_back, link(sums, work.hops))
        + (1 + 2 * some) * s,
    }


def forward_memory(travels: Expr, work: Work) -> Expr:
    """`travels`: bytes of rows on their way."""
    return SUMS + travels + Max(TILE + work.merged * WIDE, MASK * work.masked)


def backward_memory(travels: Expr, work: Work) -> Expr:
    """`travels`: bytes of rows and sums on their way, those of the rank's own rows included."""
    kernel = kernel_back(SHARD, work.at_once, q_heads, kv_heads) / T
    return DQ * gradient_itemsize + travels + Max(DQ * itemsize / T + kernel, MASK * work.masked)


def kernel_back(rows: Expr, at_once: Expr, queries: Expr, keys: Expr) -> Expr:
    """Bytes beside the gradient of Q in a tile of a backward, for so many heads of queries and of keys: gradients of K
    and V, and a copy of the output. Grouped heads are repeated for a kernel, `at_once` rows of keys, and so are their
    gradients, which are summed then."""
    row, out = batch * (k_dim + v_dim), batch * queries * v_dim * itemsize
    single = rows * (row * keys * itemsize + out)
    grouped = at_once * (2 * row * queries * itemsize + Max(out, row * keys * gradient_itemsize))
    return Piecewise((Max(single, grouped), queries > keys), (single, True))


def ulysses(pattern: str) -> Formulas:
    """Each rank has whole attentions of Hq/p heads; what it sends is packed, and as much comes."""
    wholes = {"full": n**2, "causal": n * (n + 1) / 2, "window": ramp(n), "window,both": 2 * ramp(n) - n}
    if pattern not in wholes:
        raise OptionError(f"no closed form is known for the work of {pattern}")
    whole = wholes[pattern]
    alone = work_of(pattern, "contiguous")
    work, mask = alone.waste.subs(p, 1), MASK * alone.masked.subs(p, 1)
    volume, pairs, some = HeadVolume(), whole / p, Min(p - 1, 1)
    sent = 1 + 2 * (p - 1) / p
    shared = Max(kv_heads / p, 1)
    keys = n * batch * shared * (k_dim + v_dim)
    operands, given = DQ * itemsize + keys * itemsize, DQ * itemsize + keys * itemsize + OUT + RESULTS
    total, packed = (DQ + keys) * gradient_itemsize, DQ * itemsize + keys * gradient_itemsize
    tile = DQ * itemsize + kernel_back(n, alone.at_once.subs(p, 1), q_heads / p, shared)
    return Formulas(
        pairs=pairs,
        flops=PAIR * pairs,
        flops_backward=PAIR_BACK * pairs,
        bytes=volume.forward_bytes,
        bytes_backward=volume.backward_bytes,
        leaving=volume.forward_bytes * others(),
        leaving_backward=volume.backward_bytes * others(),
        messages=TRADED * (p - 1),
        memory=operands + RESULTS + Max(SUMS + Max(NARROW * OUT, mask), sent * RESULTS),
        saved=RESULTS,
        memory_backward=given + total + Max(total + Max(tile, mask), sent * packed),
        seconds=some * all_to_all(volume.forward_bytes) + PAIR * pairs * work / F + o + 3 * s,
        seconds_backward=some * all_to_all(volume.backward_bytes) + PAIR_BACK * pairs * work / F_b + o_b + 3 * s,
    )


def others() -> Expr:
    """Of the other ranks, the part that is on other nodes."""
    return (p - g) / Max(p - 1, 1)


def all_to_all(size: Expr) -> Expr:
    """Seconds of `size` bytes to all other ranks alike, there and back: within the node and beyond it at once."""
    return Max(size * (1 - others()) / V + 2 * (g - 1) * U, size * others() / W + 2 * (p - g) * L)


def hybrid(pattern: str, layout: str) -> Formulas:
    """A trade within a node, and between the nodes the ring of as many ranks, with Hq/g heads and the rows of a node
    each."""
    shares = {q_heads: q_heads / g, kv_heads: Max(kv_heads / g, 1)}
    of_nodes = {**shares, p: p / g, r: sympy.floor(r / g)}
    circle = formulas_of(pattern, layout, "ring")
    between = Formulas(**{each.name: getattr(circle, each.name).xreplace(of_nodes) for each in fields(circle)})
    volume, trades, sent = HeadVolume(g), 2 * (g - 1) * U, 1 + 2 * (g - 1) / g
    keys = n * g / p * batch * shares[kv_heads] * (k_dim + v_dim)
    operands, given = DQ * itemsize + keys * itemsize, DQ * itemsize + keys * itemsize + OUT + RESULTS
    total, packed = (DQ + keys) * gradient_itemsize, DQ * itemsize + keys * gradient_itemsize
    return Formulas(
        pairs=between.pairs / g,
        flops=between.flops,
        flops_backward=between.flops_backward,
        bytes=volume.forward_bytes + between.bytes,
        bytes_backward=volume.backward_bytes + between.bytes_backward,
        leaving=between.bytes,
        leaving_backward=between.bytes_backward,
        messages=TRADED * (g - 1) + between.messages,
        memory=operands + RESULTS + Max(between.memory, sent * RESULTS),
        saved=RESULTS,
        memory_backward=given + total + Max(between.memory_backward, sent * packed),
        seconds=volume.forward_bytes / V + trades + between.seconds + 2 * s,
        seconds_backward=volume.backward_bytes / V + trades + between.seconds_backward + 2 * s,
    )


def tiles(work: Work) -> tuple[Expr, Expr, Expr, Expr]:
    """Seconds of the home block and of one that came, forward and backward."""
    home, away = work.home * work.waste, work.away * work.waste
    return (
        PAIR * home / F + work.strips * o,
        PAIR * away / F + o,
        PAIR_BACK * home / F_b + work.strips * o_b,
        PAIR_BACK * away / F_b + o_b,
    )


def link(size: Expr, messages: Expr = ONE) -> Expr:
    """Seconds of an exchange of `size` bytes in `messages` messages."""
    return size / W + messages * L
