"""How many rows and bytes of keys and values a rank sends, in closed form.

Formulas for any world size, where a plan has to be unrolled to be counted. They hold exactly where the length divides
evenly (n by p, under zigzag by 2p), and to a row a chunk elsewhere; tests compare them with the plans.

Symbols: n rows of keys (and m of queries) over p ranks in nodes of g, this being rank r; w keys in a causal window. A
row of keys with its values, over the batch and all KV heads, has B Hkv (Dk + Dv) e bytes, of gradients B Hkv (Dk + Dv)
e_acc.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, Max, Min, Piecewise

from ringopt.errors import OptionError

n, m, p, w, g = sympy.symbols("n m p w g", integer=True, positive=True)
r = sympy.Symbol("r", integer=True, nonnegative=True)
batch, q_heads, kv_heads, k_dim, v_dim, itemsize, gradient_itemsize = sympy.symbols(
    "B Hq Hkv Dk Dv e e_acc", integer=True, positive=True
)


@dataclass(frozen=True)
class Volume:
    """Rows that rank r sends: keys in the forward, keys again in the backward, and their gradients."""

    keys: Expr
    keys_again: Expr
    gradients: Expr

    @property
    def forward_bytes(self) -> Expr:
        return self.keys * batch * kv_heads * (k_dim + v_dim) * itemsize

    @property
    def backward_bytes(self) -> Expr:
        row = batch * kv_heads * (k_dim + v_dim)
        return row * (self.keys_again * itemsize + self.gradients * gradient_itemsize)


def volume_of(pattern: str, layout: str, strategy: str) -> Volume:
    """The volume of self attention, and of full cross attention.

    Args:
        pattern: "full", "causal", "window" (the last w keys) or "window,both" (all keys nearer than w).
        layout: "contiguous" or "zigzag".
        strategy: "ring" (one-way), "halo" or "gather".

    Raises OptionError where no closed form is known: windows on zigzag, and windows of both sides on a ring.
    """
    form = FORMS.get((pattern, layout, strategy))
    if form is None:
        known = "; ".join(" ".join(names) for names in FORMS)
        raise OptionError(f"no closed form is known for the volume of {pattern} {layout} {strategy}; known are {known}")
    return form()


@dataclass(frozen=True)
class HeadVolume:
    """Bytes that each rank sends where `node` ranks trade rows for heads: all of "ulysses", within a node those of
    "hybrid". Exact where p divides n, and `node` the query heads, and the KV heads or is divided by them. A rank
    computes Hq/node query heads and reads Hkv/node KV heads, one at least."""

    node: Expr = p

    @property
    def forward_bytes(self) -> Expr:
        out = q_heads * k_dim * itemsize + self.kv * (k_dim + v_dim) * itemsize
        back = q_heads * (v_dim * itemsize + gradient_itemsize)
        return self.share * (out + back)

    @property
    def backward_bytes(self) -> Expr:
        out = q_heads * ((k_dim + 2 * v_dim) * itemsize + gradient_itemsize) + self.kv * (k_dim + v_dim) * itemsize
        back = q_heads * k_dim * itemsize + self.kv * (k_dim + v_dim) * gradient_itemsize
        return self.share * (out + back)

    @property
    def share(self) -> Expr:
        return batch * n / p * (self.node - 1) / self.node

    @property
    def kv(self) -> Expr:
        return Max(kv_heads, self.node)


@dataclass(frozen=True)
class QueryVolume:
    """Bytes that each rank sends where queries travel ("ring_q", "gather_q"), each of `m` visiting all other ranks:
    Q there and results back; in the backward Q, the output, its gradient and the log-sum-exp there, and dQ back."""

    @property
    def forward_bytes(self) -> Expr:
        return self.rows * q_heads * (k_dim * itemsize + (v_dim + 1) * gradient_itemsize)

    @property
    def backward_bytes(self) -> Expr:
        return self.rows * q_heads * ((k_dim + 2 * v_dim) * itemsize + (1 + k_dim) * gradient_itemsize)

    @property
    def rows(self) -> Expr:
        return batch * m / p * (p - 1)


def all_to_all() -> Volume:
    """Every shard visits every other rank."""
    rows = n / p * (p - 1)
    return Volume(rows, rows, rows)


def halo_ring(reach: Expr) -> Volume:
    """Contiguous shards; a query sees `reach` keys before its own. What rank r sends on is what any later rank needs of
    the rows before it; backward a row comes from its home straight to the farthest rank, and walks home from there."""
    shard = n / p
    first_hop = Min(reach, shard)
    received = Min(reach, r * shard)
    return Volume(
        keys=unless_last(Min(reach, (r + 1) * shard)),
        keys_again=unless_last(first_hop) + received - unless_first(first_hop),
        gradients=received,
    )


def halo_both() -> Volume:
    """Contiguous shards, w - 1 keys on both sides: the one-way halo and its mirror image."""
    one = halo_ring(w - 1)
    parts = ((rows, rows.subs(r, p - 1 - r)) for rows in (one.keys, one.keys_again, one.gradients))
    return Volume(*(there + back for there, back in parts))


def halo_gather(reach: Expr) -> Volume:
    """Contiguous shards; each rank has the `reach` keys before its own straight from their homes."""
    sent = Min(reach, (p - 1 - r) * n / p)
    return Volume(sent, sent, Min(reach, r * n / p))


def halo_gather_both() -> Volume:
    """The same with w - 1 keys on both sides."""
    rows = Min(w - 1, (p - 1 - r) * n / p) + Min(w - 1, r * n / p)
    return Volume(rows, rows, rows)


def causal_ring() -> Volume:
    """Contiguous shards: shard s goes to the p - 1 - s ranks behind it."""
    shard = n / p
    return Volume(
        keys=unless_last((r + 1) * shard),
        keys_again=unless_last(shard) + Max(r - 1, 0) * shard,
        gradients=r * shard,
    )


def causal_gather() -> Volume:
    """All-gather under a causal mask, contiguous shards: rank r sends its shard to the p - 1 - r ranks after it, and
    gradients to the r before it."""
    shard = n / p
    return Volume((p - 1 - r) * shard, (p - 1 - r) * shard, r * shard)


def zigzag_ring() -> Volume:
    """Causal: all heads go round; so do all tails but the last of the sequence, which no other rank sees. Backward, the
    tail of rank s starts at rank s - 1 and comes no nearer home than rank 0."""
    chunk = n / (2 * p)
    return Volume(
        keys=(2 * (p - 1) - unless_last(Integer(1))) * chunk,
        keys_again=(p - 1 + unless_first(p - r)) * chunk,
        gradients=(2 * (p - 1) - unless_first(Integer(1))) * chunk,
    )


def zigzag_gather() -> Volume:
    """Causal: a head goes to all, the tail of rank r to the r ranks before it."""
    chunk = n / (2 * p)
    return Volume((p - 1 + r) * chunk, (p - 1 + r) * chunk, (2 * (p - 1) - r) * chunk)


def unless_first(rows: Expr) -> Expr:
    """`rows`, and 0 on the first rank."""
    return Piecewise((rows, r > 0), (0, True))


def unless_last(rows: Expr) -> Expr:
    """`rows`, and 0 on the last rank."""
    return Piecewise((rows, r < p - 1), (0, True))


FORMS: dict[tuple[str, str, str], Callable[[], Volume]] = {
    ("full", "contiguous", "ring"): all_to_all,
    ("full", "contiguous", "gather"): all_to_all,
    ("full", "zigzag", "ring"): all_to_all,
    ("full", "zigzag", "gather"): all_to_all,
    ("causal", "contiguous", "ring"): causal_ring,
    ("causal", "contiguous", "gather"): causal_gather,
    ("causal", "zigzag", "ring"): zigzag_ring,
    ("causal", "zigzag", "gather"): zigzag_gather,
    ("window", "contiguous", "ring"): lambda: halo_ring(w - 1),
    ("window", "contiguous", "gather"): lambda: halo_gather(w - 1),
    ("window", "contiguous", "halo"): lambda: halo_ring(w - 1),
    ("window,both", "contiguous", "gather"): halo_gather_both,
    ("window,both", "contiguous", "halo"): halo_both,
}
