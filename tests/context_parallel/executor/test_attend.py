"""The executor over real plans, p ranks as threads: numbers, bytes, order, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor import tiles
from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.buffers import KVShape
from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan import tiling
from ringopt.context_parallel.plan.exchange import Cargo, Exchange, Step
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.cost.message_bytes import Sizes, bytes_sent
from ringopt.distributed.traffic import Traffic, record_traffic
from ringopt.errors import PlanError
from ringopt.expr.mask import Mask
from ringopt.expr.terms import applied, axis, load, number, score
from ringopt.kernels.choose import choose_kernel
from ringopt.kernels.cpu_flash import CpuFlash
from ringopt.kernels.math import Math
from tests.context_parallel.reference import Problem, assert_near, join, problem, sdpa, shard, visible
from tests.harness.limits import set_limits
from tests.harness.threads import ThreadMesh, calls_of, run_on_threads

PATTERNS = ("full", "causal", "window(5)", "window(5,both)")


def attention(
    case: Problem, p: int, pattern: str, layout: str, strategy: str, kernel: str = "auto", mask: Mask | None = None
) -> Attention:
    exchange = exchange_of(ShardedPattern(pattern, case.q.shape[2], case.k.shape[2], p, layout, layout), strategy)
    chosen, _ = choose_kernel(kernel, case.q.dtype, case.q.device, case.k.shape[3], case.v.shape[3])
    return Attention(exchange, mask or Mask(), chosen, case.scale)


def run(
    case: Problem, site: Attention, layout: str, sources: Sequence[Tensor] = ()
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """out, lse, dq, dk, dv in sequence order; and of each rank the gradients of learned sources."""
    p = site.exchange.ranks

    def body(mesh: ThreadMesh) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, dout = (shard(x, layout, p, mesh.rank) for x in (case.q, case.k, case.v, case.dout))
        given = Operands(q, k, v, sources)
        out, lse = attend(site, mesh, given)
        *grads, learned = attend_backward(site, mesh, dout, Saved(given, out, lse))
        return [out, lse, *grads], learned

    results = run_on_threads(p, body)
    return [join(parts, layout) for parts in zip(*(part for part, _ in results), strict=True)], [x for _, x in results]


# ---- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.sample(6)
@pytest.mark.parametrize("strategy", ["ring", "ring2", "gather", "ring_q", "gather_q"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_numbers(p: int, pattern: str, layout: str, strategy: str) -> None:
    """Few rows; test_laws.py has many."""
    for n, m in ((17, 17), (3, 3), (1, 1), (7, 2)):
        case = problem(n, m)
        (out, _lse, *grads), _ = run(case, attention(case, p, pattern, layout, strategy), layout)
        for found, expected in zip((out, *grads), sdpa(case, visible(pattern, n, m)), strict=True):
            assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("kernel", ["flash_cpu", "math"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (4, 1)])
def test_heads(heads: tuple[int, int], kernel: str) -> None:
    case = problem(17, heads=heads, dims=(7, 7))
    (out, _lse, *grads), _ = run(case, attention(case, 3, "causal", "zigzag", "ring", kernel), "zigzag")
    for found, expected in zip((out, *grads), sdpa(case, visible("causal", 17, 17)), strict=True):
        assert_near(found, expected, 1e-12)


def test_values_of_another_width() -> None:
    case = problem(17, dims=(8, 5))
    (out, _lse, *grads), _ = run(case, attention(case, 3, "causal", "zigzag", "ring"), "zigzag")
    for found, expected in zip((out, *grads), sdpa(case, visible("causal", 17, 17)), strict=True):
        assert_near(found, expected, 1e-12)


def test_lse() -> None:
    case, p = problem(17, 9), 3
    (_, lse, *_), _ = run(case, attention(case, p, "window(4)", "contiguous", "ring"), "contiguous")
    scores = case.q @ case.k.repeat_interleave(2, 1).mT * case.scale
    expected = scores.masked_fill(~visible("window(4)", 17, 9), -torch.inf).logsumexp(-1)
    assert torch.equal(lse == -torch.inf, expected == -torch.inf)
    assert (lse == -torch.inf).any(), "queries beyond the last key see nothing"
    assert_near(lse[expected > -torch.inf], expected[expected > -torch.inf], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", ["full", "causal"])
def test_half_precision_is_as_good_as_sdpa(pattern: str, dtype: torch.dtype) -> None:
    case = problem(64, heads=(4, 2), dims=(16, 16)).to(dtype)
    exact, own = (sdpa(x, visible(pattern, 64, 64)) for x in (case.to(torch.float64), case))
    for p, layout, strategy in ((2, "zigzag", "ring"), (4, "contiguous", "ring"), (3, "zigzag", "ring_q")):
        (out, lse, *grads), _ = run(case, attention(case, p, pattern, layout, strategy), layout)
        assert {x.dtype for x in (out, *grads)} == {dtype}
        assert lse.dtype == torch.float32
        for found, expected, single in zip((out, *grads), exact, own, strict=True):
            errors = [float((x.double() - expected).abs().amax()) for x in (found, single)]
            assert errors[0] <= 2 * errors[1], errors


# ---- masks -----------------------------------------------------------------------------------------------------------
def padding() -> Mask:
    """Keys that `sources[0]` [B, m] says are there."""
    return Mask(visible=load(0, [axis("b"), axis("k")], torch.bool))


def relative_bias(clip: int) -> Mask:
    """`sources[0]` [2 * clip + 1, H], read at the clipped distance of query and key (as in T5)."""
    away = applied("sub", [axis("k"), axis("q")], torch.int64)
    place = applied("add", [applied("clamp", [away, -clip, clip], torch.int64), number(clip, torch.int64)], torch.int64)
    return Mask(bias=load(0, [place, axis("h")], torch.float64))


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask_elements", [1, 40, 1 << 22])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_padding(pattern: str, mask_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, mask=mask_elements)
    case, there = problem(17), torch.ones(2, 17, dtype=torch.bool)
    there[0, :6], there[1, 9:] = False, False  # the first queries of row 0 see nothing under a causal pattern
    for p, layout in ((1, "contiguous"), (3, "zigzag")):
        site = attention(case, p, pattern, layout, "ring", mask=padding())
        (out, lse, *grads), _ = run(case, site, layout, [there])
        seen = visible(pattern, 17, 17) & there[:, None, None]
        for found, expected in zip((out, *grads), sdpa(case, seen), strict=True):
            assert_near(found, expected, 1e-12)
        hidden = ~seen.any(-1).expand(lse.shape)
        assert torch.equal(lse == -torch.inf, hidden)
        assert not out[hidden].any()


@pytest.mark.parametrize("mask_elements", [1, 300, 1 << 22])
@pytest.mark.parametrize("pattern", ["full", "causal", "window(5)"])
def test_learned_bias(pattern: str, mask_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, mask=mask_elements)
    case, clip = problem(17), 4
    table = torch.randn(2 * clip + 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = table.clone().requires_grad_()
    away = (torch.arange(17) - torch.arange(17)[:, None]).clamp(-clip, clip) + clip
    mask = whole[away].permute(2, 0, 1)[None].masked_fill(~visible(pattern, 17, 17), -torch.inf)
    expected = sdpa(case, mask.detach())
    q, k, v = case.q, case.k.repeat_interleave(2, 1), case.v.repeat_interleave(2, 1)
    weights = (q @ k.mT * case.scale + mask).softmax(-1)
    (dtable,) = torch.autograd.grad(weights @ v, whole, case.dout)
    for p, layout in ((1, "contiguous"), (3, "zigzag")):
        plain = attention(case, p, pattern, layout, "ring", mask=relative_bias(clip))
        site = Attention(plain.exchange, plain.mask, plain.kernel, plain.scale, learned=(0,))
        (out, _lse, *grads), parts = run(case, site, layout, [table])
        for found, right in zip((out, *grads), expected, strict=True):
            assert_near(found, right, 1e-12)
        assert_near(sum(part for (part,) in parts), dtable, 1e-12)


def test_a_mask_that_hides_everything() -> None:
    case, nothing = problem(8), torch.zeros(2, 8, dtype=torch.bool)
    site = attention(case, 2, "full", "contiguous", "ring", mask=padding())
    (out, lse, *grads), _ = run(case, site, "contiguous", [nothing])
    assert not any(x.any() for x in (out, *grads))
    assert (lse == -torch.inf).all()


def test_masks_stay_below_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, mask=2 * 100)
    plan = exchange_of(ShardedPattern.of_self_attention("window(40,both)", 64, 1, "contiguous"), "ring")
    block = plan.forward(0)[0].blocks[0]
    there = torch.ones(2, 64, dtype=torch.bool)
    there[:, ::2] = False
    pattern = plan.pattern
    facts = MaskFacts([there])
    scores = tiles.TileScores(pattern, padding(), [there], facts, 2, range(4), torch.float32, torch.device("cpu"))
    made = list(scores.tiles(block))
    assert block.kind is Kind.PARTIAL
    assert len(made) > 10
    assert all(tile.mask is not None and tile.mask.numel() <= 200 for tile in made)


def test_a_choice_that_a_block_decides_keeps_the_fast_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """masked_fill(score, k > q, -1e9) over blocks of 16: only those on the diagonal have scores to change."""
    ahead = applied("le", [applied("sub", [axis("k"), axis("q")], torch.int64), 0], torch.bool)
    zero, score_ = number(0.0, torch.float64), score(torch.float64)
    choices = ((zero, number(-1e9, torch.float64)), (score_, zero))
    bias, change = (applied("where", [ahead, yes, no], torch.float64) for yes, no in choices)
    case, used = problem(64), []
    for kernel in (CpuFlash, Math):
        forward = kernel._forward
        monkeypatch.setattr(
            kernel,
            "_forward",
            lambda self, tile, f=forward: used.append((self.name, tile.q.shape[2])) or f(self, tile),
        )
    site = attention(case, 4, "full", "contiguous", "gather", mask=Mask(bias=bias, score=change))
    (out, *_), _ = run(case, site, "contiguous")
    assert_near(out, sdpa(case, visible("causal", 64, 64))[0], 1e-12)
    assert ("flash_cpu", 16) in used and ("math", 16) in used


def test_strips_are_the_tile() -> None:
    mask = torch.arange(7 * 9.0).view(1, 1, 7, 9)
    triangle = tiles.Tile(range(3, 10), range(3, 10), None, causal=True)
    for tile in (tiles.Tile(range(3, 10), range(0, 9), mask), triangle):
        computed = []
        for part in tile.strips(3):
            assert 3 <= len(part.queries) < 6 and (not part.causal or part.queries == part.keys)
            pairs = [(q, k) for q in part.queries for k in part.keys if not part.causal or k <= q]
            computed += pairs
            if part.mask is not None:
                assert part.mask.flatten().tolist() == [(q - 3) * 9 + k for q, k in pairs]
        assert sorted(computed) == [(q, k) for q in tile.queries for k in tile.keys if not tile.causal or k <= q]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_numbers_in_strips(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, strip=1)
    monkeypatch.setattr(tiling, "AT_ONCE", 1)
    case, there = problem(67), torch.arange(2 * 67).view(2, 67) % 5 > 0
    for mask, seen, sources in (
        (None, visible(pattern, 67, 67), []),
        (padding(), visible(pattern, 67, 67) & there[:, None, None], [there]),
    ):
        (out, *_), _ = run(case, attention(case, 2, pattern, "zigzag", "ring", mask=mask), "zigzag", sources)
        assert_near(out, sdpa(case, seen)[0], 1e-12)


# ---- traffic ---------------------------------------------------------------------------------------------------------
def recorded(case: Problem, site: Attention, layout: str) -> Traffic:
    with record_traffic() as traffic:
        run(case, site, layout)
    return traffic


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["ring", "ring2", "gather", "ring_q", "gather_q"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_are_those_of_the_plan(pattern: str, layout: str, strategy: str) -> None:
    p, case = 3, problem(67, heads=(4, 2), dims=(8, 5), dtype=torch.bfloat16)
    site = attention(case, p, pattern, layout, strategy)
    traffic = recorded(case, site, layout)
    for rank in range(p):
        events = traffic.of(rank).events
        for way in ("forward", "backward"):
            sent = sum(event.bytes for event in events if event.kind == "posted" and event.label.startswith(way))
            assert sent == bytes_sent(site.exchange, Sizes.of(case.q, case.k, case.v), rank, way == "backward")
    assert traffic.bytes_sent == traffic.bytes_received > 0
    plans = [site.exchange.steps(rank, backward) for rank in range(p) for backward in (False, True)]
    assert traffic.messages == sum(len(step.sends) for steps in plans for step in steps)


def test_few_queries_travel_for_less() -> None:
    """5 queries over 64 keys: Q and the results of a gather are a seventh of K and V."""
    p, case = 4, problem(5, 64, heads=(4, 4), dims=(8, 8), dtype=torch.float32)
    sent = {
        name: recorded(case, attention(case, p, "full", "contiguous", name), "contiguous").bytes_sent
        for name in ("gather", "gather_q", "ring", "ring_q")
    }
    row = 2 * 4 * 4  # bytes of one number of all heads and batch rows
    assert sent["gather"] == sent["ring"] == 64 * (p - 1) * 3 * (8 + 8) * row
    assert sent["gather_q"] == sent["ring_q"] == 5 * (p - 1) * ((8 + 8 + 1) + (8 + 8 + 8 + 1 + 8)) * row


def test_a_full_ring_sends_p_minus_1_shards() -> None:
    p, case = 4, problem(64, heads=(4, 2), dims=(8, 8), dtype=torch.float32)
    traffic = recorded(case, attention(case, p, "full", "contiguous", "ring"), "contiguous")
    shards = 2 * 2 * (64 // p) * (8 + 8) * (p - 1)  # elements
    for rank in range(p):
        forward = sum(e.bytes for e in traffic.of(rank).events if e.label.startswith("forward"))
        backward = sum(e.bytes for e in traffic.of(rank).events if e.label.startswith("backward"))
        assert (forward, backward) == (shards * 4, shards * (4 + 4))


def carries(step: Step, cargo: Cargo) -> bool:
    return any(message.cargo is cargo for message in (*step.sends, *step.receives))


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_messages_travel_under_the_blocks_of_their_step(strategy: str) -> None:
    p, case = 4, problem(67)
    site = attention(case, p, "causal", "zigzag", strategy)
    traffic = recorded(case, site, "zigzag")
    for rank in range(p):
        log = [(event.kind, event.label) for event in traffic.of(rank).events]
        expected = []
        for index, step in enumerate(site.exchange.forward(rank)):
            moves = bool(step.sends or step.receives)
            expected += [("posted", f"forward {index}")] * moves + [("computed", f"forward {index}")]
            expected += [("waited", f"forward {index}")] * moves
        steps = (*site.exchange.backward(rank), Step())
        for index, step in enumerate(steps[:-1]):
            out, last = carries(step, Cargo.OUT), index + 2 == len(steps)
            expected += [("posted", f"backward {index}")] * out
            expected += [("computed", "backward home" if last else f"backward {index}")] * bool(step.blocks)
            expected += [("waited", f"backward {index}, home")] * carries(step, Cargo.BACK)
            expected += [("posted", f"backward {index + 1}, home")] * carries(steps[index + 1], Cargo.BACK)
            expected += [("waited", f"backward {index}")] * out
        assert log == expected


@pytest.mark.parametrize("strategy", ["ring", "ring_q"])
def test_messages_are_attended_to_after_every_tile(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transports without threads, which move nothing while a rank computes."""
    done = calls_of(monkeypatch, {Math: ("forward", "backward"), ThreadMesh: ("attend",)})
    case = problem(64)
    run(case, attention(case, 2, "causal", "zigzag", strategy, kernel="math"), "zigzag")
    assert done.count("attend") == done.count("forward") + done.count("backward") > 0


def test_a_buffer_that_arrived_is_sent_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    p, case, sent, received = 4, problem(64, dtype=torch.float32), [], []
    exchange = ThreadMesh.exchange

    def spied(mesh: ThreadMesh, sends: Any, receives: Any, label: str) -> Any:
        if mesh.rank == 0:
            sent.extend(buffer.data_ptr() for _, buffer in sends)
            received.extend(buffer.data_ptr() for _, buffer in receives)
        return exchange(mesh, sends, receives, label)

    def body(mesh: ThreadMesh) -> None:
        q, k, v = (shard(x, "contiguous", p, mesh.rank) for x in (case.q, case.k, case.v))
        attend(attention(case, p, "full", "contiguous", "ring"), mesh, Operands(q, k, v))

    monkeypatch.setattr(ThreadMesh, "exchange", spied)
    run_on_threads(p, body)
    assert len(sent) == p - 1
    assert sent[1:] == received[:-1]


@pytest.mark.parametrize("strategy", ["ring", "ring_q"])
def test_a_step_makes_as_many_buffers_as_it_receives_messages(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a ring makes the same number in every step from the third on, however many ranks there are."""
    p, case, made = 8, problem(64), list[int]()
    empty = KVShape.empty
    monkeypatch.setattr(KVShape, "empty", lambda self, rows: made.append(len(rows)) or empty(self, rows))
    site = attention(case, p, "full", "contiguous", strategy)
    run(case, site, "contiguous")
    steps = [step for rank in range(p) for way in (False, True) for step in site.exchange.steps(rank, way)]
    received, sums = sum(len(step.receives) for step in steps), p * (p - 1)
    own = p * 2  # a rank packs its own rows once each way
    backwards = 2 if strategy == "ring_q" else 1
    assert len(made) == received + own + backwards * sums
    middle = {len(step.receives) for rank in range(p) for step in site.exchange.forward(rank)[2 : p - 2]}
    assert len(middle) == 1


# ---- plans that do not hold together ---------------------------------------------------------------------------------
def test_rows_that_are_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(16)
    site = attention(case, 1, "full", "contiguous", "ring")
    two = exchange_of(ShardedPattern.of_self_attention("full", 16, 2, "contiguous"), "ring")
    stray = tuple(Step(blocks=step.blocks) for step in two.forward(0))
    monkeypatch.setattr(Exchange, "forward", lambda self, rank: stray)
    half = Attention(two, site.mask, site.kernel, site.scale)
    with pytest.raises(PlanError, match=r"rows range\(8, 16\) are not here; here are \(range\(0, 8\),\)"):
        run_on_threads(1, lambda mesh: attend(half, mesh, Operands(*(x[:, :, :8] for x in (case.q, case.k, case.v)))))


def test_gradients_without_a_way_home_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(16)
    steps = Exchange.backward

    def lossy(self: Exchange, rank: int) -> tuple[Step, ...]:
        def kept(messages: Any) -> Any:
            return tuple(m for m in messages if m.cargo is Cargo.OUT)

        return tuple(Step(kept(s.sends), kept(s.receives), s.blocks, s.drops) for s in steps(self, rank))

    monkeypatch.setattr(Exchange, "backward", lossy)
    with pytest.raises(PlanError, match="have no way home: the rank sends on nothing"):
        run(case, attention(case, 2, "full", "contiguous", "ring"), "contiguous")
