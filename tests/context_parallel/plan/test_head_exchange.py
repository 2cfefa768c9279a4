"""Rows traded for heads, by all ranks ("ulysses") or by those of a node ("hybrid"): plans, proof, numbers and bytes, p
ranks as threads."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.layouts import Contiguous, Zigzag
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.rows import Rows
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.head_exchange import HeadExchange, Part, head_exchange_of, prove_heads
from ringopt.context_parallel.plan.plan_of import plan_of
from ringopt.context_parallel.plan.prove import check_return, simulate
from ringopt.context_parallel.plan.strategies import Ring
from ringopt.cost.message_bytes import Sizes, bytes_between, bytes_sent
from ringopt.cost.volume import HeadVolume
from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, PlanError
from ringopt.expr.mask import Mask
from ringopt.expr.terms import axis, load
from ringopt.kernels.choose import choose_kernel
from tests.context_parallel.drawing import many
from tests.context_parallel.reference import Problem, assert_near, join, problem, sdpa, shard, visible
from tests.harness.threads import ThreadMesh


def plan(
    heads: tuple[int, int],
    ranks: int,
    pattern: str = "causal",
    n: int = 17,
    m: int | None = None,
    node: int | None = None,
    layouts: tuple[str, str] = ("zigzag", "zigzag"),
) -> HeadExchange:
    return head_exchange_of(ShardedPattern(pattern, n, n if m is None else m, ranks, *layouts), heads, node)


def prove(made: HeadExchange) -> None:
    for rank in range(made.ranks):
        prove_heads(made, rank)


# ---- plans -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        ((4, 4), 2, ["q 0:2 kv 0:2", "q 2:4 kv 2:4"]),
        ((4, 1), 4, ["q 0:1 kv 0:1", "q 1:2 kv 0:1", "q 2:3 kv 0:1", "q 3:4 kv 0:1"]),
        ((10, 2), 3, ["q 0:3 kv 0:1", "q 3:5 kv 0:1, q 5:6 kv 1:2", "q 6:10 kv 1:2"]),
        ((12, 6), 5, ["q 0:2 kv 0:1", "q 2:4 kv 1:2", "q 4:6 kv 2:3, q 6:7 kv 3:4", "q 7:8 kv 3:4, q 8:9 kv 4:5",
                      "q 9:10 kv 4:5, q 10:12 kv 5:6"]),
    ],
)  # fmt: skip
def test_shares_of_heads(heads: tuple[int, int], ranks: int, expected: list[str]) -> None:
    """As even as they go, each with the KV heads that it reads, cut into parts that a kernel can take."""

    def told(part: Part) -> str:
        return f"q {part.queries.start}:{part.queries.stop} kv {part.keys.start}:{part.keys.stop}"

    found = [", ".join(map(told, plan(heads, ranks).parts(rank))) for rank in range(ranks)]
    assert found == expected


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 16), st.integers(1, 200), st.integers(1, 200))
@settings(many, max_examples=60)
def test_any_plan_is_proved(kv_heads: int, group: int, ranks: int, n: int, m: int) -> None:
    if kv_heads * group >= ranks:
        prove(plan((kv_heads * group, kv_heads), ranks, n=n, m=m))


layouts = st.sampled_from(["contiguous", "zigzag"])


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(2, 6), st.integers(2, 4)),
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.sampled_from(["full", "causal", "window(9)", "window(40,both)", "prefix(21)", "chunked(24)"]),
    st.tuples(layouts, layouts),
)
@settings(many, max_examples=60)
def test_any_plan_of_several_nodes_is_proved(
    sizes: tuple[int, int, int, int], lengths: tuple[int, int], pattern: str, layouts: tuple[str, str]
) -> None:
    kv_heads, group, node, nodes = sizes
    if kv_heads * group >= node:
        made = plan((kv_heads * group, kv_heads), node * nodes, pattern, *lengths, node, layouts)
        prove(made)
        follow(made.whole)


def follow(between: Exchange) -> None:
    """The plan of all nodes together: no deadlock, and every gradient comes home."""
    for backward in (False, True):
        steps = [between.steps(node, backward) for node in range(between.ranks)]
        simulate(steps)
        if backward:
            check_return(between, steps)


def test_nodes_hold_rows_and_circles_hold_heads() -> None:
    """6 ranks, nodes of 3: a node's rows are a head and a tail of the sequence, as in zigzag of as many ranks as there
    are nodes; ranks of one place have the same heads."""
    made = plan((6, 2), 6, n=24, node=3)
    assert [made.whole.q_layout.ranges(node) for node in range(2)] == [
        (range(6), range(18, 24)),
        (range(6, 18),),
    ]
    assert [list(made.peers(rank)) for rank in (1, 4)] == [[0, 1, 2], [3, 4, 5]]
    assert [list(made.circle(rank)) for rank in (1, 4)] == [[1, 4], [1, 4]]
    assert made.share(1) == made.share(4) == range(2, 4)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"share": lambda self, rank: range(4)}, "not each of 4 query heads is in one share"),
        ({"kv_share": lambda self, rank: range(1)}, "rank 1 would compute query heads range\\(2, 4\\) with KV heads"),
        ({"parts": lambda self, rank: (Part(self.share(rank), range(2)),)}, "rank 0 would compute query heads"),
        ({"parts": lambda self, rank: ()}, "rank 0 does not compute its share"),
        ({"circle": lambda self, rank: range(2)}, "rank 0 has another circle or other heads than rank 1"),
        ({"circle": lambda self, rank: range(4)}, "rank 0 has no place among the nodes"),
        ({"peers": lambda self, rank: range(4)}, "not each of 4 query heads is in one share"),
        ({"whole": Exchange(pattern_of("causal", 17, 17), Zigzag(17, 4), Zigzag(17, 4), Ring())},
         "rank 0 would not hold the rows of queries of its node"),
        ({"share": lambda self, rank: self.share_of(rank)}, "rank 0 has another circle or other heads than rank 2"),
    ],
)  # fmt: skip
def test_a_fault_is_refused(fault: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prove_heads.cache_clear()
    head_exchange_of.cache_clear()
    swapped = [range(2), range(2, 4), range(2, 4), range(2)]
    monkeypatch.setattr(HeadExchange, "share_of", lambda self, rank: swapped[rank], raising=False)
    for name, wrong in fault.items():
        monkeypatch.setattr(HeadExchange, name, wrong)
    with pytest.raises(PlanError, match=told):
        prove(plan((4, 2), 4, node=2))


@pytest.mark.parametrize("side", ["q", "kv"])
def test_a_row_that_two_ranks_of_a_node_hold_is_refused(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has its rows all the same, and would compute with one of them twice."""
    made = plan((4, 2), 4, n=16, node=2, layouts=("contiguous", "zigzag") if side == "q" else ("zigzag", "contiguous"))
    odd = made.q_layout if side == "q" else made.kv_layout
    ranges = Contiguous.ranges

    def one_row_more(self: Contiguous, rank: int) -> Rows:
        return (range(4, 8), range(3, 4)) if self == odd and rank == 1 else ranges(self, rank)

    prove_heads.cache_clear()
    monkeypatch.setattr(Contiguous, "ranges", one_row_more)
    with pytest.raises(PlanError, match=f"not each of 16 rows of {'queries' if side == 'q' else 'keys'} is in one"):
        prove(made)


def test_refusals() -> None:
    with pytest.raises(
        OptionError, match="'ulysses' gives every rank whole heads, and 2 query heads are too few for 4"
    ):
        plan((2, 2), 4)
    with pytest.raises(OptionError, match=r"'hybrid' .* 2 query heads are too few for the 3 ranks of a node"):
        plan((2, 2), 6, node=3)
    for node in (1, 3, 4):
        with pytest.raises(OptionError, match=f"4 ranks are not several nodes of {node} ranks, 2 or more each"):
            plan((4, 4), 4, node=node)
    rows = Mask(bias=load(0, [axis("b"), axis("h"), axis("r"), axis("k")], torch.float64))
    with pytest.raises(OptionError, match=r"the mask .* is a tensor of which each rank holds its own rows"):
        plan_of(ShardedPattern.of_self_attention("full", 8, 2, "zigzag"), "ulysses", (4, 4), rows)
    with pytest.raises(OptionError, match=r"'hybrid\(2\)' .* the mask .* is a tensor of which each rank holds its own"):
        plan_of(ShardedPattern.of_self_attention("full", 8, 4, "zigzag"), "hybrid(2)", (4, 4), rows)
    with pytest.raises(PlanError, match="4 query heads cannot share 3 KV heads evenly"):
        plan((4, 3), 2)


# ---- numbers and bytes -----------------------------------------------------------------------------------------------
class Counting(ThreadMesh):
    """Bytes by direction, sender and receiver, of the messages themselves."""

    def __init__(self, size: int):
        super().__init__(size)
        self.sent: Counter[tuple[str, int, int]] = Counter()

    def _post(self, sends: Any, receives: Any, label: str) -> Any:
        for peer, buffer in sends:
            with self._lock:
                self.sent[label.split()[0], self.rank, peer] += buffer.nbytes
        return super()._post(sends, receives, label)


def run(case: Problem, p: int, pattern: str, layouts: tuple[str, str], node: int | None = None) -> list[Tensor]:
    """out, dq, dk, dv in sequence order; every byte is counted, within nodes and between them."""
    heads = case.q.shape[1], case.k.shape[1]
    made = head_exchange_of(ShardedPattern(pattern, case.q.shape[2], case.k.shape[2], p, *layouts), heads, node)
    prove(made)
    kernel, _ = choose_kernel("auto", case.q.dtype, case.q.device, case.k.shape[3], case.v.shape[3])
    site = Attention(made.whole, Mask(), kernel, case.scale, heads=made)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        q, dout = (shard(x, layouts[0], p, mesh.rank) for x in (case.q, case.dout))
        k, v = (shard(x, layouts[1], p, mesh.rank) for x in (case.k, case.v))
        given = Operands(q, k, v)
        out, lse = attend(site, mesh, given)
        return [out, *attend_backward(site, mesh, dout, Saved(given, out, lse))[:3]]

    mesh, sizes = Counting(p), Sizes.of(case.q, case.k, case.v)
    with record_traffic() as traffic:
        results = mesh.run(body)
    for rank, way in product(range(p), ("forward", "backward")):
        back = way == "backward"
        sent = sum(event.bytes for event in traffic.of(rank).events if event.label.startswith(way))
        by_peer = {peer: mesh.sent[way, rank, peer] for peer in range(p)}
        assert sent == sum(by_peer.values()) == bytes_sent(made, sizes, rank, back)
        away = sum(size for peer, size in by_peer.items() if peer // made.node != rank // made.node)
        assert away == bytes_between(made, sizes, rank, made.node, back)
    out, dq, dk, dv = zip(*results, strict=True)
    return [join(out, layouts[0]), join(dq, layouts[0]), join(dk, layouts[1]), join(dv, layouts[1])]


@pytest.mark.sample(6)
@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("zigzag", "zigzag"), ("zigzag", "contiguous")])
@pytest.mark.parametrize("pattern", ["full", "causal", "window(5)", "window(5,both)"])
@pytest.mark.parametrize(("p", "heads"), [(2, (4, 2)), (3, (10, 2)), (4, (4, 1)), (3, (3, 3))])
def test_numbers(p: int, heads: tuple[int, int], pattern: str, layouts: tuple[str, str]) -> None:
    for n, m in ((17, 17), (3, 3), (17, 40)):
        case = problem(n, m, heads=heads)
        for found, right in zip(run(case, p, pattern, layouts), sdpa(case, visible(pattern, n, m)), strict=True):
            assert_near(found, right, 1e-12)


@pytest.mark.sample(6)
@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("zigzag", "zigzag"), ("zigzag", "contiguous")])
@pytest.mark.parametrize("pattern", ["full", "causal", "window(5)"])
@pytest.mark.parametrize(("p", "node", "heads"), [(4, 2, (4, 2)), (4, 2, (3, 1)), (6, 2, (6, 3)), (6, 3, (10, 2))])
def test_numbers_over_nodes(p: int, node: int, heads: tuple[int, int], pattern: str, layouts: tuple[str, str]) -> None:
    for n, m in ((17, 17), (17, 40)):
        case = problem(n, m, heads=heads)
        found = run(case, p, pattern, layouts, node)
        for got, right in zip(found, sdpa(case, visible(pattern, n, m)), strict=True):
            assert_near(got, right, 1e-12)


@pytest.mark.parametrize("node", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_widths(dtype: torch.dtype, node: int | None) -> None:
    case = problem(33, heads=(6, 2), dims=(8, 5))
    found = run(case.to(dtype), 4, "causal", ("zigzag", "zigzag"), node)
    for got, right in zip(found, sdpa(case, visible("causal", 33, 33)), strict=True):
        assert got.dtype == dtype
        assert_near(got, right, 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(("heads", "p"), [((8, 8), 4), ((8, 2), 4), ((8, 1), 8)])
def test_bytes_are_those_of_the_formula(heads: tuple[int, int], p: int) -> None:
    made, sizes = plan(heads, p, n=64), Sizes(2, *heads, 16, 24, 2, 4)
    form = HeadVolume()
    values = {"n": 64, "p": p, "B": 2, "Hq": heads[0], "Hkv": heads[1], "Dk": 16, "Dv": 24, "e": 2, "e_acc": 4}
    for backward, formula in ((False, form.forward_bytes), (True, form.backward_bytes)):
        number = formula.subs({symbol: values[symbol.name] for symbol in formula.free_symbols})
        assert {bytes_sent(made, sizes, rank, backward) for rank in range(p)} == {int(number)}
