"""The operators by hand: one device, and ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.distributed.traffic import record_traffic
from ringopt.errors import OptionError, RingMismatchError
from ringopt.functional import attention, shard, unshard
from tests.context_parallel.reference import assert_near, problem, sdpa, visible
from tests.harness.threads import ThreadMesh, run_on_threads


# ---- one device ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({}, "full"),
        ({"is_causal": True}, "causal"),
        ({"window": 5}, "window(5,both)"),
        ({"window": 5, "is_causal": True}, "window(5)"),
    ],
)
def test_without_a_process_group_it_is_the_single_device_operator(asked: dict[str, Any], pattern: str) -> None:
    case = problem(17)
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    out = attention(q, k, v, enable_gqa=True, **asked)
    out.backward(case.dout)
    for found, right in zip((out.detach(), q.grad, k.grad, v.grad), sdpa(case, visible(pattern, 17, 17)), strict=True):
        assert found is not None
        assert_near(found, right, 1e-12)


def test_what_one_device_can_do_besides() -> None:
    case = problem(17)
    mask = torch.randn(17, 17, dtype=torch.float64)
    given = (case.q, case.k, case.v)
    assert_near(
        attention(*given, mask, scale=0.2, enable_gqa=True),
        F.scaled_dot_product_attention(*given, mask, scale=0.2, enable_gqa=True),
        1e-12,
    )
    assert not attention(*given, dropout_p=1.0, enable_gqa=True).any()
    x = torch.ones(2, 3)
    assert shard(x, 1) is x and unshard(x, 1, length=3) is x


# ---- ranks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "m"), [(17, 17), (67, 67), (17, 40), (3, 3), (2, 2), (1, 5), (5, 2)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shard_attend_unshard(layout: str, n: int, m: int) -> None:
    case = problem(n, m)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        where: Any = {"mesh": mesh, "layout": layout}
        whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        local = [shard(x, 2, **where) for x in whole]
        out = unshard(attention(*local, is_causal=True, enable_gqa=True, **where), -2, length=n, **where)
        return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]

    for results in run_on_threads(3, body):
        for found, right in zip(results, sdpa(case, visible("causal", n, m)), strict=True):
            assert_near(found, right, 1e-12)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dim", [0, 1, -1, 3])
def test_shard_and_unshard_along_any_dim(dim: int, layout: str) -> None:
    """Of 2 rows on 3 ranks one rank has none."""
    x = torch.arange(7 * 8 * 2 * 9.0).view(7, 8, 9, 2)

    def body(mesh: ThreadMesh) -> tuple[Tensor, int]:
        local = shard(x, dim, mesh=mesh, layout=layout)
        return unshard(local, dim, length=x.shape[dim], mesh=mesh, layout=layout), local.shape[dim]

    results = run_on_threads(3, body)
    assert all(torch.equal(whole, x) for whole, _ in results)
    assert sum(rows for _, rows in results) == x.shape[dim]


def test_strategy_and_kernel_are_options() -> None:
    case = problem(17)

    def body(mesh: ThreadMesh, strategy: str) -> Tensor:
        local = [shard(x, 2, mesh=mesh) for x in (case.q, case.k, case.v)]
        return attention(*local, enable_gqa=True, mesh=mesh, strategy=strategy, kernel="math")

    messages = {}
    for strategy in ("auto", "ring", "gather"):
        with record_traffic() as traffic:
            parts = run_on_threads(4, lambda mesh, s=strategy: body(mesh, s))  # type: ignore[misc]
        assert_near(torch.cat(parts, 2), sdpa(case, visible("full", 17, 17))[0], 1e-12)
        messages[strategy] = [event.label for event in traffic.of(0).events if event.kind == "posted"]
    assert messages["auto"] == messages["ring"] == ["forward 0", "forward 1", "forward 2"]
    assert messages["gather"] == ["forward 0"]


STRATEGIES = ("halo", "gather", "ring", "ring2", "gather_q", "ring_q", "ulysses")


@pytest.mark.sample(3)
@pytest.mark.parametrize(("p", "strategy"), [(1, "auto"), *((3, name) for name in STRATEGIES), (4, "hybrid")])
@pytest.mark.parametrize("sizes", [(4,), (1, 4), (2, 4)])
def test_sinks_are_logits_that_lead_to_no_value(
    p: int, strategy: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    case = problem(17)
    logits = torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    asked: Any = {"window": 4, "is_causal": True} if strategy == "halo" else {"is_causal": True}

    def body(mesh: ThreadMesh) -> list[Tensor]:
        where: Any = {"mesh": mesh, "layout": "contiguous"}
        whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, logits)]
        local = [shard(x, 2, **where) for x in whole[:3]]
        out = attention(*local, sinks=whole[3], enable_gqa=True, strategy=strategy, **asked, **where)
        out = unshard(out, 2, length=17, **where)
        return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]

    q, k, v, sinks = leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, logits)]
    scores = (q @ k.repeat_interleave(2, 1).mT * case.scale).masked_fill(
        ~visible("window(4)" if strategy == "halo" else "causal", 17, 17), -torch.inf
    )
    beside = torch.cat([scores, sinks[..., None, None].expand(2, 4, 17, 1)], -1)
    out = beside.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    right = [out.detach(), *torch.autograd.grad(out, leaves, case.dout)]
    for found in run_on_threads(p, body):
        for ours, theirs in zip(found, right, strict=True):
            assert_near(ours, theirs, 1e-12)


def test_sinks_of_other_sizes_are_refused() -> None:
    case = problem(17)
    with pytest.raises(
        OptionError, match=r"one logit for each head, \[4\] or \[1 or 2, 4\] .* found \[5\] torch.float32"
    ):
        attention(case.q, case.k, case.v, sinks=torch.zeros(5), enable_gqa=True)


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randn(2, 4, 17, 17, dtype=torch.float64, generator=generator)
    return {"bias": numbers, "for all heads": numbers[:1, :1], "2-D": numbers[0, 0], "bool": numbers[:, :1] > -1}


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize(("p", "layout", "causal"), [(2, "contiguous", False), (3, "zigzag", True)])
def test_a_mask_is_cut_along_its_rows(name: str, p: int, layout: str, causal: bool) -> None:
    case, mask = problem(17), masks()[name]
    learned = mask.is_floating_point()

    def attended(where: dict[str, Any]) -> list[Tensor]:
        whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        given = mask.clone().requires_grad_(learned)
        local = [shard(x, 2, **where) for x in whole]
        how: Any = {"is_causal": causal, "enable_gqa": True, "scale": 0.4, **where}
        out = unshard(attention(*local, shard(given, -2, **where), **how), 2, length=17, **where)
        return [out.detach(), *torch.autograd.grad(out, [*whole, *[given] * learned], case.dout)]

    expected = attended({})
    for results in run_on_threads(p, lambda mesh: attended({"mesh": mesh, "layout": layout})):
        for found, right in zip(results, expected, strict=True):
            assert_near(found, right, 1e-12)


def dropped(mesh: Any, layout: str, strategy: str, seed: int = 3) -> list[Tensor]:
    """out and gradients with dropout, from a generator of `seed`."""
    case, where = problem(17), {"mesh": mesh, "layout": layout}
    whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    local = [shard(x, 2, **where) for x in whole]
    torch.manual_seed(seed)
    out = attention(*local, dropout_p=0.4, is_causal=True, enable_gqa=True, strategy=strategy, **where)  # type: ignore[arg-type]
    out = unshard(out, 2, length=17, **where)
    return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]


def test_dropout_is_the_same_on_any_number_of_ranks(ranks: Any) -> None:
    expected = dropped(None, "contiguous", "ring")
    for p, layout, strategy in ((2, "zigzag", "ring"), (3, "contiguous", "gather")):
        for results in ranks(p, dropped, None, layout, strategy):
            for found, right in zip(results, expected, strict=True):
                assert_near(found, right, 1e-12)
    assert not torch.equal(dropped(None, "contiguous", "ring", seed=4)[0], expected[0])


def dropped_by_unlike_generators() -> Tensor:
    return dropped(None, "contiguous", "ring", seed=3 + torch.distributed.get_rank())[0]


def test_the_seed_is_that_of_rank_0(ranks: Any) -> None:
    for found in ranks(2, dropped_by_unlike_generators):
        assert_near(found, dropped(None, "contiguous", "ring")[0], 1e-12)


def test_the_hybrid_is_over_the_nodes_that_the_launcher_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    case = problem(17)

    def body(mesh: ThreadMesh) -> Tensor:
        q, k, v = (shard(x, 2, mesh=mesh) for x in (case.q, case.k, case.v))
        out = attention(q, k, v, is_causal=True, enable_gqa=True, mesh=mesh, strategy="hybrid")
        return unshard(out, 2, length=17, mesh=mesh)

    for found in run_on_threads(4, body):
        assert_near(found, sdpa(case, visible("causal", 17, 17))[0], 1e-12)


# ---- refusals --------------------------------------------------------------------------------------------------------
X = torch.ones(1, 2, 4, 8)


def test_a_strategy_that_cannot_do_it() -> None:
    with pytest.raises(OptionError, match=r"strategy 'local' cannot do full .*: it moves no rows"):
        run_on_threads(2, lambda mesh: attention(X, X, X, mesh=mesh, strategy="local"))


@pytest.mark.parametrize("odd", [torch.zeros(8, 8), torch.zeros(4, 4), torch.zeros(3, 1, 4, 8), torch.zeros(1, 8)])
def test_a_mask_that_does_not_fit(odd: Tensor) -> None:
    def body(mesh: ThreadMesh) -> str:
        with pytest.raises(RingMismatchError) as raised:
            attention(X, X, X, odd if mesh.rank else torch.zeros(4, 8), mesh=mesh)
        return str(raised.value)

    (told,) = set(run_on_threads(2, body))  # on both ranks
    assert (
        f"the attn_mask of rank 1 is {[1] * (4 - odd.dim()) + list(odd.shape)}; expected [1 or 1, 1 or 2, 4, 8]" in told
    )


def test_shards_that_are_not_those_of_one_sequence() -> None:
    def body(mesh: ThreadMesh) -> None:
        with pytest.raises(RingMismatchError) as raised:
            attention(X[:, :, : 2 + mesh.rank], X, X, mesh=mesh)
        said = r"the ranks hold [2, 3, 4] rows of query, and a contiguous sequence of 9 is cut into [3, 3, 3]"
        assert said in str(raised.value)
        with pytest.raises(RingMismatchError, match=r"unshard: dim 2 has 4 rows, and rank . of 3 holds . rows of a"):
            unshard(X, 2, length=17, mesh=mesh)

    run_on_threads(3, body)
