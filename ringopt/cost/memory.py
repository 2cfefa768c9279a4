"""The most bytes that an attention holds at once on a rank, read off its plan: what an allocator counts.

The executor's tasks (executor/keys_move.py, executor/queries_move.py, executor/heads_move.py) on a ledger in place of
tensors. Counted are rows of other ranks, own ones packed to go there, sums of results and gradients,
and what the tile at work has beside them (tile_memory.py). The mask of a pattern is among that; what a mask or bias of
the program holds while it is evaluated depends on its term, is bounded (Limits.mask) and is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from ringopt.context_parallel.geometry.rows import Rows, count, within
from ringopt.context_parallel.plan.concurrency import exchanges_of
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Message, Step
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.context_parallel.plan.tiling import pieces, placeless, strip_of
from ringopt.cost.message_bytes import back_bytes, there_bytes
from ringopt.cost.simulate import Heads, row_bytes_by_cargo
from ringopt.cost.tile_memory import Sums, TileBytes, backward_tile, first_tile, forward_tile
from ringopt.hardware.devices import limits_of


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank beside its own q, k, v.

    forward   the most in the forward, its results included
    saved     the output and its log-sum-exp, which the backward needs
    backward  the most in the backward, its results included, beside what is saved and the gradient that comes in
    """

    forward: int
    saved: int
    backward: int

    @property
    def training(self) -> int:
        """The most in a forward and its backward."""
        return max(self.forward, self.saved + self.backward)


@lru_cache(maxsize=4096)
def most_memory(plan: Plan, heads: Heads, buffered: bool = True) -> Memory:
    """Each the most of any rank."""
    found = [memory_of(plan, heads, rank, buffered) for rank in range(plan.ranks)]
    forward, saved, backward = (max(each) for each in zip(*map(astuple, found), strict=True))
    return Memory(forward, saved, backward)


def memory_of(plan: Plan, heads: Heads, rank: int, buffered: bool = True) -> Memory:
    """`buffered`: between CPUs an all-gather goes by way of a buffer, gloo's; where all ranks read each other's memory
    there is none."""
    if isinstance(plan, HeadExchange):
        return of_heads(plan, heads, rank)
    if plan.queries_move:
        return of_queries(plan, heads, rank, buffered)
    return of_keys(plan, heads, rank)


class Ledger:
    """Bytes held now, and the most so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def free(self, size: int) -> None:
        self.now -= size

    def briefly(self, size: int) -> None:
        self.most = max(self.most, self.now + size)


# ---- keys travel -----------------------------------------------------------------------------------------------------
def of_keys(plan: Exchange, heads: Heads, rank: int, dense: bool = False) -> Memory:
    """Where there are several exchanges, each of some heads and some rows, one at a time computes, and in the forward
    the rank's own keys are attended to by all heads at once. `dense`: queries come in the order of their dims, and not
    as a projection leaves them."""
    turns, parts = turns_of(plan, heads)
    sums, own = Sums(heads, count(plan.q_pieces(rank)), count(plan.kv_pieces(rank))), plan.kv_pieces(rank)
    one = replace(heads, q_heads=heads.q_heads // turns, kv_heads=-(-heads.kv_heads // turns))
    there, back = Ledger(), Ledger()
    made = made_bytes(plan, heads, rank)
    there.take(made)
    block = next((block for step in plan.forward(rank) for block in step.blocks), None)
    first = pieces(plan.pattern, block, heads.kernel)[0] if block is not None else None
    whole = first is not None and len(first.queries) == sums.queries and not sums.narrow
    strip, begun = strip_of(sums.queries, heads.device), set[range]()

    def tile(piece: Block) -> TileBytes:
        if whole and piece == first:
            return first_tile(plan.pattern, piece, heads)
        at_home, fresh = any(within(piece.keys, rows) for rows in own), piece.queries not in begun
        begun.add(piece.queries)
        return forward_tile(plan.pattern, piece, heads if at_home else one, strip, fresh)

    if (merged := limits_of(heads.device).merged) > 1:
        others = sum(len(step.blocks) for step in plan.forward(rank)) - 1
        there.take(min(merged, max(0, others)) * (sums.out + sums.lse))  # they wait to be merged at once
    over_steps(there, plan, rank, heads, False, sums.wide_out + sums.lse, tile)
    # A kernel gives its output in the order of the queries, the operator in that of its dims.
    there.briefly(sums.out * (sums.narrow + (whole and not dense)))
    back.take(sums.wide_dq + made + made * heads.wide // heads.itemsize)
    stays = sums.keys * row_bytes_by_cargo(plan, heads, True)[Cargo.BACK]
    home = stays if turns * parts == 1 else 0
    back.take(stays - home)  # of several exchanges some begin with the home blocks
    over_steps(back, plan, rank, heads, True, home, lambda piece: backward_tile(plan.pattern, piece, one))
    back.briefly(rounded(sums))
    return Memory(there.most, sums.out + sums.lse, back.most)


def turns_of(plan: Exchange, heads: Heads) -> tuple[int, int]:
    """(exchanges, KV heads of each) into which an exchange of keys is cut; (1, 1) without tokens."""
    if not plan.length:
        return 1, 1
    apart, row = heads.travelling()
    return exchanges_of(apart, plan.leaving, plan.leaving * row, heads.device)


def made_bytes(plan: Exchange, heads: Heads, rank: int) -> int:
    """Of K and V that are made where they are used, a piece at a time."""
    if not heads.latent:
        return 0
    blocks = (block for step in plan.forward(rank) for block in step.blocks)
    return max((len(block.keys) for block in blocks), default=0) * heads.row()


# ---- queries travel --------------------------------------------------------------------------------------------------
def of_queries(plan: Exchange, heads: Heads, rank: int, buffered: bool) -> Memory:
    """Bytes at the peak of the forward and of the backward, and those saved between them, where queries are
    exchanged."""
    sums = Sums(heads, count(plan.q_pieces(rank)), count(plan.kv_pieces(rank)))
    strip, results = strip_of(sums.queries, heads.device), sums.wide_out + sums.lse
    there, back = Ledger(), Ledger()
    over_steps(there, plan, rank, heads, False, results, lambda piece: forward_tile(plan.pattern, piece, heads, strip))
    parts = results + merged(heads, sums.queries, plan.ranks, buffered) if plan.merges else sums.out * sums.narrow
    there.briefly(parts)
    back.take(2 * sums.out + sums.lse)  # travels with the queries
    back.take(sums.wide_dkv)
    over_steps(back, plan, rank, heads, True, sums.wide_dq, lambda piece: backward_tile(plan.pattern, piece, heads))
    back.briefly(rounded(sums))
    return Memory(there.most, sums.out + sums.lse, back.most)


def merged(heads: Heads, queries: int, ranks: int, buffered: bool) -> int:
    """Where all ranks have the same queries, each has the parts of all to merge; `buffered` as in `memory_of`."""
    sums, copies = Sums(heads, queries, 0), 2 if buffered and heads.kernel in ("flash_cpu", "math") else 1
    return copies * ranks * (sums.wide_out + sums.lse)


def rounded(sums: Sums) -> int:
    """The gradients as they are returned, where they are not the sums."""
    return (sums.dq + sums.dkv) * sums.narrow


def over_steps(
    ledger: Ledger,
    plan: Exchange,
    rank: int,
    heads: Heads,
    backward: bool,
    home: int,
    tile: Callable[[Block], TileBytes],
) -> None:
    """The loop of executor/loop.py: rows on their way, those held, and sums that are owed to other ranks
    or, `home` bytes, stay here."""
    row, steps = row_bytes_by_cargo(plan, heads, backward), plan.steps(rank, backward)
    sums = Owed(ledger, plan, rank, steps, backward, home, row[Cargo.BACK])
    mask = homeward = 0
    came: dict[range, Rows] = {}  # with the pieces of the message that each piece came in
    for step, after in zip_longest(steps, steps[1:]):
        ledger.take(sum(count(m.rows) for m in step.receives if m.cargo is Cargo.OUT) * row[Cargo.OUT])
        leaving = [message.rows for message in step.sends if message.cargo is Cargo.OUT]
        packed = sum(count(rows) for rows in leaving if not passes_on(rows, came)) * row[Cargo.OUT]
        ledger.take(packed)
        last, run = None, 0
        for block in step.blocks:
            like = placeless(plan.pattern, block)
            last, run = like, run + 1 if like == last else 1
            if run > 2:  # this one holds what the second did
                sums.add(plan.moved(block))
                continue
            for piece in pieces(plan.pattern, block, heads.kernel):
                held = tile(piece)
                ledger.briefly(held.making)
                if held.kept:
                    ledger.free(mask)
                ledger.briefly(held.working)
                sums.add(plan.moved(block))
                ledger.briefly(held.adding)
                if held.kept:
                    mask = held.kept
                    ledger.take(mask)
        for message in step.receives:
            for rows in message.rows if message.cargo is Cargo.BACK else ():
                sums.add(rows)
        ledger.free(homeward)
        homeward = sums.send_home(after) if after is not None else 0
        ledger.free(packed)
        came.update({rows: m.rows for m in step.receives if m.cargo is Cargo.OUT for rows in m.rows})
        ledger.free(count(step.drops) * row[Cargo.OUT])


class Owed:
    """The sums of `over_steps`, `row` bytes a row. Each is begun when something is first added to it. In a forward of
    keys all stay here."""

    def __init__(
        self, ledger: Ledger, plan: Exchange, rank: int, steps: Sequence[Step], backward: bool, home: int, row: int
    ) -> None:
        self.ledger, self.row, self.home = ledger, row, home
        self.own = plan.home(rank) if backward or plan.queries_move else None  # None: of every row
        self.owed = [message for step in steps for message in step.sends if message.cargo is Cargo.BACK]
        self.begun: set[Message | None] = set()

    def begin(self, message: Message | None) -> None:
        """Of a message, or of what stays here."""
        if message not in self.begun:
            self.begun.add(message)
            self.ledger.take(self.home if message is None else count(message.rows) * self.row)

    def add(self, rows: range) -> None:
        if self.own is None or any(within(rows, piece) for piece in self.own):
            self.begin(None)
        elif (to := next((m for m in self.owed if any(within(rows, piece) for piece in m.rows)), None)) is not None:
            self.begin(to)

    def send_home(self, step: Step) -> int:
        """Its messages of sums are posted: bytes of what comes and of what leaves."""
        coming = sum(count(m.rows) for m in step.receives if m.cargo is Cargo.BACK) * self.row
        self.ledger.take(coming)
        leaving = [message for message in step.sends if message.cargo is Cargo.BACK]
        for message in leaving:
            self.begin(message)
            self.owed.remove(message)
        return coming + sum(count(message.rows) for message in leaving) * self.row


def passes_on(rows: Rows, came: Mapping[range, Rows]) -> bool:
    """Whether a message is part of one that came, and needs no buffer of its own."""
    whole = came.get(rows[0], ())
    first = whole.index(rows[0]) if whole else 0
    return bool(whole) and whole[first : first + len(rows)] == rows


# ---- rows are traded for heads ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class BetweenTrades:
    """Bytes of a rank's heads over the rows of its node: what came, what is held beside that while it computes,
    results, and those as they are packed by rank."""

    operands: int
    computing: int
    results: int
    packed: int


def of_heads(plan: HeadExchange, heads: Heads, rank: int) -> Memory:
    """The node's rows of some heads are held as they came until they are put together, and so are the results, back
    home."""
    share = replace(heads, q_heads=len(plan.share(rank)), kv_heads=len(plan.kv_share(rank)))
    here = Sums(heads, count(plan.q_layout.ranges(rank)), count(plan.kv_layout.ranges(rank)))
    node, between = rank // plan.node, plan.whole
    whole = Sums(share, count(between.q_layout.ranges(node)), count(between.kv_layout.ranges(node)))
    shares = map(heads.share, plan.parts(rank))
    parts = [of_keys(between, one, node, dense=True) for one in shares]
    operands, results = whole.dq + whole.dkv, whole.out + whole.lse
    computing = results + max(part.forward for part in parts)
    there = BetweenTrades(operands, computing, results, results)
    total = whole.wide_dq + whole.wide_dkv
    back = BetweenTrades(
        operands=operands + 2 * whole.out + whole.lse,
        computing=total + max(part.backward for part in parts),
        results=total + whole.dq * whole.narrow,
        packed=whole.dq + whole.wide_dkv,
    )
    forward, backward = trade(plan, heads, rank, False, there), trade(plan, heads, rank, True, back)
    return Memory(forward, here.out + here.lse, backward)


def trade(plan: HeadExchange, heads: Heads, rank: int, backward: bool, held: BetweenTrades) -> int:
    """The most of: messages out and in; those that came, being put together to operands; these while computing; and
    results, packed by rank and again by message, with what comes."""
    others = [other for other in plan.peers(rank) if other != rank]
    ways = [(plan.parcel(rank, other), plan.parcel(other, rank)) for other in others]
    out, come = (sum(there_bytes(parcel, heads, backward) for parcel in way) for way in zip(*ways, strict=True))
    sent, returned = (sum(back_bytes(way[i], heads, backward) for way in ways) for i in (1, 0))
    home = held.operands + held.results + held.packed + sent + returned
    return max(out + come, come + held.operands, held.operands + held.computing, home)
